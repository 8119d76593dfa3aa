"""A draft that prepares something is not waited for, and what it is late by counts for nothing."""

from __future__ import annotations

import pytest

from services.target.drafts.attachment import MAX_WARM_UP_S, DraftWarmUp
from services.target.drafts.attachments import Attachments
from shared.tokens import DraftReport
from tests.helpers.one_draft import commit, make_attachment, make_candidate, make_sequence, offer

BUSY, READY = DraftReport(is_warming=True), DraftReport()
STEP_S, WAIT_S = 0.01, 1.0


class _Rounds:
    """A sequence at a draft that answers after 5 ms, unless it is warming."""

    def __init__(self) -> None:
        self.attachments = Attachments(always_up_to=0)
        self.draft, self.sequence = make_attachment(wait_s=WAIT_S), make_sequence()
        self.attachments.attach(self.draft, [self.sequence], 0.0)
        self.now_s = 0.0
        for _ in range(4):
            self.verified()

    @property
    def waits_until_s(self) -> float:
        return self.attachments.readiness.deadline_s(self.sequence)

    def report(self, report: DraftReport) -> None:
        offer(self.attachments, [], self.now_s, report)

    def verified(self) -> None:
        self.now_s += 0.005
        offer(self.attachments, [make_candidate(self.sequence)], self.now_s)
        self._end((5, 6, 9), (0, 1))

    def plain(self) -> None:
        self._end((9,), ())

    def _end(self, tokens: tuple[int, ...], accepted: tuple[int, ...]) -> None:
        self.now_s += STEP_S
        commit(
            self.attachments,
            self.sequence,
            tokens,
            accepted=accepted,
            was_verified=bool(accepted),
            now_s=self.now_s,
        )


def test_who_waits_is_told_that_it_is_in_vain() -> None:
    rounds = _Rounds()
    assert rounds.waits_until_s > rounds.now_s
    rounds.report(BUSY)
    assert rounds.waits_until_s <= rounds.now_s
    rounds.plain()
    assert rounds.waits_until_s <= rounds.now_s, "nor does the next round"
    rounds.report(READY)
    rounds.plain()
    assert rounds.waits_until_s > rounds.now_s


def test_the_draft_is_not_blamed_for_it() -> None:
    rounds = _Rounds()
    response_s = rounds.draft.timeout.response_s
    rounds.report(BUSY)
    for _ in range(30):
        rounds.plain()
    rounds.now_s += 1.0
    offer(rounds.attachments, [make_candidate(rounds.sequence)], rounds.now_s, READY)
    assert rounds.draft.timeout.response_s == response_s
    assert not rounds.draft.timeout.is_cold
    assert rounds.draft.counters.num_missed_rounds == 0
    assert not rounds.draft.outbox.verdicts[-1].tree_request.is_paused


def test_a_silent_draft_is_blamed() -> None:
    """Negative control."""
    rounds = _Rounds()
    for _ in range(30):
        rounds.now_s = max(rounds.now_s, rounds.waits_until_s)
        rounds.plain()
    assert rounds.draft.timeout.is_cold
    assert rounds.draft.counters.num_missed_rounds > 0


def test_a_tree_that_is_here_is_verified_all_the_same() -> None:
    rounds = _Rounds()
    offer(rounds.attachments, [make_candidate(rounds.sequence)], rounds.now_s, BUSY)
    assert rounds.attachments.assignments.has_tree(rounds.sequence)


def test_nobody_warms_for_ever() -> None:
    rounds = _Rounds()
    rounds.report(BUSY)
    rounds.now_s += MAX_WARM_UP_S
    rounds.plain()
    assert rounds.waits_until_s > rounds.now_s
    rounds.report(BUSY)
    assert rounds.waits_until_s > rounds.now_s, "however often it says so"


@pytest.mark.parametrize(
    ("since_s", "now_s", "expected"),
    [(0.0, 0.5, False), (0.0, 1.5, True), (1.5, 1.7, True), (1.5, 3.0, True), (2.5, 3.0, False)],
)
def test_what_overlaps_with_it_is_known_afterwards(
    since_s: float, now_s: float, *, expected: bool
) -> None:
    warm_up = DraftWarmUp()
    if now_s >= 1.0:
        warm_up.report(1.0, is_warming=True)
        warm_up.report(1.1, is_warming=True)
    if now_s >= 2.0:
        warm_up.report(2.0, is_warming=False)
    assert warm_up.was_on(since_s, now_s) is expected


def test_its_rounds_say_nothing_about_what_trees_bring() -> None:
    rounds = _Rounds()
    policy = rounds.draft.policy
    policy._num_cold = 0
    policy.turn(1, rounds.now_s)
    before = policy.times.measured()
    rounds.report(BUSY)
    for _ in range(9):
        rounds.plain()
    rounds.now_s += 0.001
    rounds.report(READY)
    rounds.plain()  # it overlaps with the warm-up
    policy.turn(1, rounds.now_s)
    assert policy.times.measured() == before
    rounds.now_s += 1.0
    rounds.plain()
    policy.turn(1, rounds.now_s)
    assert policy.times.measured() != before, "negative control"


def test_what_overlaps_with_it_is_known_when_it_takes_too_long() -> None:
    warm_up = DraftWarmUp()
    warm_up.report(1.0, is_warming=True)
    assert warm_up.was_on(MAX_WARM_UP_S, MAX_WARM_UP_S + 2.0)
    assert not warm_up.is_on(MAX_WARM_UP_S + 2.0)
    assert not warm_up.was_on(MAX_WARM_UP_S + 1.0, MAX_WARM_UP_S + 2.0)
