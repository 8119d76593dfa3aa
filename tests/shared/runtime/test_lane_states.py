"""Rounds over recurrent states, planned on the device, compute each node as if from the start."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_runner import RoundSlots
from shared.runtime.round_state import NewLane, RoundState
from shared.runtime.round_verification import RoundVerification
from shared.runtime.runner import ModelRunner
from shared.speculation.tree import NO_TOKEN, rows_of_parents
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.engines import recurrent_decoder

CPU = torch.device("cpu")
PAGE_SIZE, NUM_SLOTS, NUM_PAGES = 4, 3, 120
GREEDY = SamplingParams(temperature=0.0)
PARENTS = {
    # The last rows of the second are not there.
    TreeShape(3, 2, 6): [[0, 0, 0, 1, 2, 3], [0, 0, 1, 0, 0, 0], [0, 0, 1, 2, 0, 1]],
    TreeShape(3, 1, 4): [[0, 0, 1, 2]] * 3,
}
PADDED = {TreeShape(3, 2, 6): [6, 3, 6], TreeShape(3, 1, 4): [4, 2, 4]}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return recurrent_decoder(tmp_path_factory.mktemp("recurrent"))


class Rounds:
    """Rounds of trees that a test makes up.

    Attributes:
        texts: committed tokens by slot.
        num_advanced: tokens by which a planned step advanced states.
    """

    def __init__(self, decoder: Decoder, tree: TreeShape, num_states: int) -> None:
        self.tree, self._decoder = tree, decoder
        self._pool = KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CPU, num_states=num_states)
        self._runner = ModelRunner(decoder, self._pool)
        self._fresh = ModelRunner(decoder, KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CPU))
        shape = RoundShape.of(tree, draft_vocab_size=99, max_context_tokens=100)
        self._state = RoundState.empty(
            NUM_SLOTS, max_open_rows=shape.max_committed, num_pages=30, device=CPU
        )
        self._slots = RoundSlots(self._state, decoder, self._pool)
        self._batches = RoundBatches(shape, PAGE_SIZE)
        self.states = self._pool.states
        self._verification = RoundVerification(
            decoder, self._pool, shape, None, None, self._slots.states
        )
        self._random = random.Random(5)
        self.texts: dict[int, list[int]] = {}
        assert self.states is not None
        self._plan = self.states.plan
        self.states.plan = self._counted  # type: ignore[method-assign]
        self.num_advanced = 0

    def _counted(self, *arguments):  # type: ignore[no-untyped-def]
        plan = self._plan(*arguments)
        self.num_advanced = int(plan.sequences[:, 3].sum() + plan.chunks[:, 1].sum())
        return plan

    @staticmethod
    def pages(number: int) -> list[int]:
        return list(range(1 + 30 * number, 31 + 30 * number))

    def compute(self, number: int, tokens: Sequence[int], start: int = 0) -> Tensor:
        """Takes a planned step; returns its logits."""
        rows = SequenceRows.causal(tokens, start, self.pages(number), range(len(tokens)))
        return self._runner.run(build_batch([rows], page_size=PAGE_SIZE, device=CPU)).logits

    @torch.inference_mode()
    def join(self, *numbers: int) -> None:
        """Gives sequences lanes, the first free slots."""
        lanes = [
            NewLane(number, self.texts[number], GREEDY, self.pages(number), (), 0)
            for number in numbers
        ]
        self._slots.fill(self._slots.take(lanes))

    @torch.inference_mode()
    def leave(self, number: int) -> None:
        self._slots.remove([number])

    @torch.inference_mode()
    def round(self) -> None:
        """Verifies random trees, checks what every node computes, and accepts a random path."""
        tokens = torch.tensor([[self._random.randrange(13) for _ in range(self.rows)]] * NUM_SLOTS)
        for row, count in zip(tokens, PADDED[self.tree], strict=True):
            row[count:] = NO_TOKEN
        by_slot = {placed.slot: number for number, placed in self._slots.placed.items()}
        for slot, number in by_slot.items():
            tokens[slot, 0] = self.texts[number][-1]
        parents = torch.tensor(PARENTS[self.tree])
        trees = rows_of_parents(tokens, parents, self.tree.num_steps)
        tree = self._batches.of_trees(self._state, trees)
        verified = self._verification.forward(tree)
        logits = verified.logits.view(NUM_SLOTS, self.rows, -1)
        # Siblings hold other tokens, so that one path at most is what was drawn.
        drawn = torch.full((NUM_SLOTS, self.rows), 12)
        for slot, number in by_slot.items():
            for row in range(PADDED[self.tree][slot]):
                path = [int(tokens[slot, each]) for each in trees.visible[slot, row].nonzero()]
                expected = self._text_logits([*self.texts[number][:-1], *path])
                assert torch.equal(logits[slot, row], expected)
            for row in range(self.rows):
                below = (parents[slot] == row) & (tokens[slot] != NO_TOKEN)
                below[0] = False
                if below.any() and self._random.random() < 0.7:
                    drawn[slot, row] = tokens[slot][below][0]
        result = self._verification.finish(self._state, tree, verified.output, drawn).result
        for slot, number in by_slot.items():
            count, _, *committed = result[slot].tolist()
            self.texts[number] += committed[:count]

    @property
    def rows(self) -> int:
        return self.tree.num_draft_tokens

    def _text_logits(self, tokens: Sequence[int]) -> Tensor:
        rows = SequenceRows.causal(tokens, 0, self.pages(0), [len(tokens) - 1])
        return self._fresh.run(build_batch([rows], page_size=PAGE_SIZE, device=CPU)).logits[0]

    def check_step(self, number: int, most_advanced: int) -> None:
        """Goes on with a planned step, which advances states by a few tokens at most."""
        text = self.texts[number]
        logits = self.compute(number, text[-1:], len(text) - 1)
        assert 0 < self.num_advanced <= most_advanced
        assert torch.equal(logits[0], self._text_logits(text))
        text.append(1)


@pytest.mark.parametrize("tree", PARENTS, ids=str)
def test_nodes_are_computed_as_from_the_start(decoder: Decoder, tree: TreeShape) -> None:
    """Lanes come and go, beside a slot that is empty at first, and go on in planned steps and back
    in lanes."""
    rounds = Rounds(decoder, tree, num_states=4)
    rounds.texts = {0: [3, 1, 4, 1, 5, 9, 2], 1: [2, 7, 1, 8], 2: [6, 6]}
    for number, text in rounds.texts.items():
        rounds.compute(number, text[:-1])
    rounds.join(0, 1)
    for _ in range(3):
        rounds.round()
    rounds.join(2)
    rounds.round()
    rounds.leave(0)
    rounds.round()
    # What the last round of its lane committed, and the own token.
    rounds.check_step(0, tree.num_steps + 2)
    rounds.check_step(0, 1)
    rounds.join(0)
    for _ in range(2):
        rounds.round()
    rounds.leave(1)
    rounds.check_step(1, tree.num_steps + 2)


def test_lanes_that_begin_alike_part(decoder: Decoder) -> None:
    """Two start from one checkpoint, of no more than there are lanes."""
    rounds = Rounds(decoder, TreeShape(3, 2, 6), num_states=2)
    rounds.texts = {0: [3, 1, 4, 1, 5, 9, 2, 6, 1], 1: [3, 1, 4, 1, 5, 9, 2, 6, 7]}
    shared = rounds.pages(0)[:2]
    own = Rounds.pages
    rounds.pages = lambda number: [*shared, *own(number)[2:]]  # type: ignore[method-assign]
    rounds.compute(0, rounds.texts[0][:-1])
    rounds.join(0, 1)
    for _ in range(3):
        rounds.round()


def test_a_lane_keeps_its_state_beside_planned_steps(decoder: Decoder) -> None:
    """Others find none that is free, and take nothing from a lane."""
    rounds = Rounds(decoder, TreeShape(3, 1, 4), num_states=1)
    rounds.texts = {0: [3, 1, 4, 1, 5], 1: [2, 7, 1, 8]}
    rounds.compute(0, rounds.texts[0][:-1])
    rounds.join(0)
    rounds.compute(1, rounds.texts[1][:-1])
    rounds.round()
    rounds.check_step(1, 4)
    rounds.round()
    rounds.leave(0)
    # The state that was lent may be another's now, by its stamps alone.
    rounds.check_step(1, 5)
    rounds.check_step(0, len(rounds.texts[0]))
