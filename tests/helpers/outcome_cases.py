"""Lanes for whose verdicts a language model prepares chains, and an oracle for these chains."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.outcome_chains import OutcomeChains
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_head import CatchUp, HeadBacklog
from shared.runtime.round_state import LENGTH, OPEN, TAIL, RoundState, SlotSequence
from shared.runtime.tree_draft import DraftCode
from shared.runtime.tree_model import DecoderModel
from shared.speculation.distributions import gumbel_noise
from shared.speculation.tree import NO_TOKEN
from shared.tokens import SamplingParams, TreeShape

PAGE_SIZE, NUM_STEPS, NUM_OUTCOMES = 4, 3, 4
_NUM_PAGES = 40
_PAGES_A_LANE = 12


@dataclass(frozen=True)
class OutcomeLane:
    """A sequence between two verdicts.

    Attributes:
        num_open: tokens at its end that the draft has not read.
        verified: the chain that the target verifies; empty without one.
    """

    token_ids: tuple[int, ...]
    num_open: int
    verified: tuple[int, ...]
    sampling: SamplingParams


GREEDY = SamplingParams(temperature=0.0)
LANES = (
    OutcomeLane((3, 1, 4, 1, 5), 1, (9, 2, 6), GREEDY),
    OutcomeLane((2, 7, 1, 8, 2, 8, 1, 8), 4, (), GREEDY),
    OutcomeLane((1, 6, 1, 8, 0, 3, 3), 2, (3, 9, 8), SamplingParams(temperature=0.9, seed=5)),
)


class OutcomeCase:
    """Chains that a model prepared for `LANES`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, device = decoder, decoder.device
        shape = RoundShape.of(
            TreeShape(NUM_STEPS, 1, NUM_STEPS + 1),
            draft_vocab_size=decoder.num_proposed,
            max_context_tokens=30,
            num_outcomes=NUM_OUTCOMES,
        )
        pool = KvPool(decoder.kv_layout(PAGE_SIZE), _NUM_PAGES, device)
        drafts = DecoderModel(decoder, pool)
        pages = [
            range(1 + number * _PAGES_A_LANE, 1 + (number + 1) * _PAGES_A_LANE)
            for number in range(len(LANES))
        ]
        CatchUp(drafts, None).run(
            HeadBacklog(lane.token_ids, 0, len(lane.token_ids) - 1 - lane.num_open, own, own)
            for lane, own in zip(LANES, pages, strict=True)
        )
        self.state = RoundState.empty(
            len(LANES) + 1,  # one lane stays free
            max_open_rows=shape.max_committed,
            num_pages=shape.num_pages(PAGE_SIZE),
            device=device,
        )
        self.chains = OutcomeChains(shape, len(LANES) + 1, device)
        for number, (lane, own) in enumerate(zip(LANES, pages, strict=True)):
            tokens = lane.token_ids
            slot = SlotSequence(len(tokens), tokens[-1], lane.sampling, own, own)
            self.state.place({number: slot})
            self.state.numbers[number, OPEN] = lane.num_open
            opened = torch.tensor(tokens[-lane.num_open :], device=device)
            self.state.numbers[number, TAIL : TAIL + lane.num_open] = opened
        self.chains.begin(_rows(device))
        self.code: DraftCode = drafts.code(RoundBatches(shape, PAGE_SIZE), None)

    def committed(self, lane: int, token_ids: tuple[int, ...]) -> RoundState:
        """Returns the state after a verdict that commits tokens to a lane."""
        numbers = self.state.numbers.clone()
        numbers[lane, LENGTH] += len(token_ids)
        numbers[lane, OPEN] = len(token_ids)
        numbers[lane, TAIL : TAIL + len(token_ids)] = torch.tensor(token_ids, device=numbers.device)
        return RoundState(
            numbers, self.state.sampling, self.state.page_table, self.state.head_page_table
        )

    def continuation(self, lane: OutcomeLane, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the model's next `NUM_STEPS` tokens, each computed from scratch."""
        tokens = list(token_ids)
        for _ in range(NUM_STEPS):
            logits = self._logits(tokens)
            if lane.sampling.temperature:
                seed = torch.tensor([lane.sampling.seed], device=logits.device)
                position = torch.tensor([len(tokens)], device=logits.device)
                noise = gumbel_noise(seed, position, len(logits))[0]
                logits = logits + lane.sampling.temperature * noise
            tokens.append(int(logits.argmax()))
        return tuple(tokens[len(token_ids) :])

    def _logits(self, tokens: list[int]) -> Tensor:
        device = self._decoder.device
        pool = KvPool(self._decoder.kv_layout(PAGE_SIZE), _NUM_PAGES, device)
        rows = SequenceRows.causal(tokens, 0, range(1, _NUM_PAGES), [len(tokens) - 1])
        batch = build_batch([rows], page_size=PAGE_SIZE, device=device)
        hidden = self._decoder.forward(batch, pool).hidden
        return self._decoder.logits(hidden.index_select(0, batch.logit_rows))[0]


def _rows(device: torch.device) -> Tensor:
    chains = [*(lane.verified for lane in LANES), ()]
    rows = [[0, *(chain or [NO_TOKEN] * NUM_STEPS)] for chain in chains]
    return torch.tensor(rows, device=device)


def check_chains(case: OutcomeCase) -> None:
    """Checks each prepared chain against the model, computed from scratch."""
    for number, lane in enumerate(LANES):
        outcomes = set[tuple[int, int]]()
        for place in range(NUM_OUTCOMES):
            depth = int(case.chains.lengths[number, place]) - len(lane.token_ids) - 1
            token = int(case.chains.last_tokens[number, place])
            assert 0 <= depth <= len(lane.verified)
            assert token not in lane.verified[depth : depth + 1], "that would be accepted"
            outcomes.add((depth, token))
            committed = (*lane.verified[:depth], token)
            expected = case.continuation(lane, (*lane.token_ids, *committed))
            assert tuple(case.chains.chains[number, place].tolist()) == expected
            trees = case.chains.select(case.committed(number, committed))
            assert trees[number, 0].tolist() == [token, *expected]
            assert trees[number, 1].tolist() == [0, *range(NUM_STEPS)]
            case.chains.verified.copy_(case.chains.decided)
        assert len(outcomes) == NUM_OUTCOMES, "a verdict was prepared for twice"
