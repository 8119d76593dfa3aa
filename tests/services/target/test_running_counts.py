"""Running counts are those of counting everything anew, whatever the sequences went through."""

from __future__ import annotations

import random

import pytest
import torch

from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.scheduler import ScheduledSequence
from services.target.sequence import Sequence
from services.target.verifier import RunningCounts
from shared.speculation.row_sampling import TokenCounts
from shared.speculation.tree import row_paths
from shared.tokens import EMPTY_TREE, SamplingParams, StopParams, TokenTree
from tests.helpers.token_counts import TokenHistory, count_tokens

CPU = torch.device("cpu")
VOCAB_SIZE = 12
LIMITS = ModelLimits(VOCAB_SIZE, 1000, 1000, frozenset())
PENALISED, PLAIN = SamplingParams(repetition_penalty=1.2), SamplingParams()


def _sequence(sequence_id: int, source: random.Random, sampling: SamplingParams) -> Sequence:
    prompt = tuple(source.randrange(VOCAB_SIZE) for _ in range(source.randint(1, 9)))
    request = GenerationRequest("r", prompt, sampling, StopParams(500), 0.0)
    return Sequence(sequence_id, request, LIMITS)


def _entry(sequence: Sequence, tree: TokenTree = EMPTY_TREE) -> ScheduledSequence:
    nodes = tuple(range(len(tree)))
    return ScheduledSequence(sequence, 0, 1, tree, nodes, is_complete=True)


def _expected(entries: list[ScheduledSequence], pending: dict[int, int]) -> TokenCounts:
    histories = []
    for entry in entries:
        sequence = entry.sequence
        extra = [pending[sequence.sequence_id]] if sequence.num_pending else []
        histories.append(
            TokenHistory(
                sequence.request.prompt_token_ids,
                [*sequence.output_token_ids, *extra],
                row_paths(entry.tree),
                sequence.sampling.has_penalties,
            )
        )
    counts = count_tokens(histories, vocab_size=VOCAB_SIZE, device=CPU)
    assert counts is not None
    return counts


def _check(
    running: RunningCounts, entries: list[ScheduledSequence], pending: dict[int, int]
) -> None:
    inputs: list[int] = []
    for entry in entries:
        sequence = entry.sequence
        root = pending.get(sequence.sequence_id, sequence.token_ids[-1])
        inputs += [root, *entry.tree.token_ids]
    found = running.of(entries, torch.tensor(inputs), VOCAB_SIZE)
    expected = _expected(entries, pending)
    rows = [
        entry.sequence.sampling.has_penalties
        for entry in entries
        for _ in range(1 + len(entry.tree))
    ]
    assert torch.equal(found.output[rows], expected.output[rows])
    assert torch.equal(found.occurs[rows], expected.occurs[rows])


def _tree(source: random.Random) -> TokenTree:
    num_nodes = source.randint(0, 5)
    parents = tuple(source.choice([None, *range(node)]) for node in range(num_nodes))
    return TokenTree(tuple(source.randrange(VOCAB_SIZE) for _ in range(num_nodes)), parents)


@pytest.mark.parametrize("seed", range(4))
def test_random_life(seed: int) -> None:
    """Sequences join, leave, change places, carry trees or run ahead of what is read."""
    source, running = random.Random(seed), RunningCounts()
    live = [_sequence(0, source, PENALISED)]
    for step in range(1, 150):
        if source.random() < 0.2:
            live.append(_sequence(step, source, source.choice([PENALISED, PENALISED, PLAIN])))
        if len(live) > 1 and source.random() < 0.15:
            live.remove(next(each for each in live if each is not live[0]))
        if source.random() < 0.1:
            source.shuffle(live)
        if not any(each.sampling.has_penalties for each in live):
            live.append(_sequence(step, source, PENALISED))
        runs_ahead = source.random() < 0.6
        pending: dict[int, int] = {}
        for each in live:
            if runs_ahead and each.has_output and source.random() < 0.8:
                pending[each.sequence_id] = source.randrange(VOCAB_SIZE)
                each.num_pending = 1
        entries = [_entry(each, EMPTY_TREE if runs_ahead else _tree(source)) for each in live]
        _check(running, entries, pending)
        for each in live:
            read = pending.get(each.sequence_id)
            num_drawn = 0 if read is not None else source.choice([0, 1, 1, 3])
            drawn = [source.randrange(VOCAB_SIZE) for _ in range(num_drawn)]
            each.num_pending = 0
            if read is not None or drawn:
                each.commit(drawn if read is None else [read])


def test_counts_miss_nothing_of_steps_that_needed_none() -> None:
    source, running = random.Random(0), RunningCounts()
    sequence = _sequence(1, source, PENALISED)
    _check(running, [_entry(sequence)], {})
    sequence.commit([3, 3, 5])
    sequence.commit([7])
    _check(running, [_entry(sequence)], {})
