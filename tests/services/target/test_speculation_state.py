"""Speculation that does nothing says so: in the log, to operators and in metrics."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry

from services.target.admin_service import attachment_message
from services.target.drafts.attachment import AttachmentStatus, IdleReason
from services.target.drafts.attachments import Attachments
from services.target.drafts.draft_exchange import (
    FIRST_LOG_PAUSE_S,
    POLL_S,
    SpeculationState,
)
from services.target.metrics import WantedMetrics
from services.target.rounds.policy import LanePolicy
from services.target.throughput import CostTable
from shared.tokens import TreeShape
from tests.helpers.one_draft import with_one_draft

SHAPE = TreeShape(3, 2, 6)


@dataclass
class Lanes:
    """Lanes with a given answer."""

    pays: bool | None = None

    def comparison(self) -> str:
        return "expected with 1 sequence: plain steps 100 tokens/s"


def _status(state: SpeculationState, attachments: Attachments, now_s: float) -> AttachmentStatus:
    [status] = attachments.statuses()
    return state.explained(status, now_s)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return lines


def test_each_change_is_logged_once_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    attachments, _, _ = with_one_draft()
    lanes = Lanes()
    state = SpeculationState(attachments, lanes)
    caplog.set_level(logging.INFO)
    state.update(0.0)
    assert not _lines(caplog)
    lanes.pays = False
    for number in range(1, 20):
        state.update(number * POLL_S)
    [line] = _lines(caplog)
    assert line == f"speculation is off: {state.detail}"
    assert state.detail == f"trees bring too little here: {lanes.comparison()}"
    lanes.pays = True
    state.update(20 * POLL_S)
    assert state.detail == ""
    assert _lines(caplog) == [f"speculation is on: {lanes.comparison()}"]
    for number in range(1, 1000):
        lanes.pays = not lanes.pays
        state.update(20 * POLL_S + number * FIRST_LOG_PAUSE_S)
    assert 5 < len(_lines(caplog)) < 30, "a line a moment would hide all others"


def test_operators_see_why_a_draft_is_idle() -> None:
    attachments, attachment, _ = with_one_draft()
    lanes = Lanes()
    state = SpeculationState(attachments, lanes)
    state.update(0.0)
    assert _status(state, attachments, 0.0).idle is None
    lanes.pays = False
    state.update(1.0)
    status = _status(state, attachments, 1.0)
    assert attachment_message(status).idle_detail == state.detail
    assert _idle_metric(status, IdleReason.PLAIN_IS_FASTER) == 1.0
    for number in range(3):
        attachment.timeout.missed(float(number))
    status = _status(state, attachments, 3.0)
    assert _idle_metric(status, IdleReason.SILENT) == 1.0
    assert "does not answer" in attachment_message(status).idle_detail


def test_nothing_is_off_where_no_draft_is_attached() -> None:
    attachments, attachment, _ = with_one_draft()
    state = SpeculationState(attachments, Lanes(pays=False))
    state.update(0.0)
    assert state.detail
    attachments.detach(attachment.identity.attachment_id, 1.0)
    state.update(1.0)
    assert state.detail == ""


def test_a_silent_draft_is_logged_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    attachments, attachment, _ = with_one_draft()
    state = SpeculationState(attachments, Lanes())
    caplog.set_level(logging.INFO)
    for number in range(3):
        attachment.timeout.missed(float(number))
    state.update(3.0)
    state.update(4.0)
    [line] = _lines(caplog)
    assert line.startswith("draft worker-a: it does not answer")
    attachment.timeout.responded(0.01)
    state.update(4.0 + FIRST_LOG_PAUSE_S)
    assert _lines(caplog) == ["draft worker-a: its trees arrive in time again"]


@pytest.mark.parametrize("round_s", [0.002, 0.1])
def test_lanes_name_the_figures_of_their_choice(round_s: float) -> None:
    policy = LanePolicy((SHAPE,), CostTable({1: 0.01}, {SHAPE: {1: round_s}}))
    assert policy.pays is None
    is_fast = round_s < 0.01
    assert (policy.choose(1, 0, (SHAPE,), 0.0) is not None) == is_fast
    assert policy.pays is is_fast
    assert policy.comparison().startswith(
        "expected with 1 sequence: plain steps 100 tokens/s, the best trees (3 deep, 2 wide) "
    )


def _idle_metric(status: AttachmentStatus, reason: IdleReason) -> float | None:
    registry = CollectorRegistry()
    registry.register(WantedMetrics(lambda: [status]))
    labels = {"attachment": "a", "worker": "worker-a", "algorithm": "NGRAM"}
    return registry.get_sample_value(
        "outrider_target_draft_idle", {**labels, "reason": reason.value}
    )
