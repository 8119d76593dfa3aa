"""A `SelectionRunner` over its own pages, and the outputs of plain decoding as its oracle."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.round_runner import RoundLimits
from shared.runtime.round_selection import MAX_PREPARED, Ending, PreparedTree
from shared.runtime.round_state import NewLane, SequenceRound
from shared.runtime.runner import ModelRunner
from shared.runtime.selection_runner import SelectionRunner, covering_shape
from shared.tokens import EMPTY_TREE, SamplingParams, StopParams, TokenTree
from tests.helpers.engines import PAGE_SIZE, VOCAB_SIZE, request, run_plain
from tests.helpers.poisoned import poison_padding

NUM_PAGES = 160
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    SamplingParams(temperature=0.7, seed=2**63 + 9),
)


def plain_answers(
    decoder: Decoder, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams], n: int
) -> list[list[int]]:
    """Returns each prompt with `n` tokens of plain decoding behind it."""
    requests = [
        request(prompt, sampling, StopParams(n))
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    collector = run_plain(decoder, requests)
    return [[*prompt, *collector.token_ids(key)] for key, prompt in enumerate(prompts)]


class SelectedRounds:
    """Sequences whose right continuations are known.

    Attributes:
        committed: tokens of each sequence, as far as results have been read.
    """

    def __init__(
        self, decoder: Decoder, answers: Sequence[Sequence[int]], max_sequences: int = 8
    ) -> None:
        self.answers = answers
        self.committed: dict[int, int] = {}
        self._decoder = decoder
        layout = decoder.kv_layout(PAGE_SIZE)
        self._pool = poison_padding(KvPool(layout, NUM_PAGES, decoder.device))
        self._free = random.Random(3).sample(range(1, NUM_PAGES), NUM_PAGES - 1)
        self._pages: dict[int, list[int]] = {}
        self.runner = SelectionRunner(
            decoder=decoder, pool=self._pool, limits=RoundLimits(max_sequences, 128)
        )

    def place(self, number: int, num_tokens: int, sampling: SamplingParams) -> None:
        """Computes all but the last of the first `num_tokens` tokens; gives the sequence a slot."""
        tokens = self.answers[number][:num_tokens]
        pages = self._pages.setdefault(number, [])
        self._grow(pages, num_tokens)
        self._compute(tokens[:-1], pages)
        self.committed[number] = num_tokens
        self.runner.place([NewLane(number, tokens, sampling, pages, (), 0)])

    def prepare(self, prepared: Mapping[int, Sequence[PreparedTree]]) -> None:
        shape = covering_shape(tree.tree for trees in prepared.values() for tree in trees)
        assert shape is not None
        for number in self.runner.sequence_ids:
            pages = self._pages[number]
            self._grow(pages, self.runner.longest(number) - 1 + shape.num_draft_tokens)
            self.runner.set_pages(number, pages, ())
        self.runner.prepare(prepared, shape)

    def launch(self, prepared: Mapping[int, Sequence[PreparedTree]]) -> None:
        self.prepare(prepared)
        self.runner.launch()

    def result(self) -> dict[int, SequenceRound]:
        """Reads a round and checks its committed tokens."""
        results = {result.sequence_id: result for result in self.runner.result()}
        for number, result in results.items():
            start = self.committed[number]
            self.committed[number] = end = start + len(result.token_ids)
            assert list(result.token_ids) == self.answers[number][start:end]
        return results

    def right(self, number: int, num_nodes: int, start: int | None = None) -> TokenTree:
        """Returns the right chain after `start` tokens, by default after the committed ones."""
        start = self.committed[number] if start is None else start
        return TokenTree.chain(self.answers[number][start : start + num_nodes])

    def bushy(
        self, number: int, num_nodes: int, source: random.Random, start: int | None = None
    ) -> TokenTree:
        """Returns the right chain hidden among wrong nodes, some with a sibling's token."""
        start = self.committed[number] if start is None else start
        tokens: list[int] = []
        parents: list[int | None] = []
        path: int | None = None
        for right in self.answers[number][start : start + num_nodes]:
            wrong = [source.randrange(VOCAB_SIZE) for _ in range(source.randrange(3))]
            tokens += [*wrong, right]
            parents += [path] * (len(wrong) + 1)
            path = len(tokens) - 1
        return TokenTree(tuple(tokens), tuple(parents))

    def after(self, number: int, tree: TokenTree) -> tuple[int, Ending]:
        """Returns the number of committed tokens after a round that verifies `tree`, and how that
        round ends."""
        row, place = 0, self.committed[number]
        while True:
            wanted = None if row == 0 else row - 1
            token = self.answers[number][place]
            children = [
                node
                for node, parent in enumerate(tree.parent_indices)
                if parent == wanted and tree.token_ids[node] == token
            ]
            place += 1
            if not children:
                return place, Ending(row, token)
            row = children[0] + 1

    def _grow(self, pages: list[int], num_tokens: int) -> None:
        while len(pages) * PAGE_SIZE < num_tokens:
            pages.append(self._free.pop())

    def _compute(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        rows = SequenceRows.causal(token_ids, 0, pages, (0,))
        batch = build_batch([rows], page_size=PAGE_SIZE, device=self._decoder.device)
        with torch.inference_mode():
            ModelRunner(self._decoder, self._pool).run(batch)


def play(rounds: SelectedRounds, source: random.Random, *, num_tokens: int) -> None:
    """Runs rounds of random shapes over some of the sequences, some without any tree and some with
    the next round launched ahead, until a sequence has `num_tokens` more tokens."""
    starts = dict(rounds.committed)
    while max(rounds.committed[number] - starts[number] for number in starts) < num_tokens:
        most = source.choice([0, 7, 7])
        trees = {
            number: rounds.bushy(number, source.randint(0, most), source)
            for number in starts
            if source.random() < 0.8
        }
        if not trees:
            continue
        rounds.launch(
            {
                number: [PreparedTree(rounds.committed[number], tree)]
                for number, tree in trees.items()
            }
        )
        if source.random() < 0.5:
            rounds.result()
            continue
        prepared = {}
        for number, tree in trees.items():
            count, ending = rounds.after(number, tree)
            right = rounds.bushy(number, source.randint(0, min(most, 4)), source, count)
            wrong = [
                PreparedTree(count, EMPTY_TREE, Ending(source.randrange(9), VOCAB_SIZE))
                for _ in range(source.randrange(MAX_PREPARED))
            ]
            prepared[number] = [*wrong, PreparedTree(count, right, ending)]
        rounds.launch(prepared)
        rounds.result()
        results = rounds.result()
        assert {number for number, result in results.items() if result.token_ids} == set(trees)
