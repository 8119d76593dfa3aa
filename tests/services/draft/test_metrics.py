"""The draft's metrics: what a scrape says after a few rounds."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.draft.drafters.drafter import Proposal
from services.draft.events import Probe
from services.draft.metrics import DraftMetrics, DraftRecorder
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import OpenedSequence, Outcome, SamplingParams, TokenTree, Verdict

KEY = SequenceKey(1, 7)
TREE = TokenTree((1, 2, 3), (None, 0, 1))


def _sequence() -> DraftSequence:
    return DraftSequence(KEY, [1, 2], 2, SamplingParams(), 0, True, 100, 8, draft_s=0.25)


def _verdict(outcome: Outcome, *accepted: int) -> Verdict:
    return Verdict(7, 0, outcome, accepted, (*accepted, 9), 2 + len(accepted) + 1)


def _scrape(recorder: DraftRecorder) -> str:
    registry = CollectorRegistry()
    registry.register(DraftMetrics(recorder.counters, lambda: {"sequence_count": 1.0}))
    return generate_latest(registry).decode()


def test_rounds_are_counted_by_outcome(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "services.draft.metrics")
    recorder, sequence = DraftRecorder(), _sequence()
    recorder.opened(KEY, OpenedSequence(7, (1, 2), 2, SamplingParams(), 0, request_id="abc"))
    recorder.proposed([Proposal(sequence, TREE), Proposal(sequence, TREE)], 0.003)
    recorder.decided(KEY, _verdict(Outcome.VERIFIED, 0, 1))
    recorder.decided(KEY, _verdict(Outcome.MISSED))
    recorder.drafted_ahead(2, 0.5)
    recorder.drafted_ahead(0, 0.25)
    recorder.caught_up(5, 0.125)
    recorder.counters.num_released += 1
    recorder.closed(sequence)
    recorder.closed(sequence)
    text = _scrape(recorder)
    for line in (
        "outrider_draft_trees_total 2.0",
        "outrider_draft_tree_tokens_total 6.0",
        "outrider_draft_pushed_trees_total 2.0",
        "outrider_draft_ahead_steps_total 2.0",
        "outrider_draft_ahead_seconds_total 0.75",
        "outrider_draft_caught_up_tokens_total 5.0",
        "outrider_draft_caught_up_seconds_total 0.125",
        "outrider_draft_accepted_tokens_total 2.0",
        "outrider_draft_opened_sequences_total 1.0",
        "outrider_draft_released_sequences_total 1.0",
        'outrider_draft_verdicts_total{outcome="verified"} 1.0',
        'outrider_draft_verdicts_total{outcome="missed"} 1.0',
        'outrider_draft_verdicts_total{outcome="stale"} 0.0',
        'outrider_draft_batch_seconds_bucket{le="0.002"} 0.0',
        'outrider_draft_batch_seconds_bucket{le="0.005"} 1.0',
        "outrider_draft_sequence_count 1.0",
    ):
        assert line in text.splitlines()
    [line] = caplog.records
    facts = (line.num_rounds, line.num_verified_rounds, line.num_accepted, line.draft_s)  # type: ignore[attr-defined]
    assert facts == (2, 1, 2, 0.25)


def test_a_probe_is_no_targets_sequence() -> None:
    recorder = DraftRecorder()
    recorder.opened(KEY, Probe(7, (1, 2), 2, SamplingParams(), 0))
    recorder.closed(_sequence())
    assert "outrider_draft_opened_sequences_total 0.0" in _scrape(recorder)
