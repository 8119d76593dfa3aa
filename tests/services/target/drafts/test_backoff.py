"""A draft that is of no use is left alone, for longer each time, and found again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.control.regime import Stance
from services.target.control.speculation_controller import SpeculationController
from services.target.drafts.attachments import Attachments
from services.target.drafts.backoff import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    MISSES_WHEN_SILENT,
    MISSES_WHEN_SLOW,
    TRIED_ROUNDS,
    TRY_COST,
    Backoff,
)
from services.target.fallback_order import FallbackOrder
from shared.tokens import DraftReport, TreeShape, Verdict
from tests.helpers.one_draft import (
    commit,
    make_attachment,
    make_candidate,
    make_sequence,
    offer,
)

PINNED = TreeShape(3, 1, 4)


def _miss(backoff: Backoff, now_s: float, waited_s: float = 0.0, num_sequences: int = 1) -> bool:
    backoff.count(now_s, waited_s, was_verified=False)
    return backoff.begins(now_s, num_sequences, is_silent=True, pays=True)


def _fail_try(backoff: Backoff, now_s: float, waited_s: float = 0.0) -> None:
    assert not backoff.goes_on(now_s)
    assert backoff.is_trying
    assert _miss(backoff, now_s, waited_s)


def _paused(now_s: float = 0.0) -> Backoff:
    backoff = Backoff()
    for _ in range(MISSES_WHEN_SILENT):
        assert not backoff.goes_on(now_s)
        is_on = _miss(backoff, now_s)
    assert is_on
    return backoff


@pytest.mark.parametrize("num_sequences", [1, 3])
@pytest.mark.parametrize(
    ("is_silent", "pays", "num_misses"),
    [
        (True, True, MISSES_WHEN_SILENT),
        (False, False, MISSES_WHEN_SLOW),
        (False, True, None),
    ],
)
def test_draft_is_left_alone_when_it_brings_nothing(
    num_sequences: int, is_silent: bool, pays: bool, num_misses: int | None
) -> None:
    backoff, seen = Backoff(), []
    for _ in range(MISSES_WHEN_SLOW * num_sequences):
        backoff.count(0.0, 0.0, was_verified=False)
        seen.append(backoff.begins(0.0, num_sequences, is_silent=is_silent, pays=pays))
    expected = None if num_misses is None else num_misses * num_sequences - 1
    assert (seen.index(True) if True in seen else None) == expected


def test_tree_now_and_then_keeps_a_draft() -> None:
    backoff = Backoff()
    for index in range(200):
        backoff.count(0.0, 0.0, was_verified=index % 8 == 0)
        assert not backoff.begins(0.0, 1, is_silent=False, pays=False)


def test_pauses_of_a_silent_draft_grow_to_a_bound() -> None:
    backoff, now_s, lengths = _paused(), 0.0, []
    for _ in range(7):
        length_s = backoff.affordable_s / TRY_COST
        assert backoff.goes_on(now_s + 0.99 * length_s)
        now_s += length_s
        lengths.append(length_s)
        _fail_try(backoff, now_s)
    assert lengths[:3] == pytest.approx([FIRST_PAUSE_S * 2**power for power in range(3)])
    assert lengths[-1] == pytest.approx(LAST_PAUSE_S)


def test_tries_cost_a_small_share_of_the_time() -> None:
    backoff = _paused()
    _fail_try(backoff, 1.0, waited_s=0.02)
    assert backoff.affordable_s == pytest.approx(0.02)
    _fail_try(backoff, 100.0, waited_s=1000.0)
    assert backoff.affordable_s == pytest.approx(TRY_COST * LAST_PAUSE_S)


def test_sequences_wait_at_the_same_time() -> None:
    backoff, num_sequences = _paused(), 64
    assert not backoff.goes_on(1.0)
    for _ in range(num_sequences):
        backoff.count(1.0, 0.02, was_verified=False)
    assert backoff.begins(1.0, num_sequences, is_silent=True, pays=True)
    assert backoff.affordable_s == pytest.approx(0.02)


def test_try_goes_on_while_trees_come_and_pay() -> None:
    backoff = _paused()
    assert not backoff.goes_on(1.0)
    for _ in range(TRIED_ROUNDS):
        assert backoff.is_trying
        backoff.count(1.0, 0.01, was_verified=True)
    assert not backoff.is_trying
    assert not _miss(backoff, 1.0)


def test_try_fails_when_the_trees_that_come_do_not_pay() -> None:
    backoff = _paused()
    assert not backoff.goes_on(1.0)
    backoff.count(1.0, 0.01, was_verified=True)
    assert backoff.begins(1.0, 1, is_silent=False, pays=False)


def test_try_of_many_sequences_outlasts_one_miss() -> None:
    backoff = _paused()
    assert not backoff.goes_on(1.0)
    assert [_miss(backoff, 1.0, num_sequences=3) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("lasted_s", "factor"), [(0.1, 2.0), (60.0, 1.0)])
def test_pause_is_short_again_once_the_draft_was_of_use_for_as_long(
    lasted_s: float, factor: float
) -> None:
    backoff = _paused()
    assert not backoff.goes_on(1.0)
    for _ in range(TRIED_ROUNDS):
        backoff.count(1.0, 0.0, was_verified=True)
    for _ in range(MISSES_WHEN_SILENT):
        _miss(backoff, 1.0 + lasted_s)
    assert backoff.affordable_s == pytest.approx(TRY_COST * factor * FIRST_PAUSE_S)


class _Rounds:
    """A sequence at one draft in an engine that waits only while that pays, round by round."""

    def __init__(
        self,
        *,
        waits_always: bool = False,
        controller: SpeculationController | None = None,
        pinned_shape: TreeShape | None = None,
    ) -> None:
        fallback_order = FallbackOrder(waits_always=waits_always)
        fallback_order.stepped(0.05)
        self.attachments = Attachments(fallback_order, controller or SpeculationController(None))
        self.draft, self.sequence = make_attachment(wait_s=0.1), make_sequence()
        self.draft.report = DraftReport(pinned_shape=pinned_shape)
        self.attachments.attach(self.draft, [self.sequence], 0.0)
        self.now_s = 0.0

    def step(self, *, answers: bool = False, duration_s: float = 0.05) -> Verdict:
        """Ends a round, with or without a tree; returns the verdict on it."""
        if answers:
            candidates = [make_candidate(self.sequence)]
            offer(self.attachments, candidates, self.now_s, self.draft.report)
        self.now_s = max(self.now_s + duration_s, 0.0 if answers else self.waits_until_s)
        tokens, accepted = ((5, 6, 9), (0, 1)) if answers else ((9,), ())
        commit(
            self.attachments,
            self.sequence,
            tokens,
            accepted=accepted,
            was_verified=answers,
            now_s=self.now_s,
        )
        return self.draft.outbox_verdicts[-1]

    @property
    def waits_until_s(self) -> float:
        return self.attachments.readiness.deadline_s(self.sequence)

    @property
    def needs_every_step(self) -> bool:
        return self.attachments.assignments.needs_every_step

    def revise(self) -> None:
        """Has the controller choose anew what is wanted."""
        self.sequence.num_computed = len(self.sequence.token_ids) - 1
        self.attachments.controller._wishes.reconsider()
        self.attachments.readiness.prepare([self.sequence], self.now_s)

    def fall_silent(self) -> None:
        for _ in range(4):
            self.step(answers=True)
        while not self.step().wish.is_paused:
            assert self.sequence.round < 40


def test_silent_draft_is_told_of_its_pause_and_the_loop_runs_ahead() -> None:
    rounds = _Rounds(pinned_shape=PINNED)
    rounds.fall_silent()
    assert not rounds.needs_every_step
    began_s = rounds.now_s
    while rounds.step().wish.is_paused:
        assert rounds.waits_until_s <= rounds.now_s
    assert rounds.now_s - began_s == pytest.approx(FIRST_PAUSE_S, abs=0.06)
    # The next step may be under way already, so the first round after a backoff is not waited for.
    assert rounds.waits_until_s <= rounds.now_s
    assert rounds.needs_every_step
    assert not rounds.step().wish.is_paused
    assert rounds.waits_until_s > rounds.now_s
    assert rounds.step().wish.is_paused, "the try has failed"


def test_draft_that_answers_again_is_drafted_with_again() -> None:
    rounds = _Rounds()
    rounds.fall_silent()
    while rounds.step().wish.is_paused:
        pass
    for _ in range(2 * TRIED_ROUNDS):
        assert not rounds.step(answers=True).wish.is_paused
    assert not rounds.draft.backoff.is_trying
    assert not rounds.draft.timeout.is_cold


def test_pause_keeps_the_shape_that_was_asked_for() -> None:
    rounds = _Rounds()
    assignment = rounds.attachments.assignments.get(rounds.sequence.sequence_id)
    assert assignment is not None
    assignment.course.wish = replace(assignment.course.wish, shape=PINNED)
    rounds.fall_silent()
    while (verdict := rounds.step()).wish.is_paused:
        assert verdict.wish.shape == PINNED
    assert verdict.wish.shape == PINNED


def test_draft_that_is_always_waited_for_is_never_left_alone() -> None:
    rounds = _Rounds(waits_always=True)
    for _ in range(3 * MISSES_WHEN_SLOW):
        assert not rounds.step().wish.is_paused


def test_pinned_draft_of_an_adaptive_target_is_left_alone_as_any() -> None:
    rounds = _Rounds(controller=SpeculationController(), pinned_shape=PINNED)
    rounds.fall_silent()
    rounds.revise()
    assert rounds.step().wish.is_paused
    assert not rounds.needs_every_step
    while rounds.step().wish.is_paused:
        rounds.revise()


@pytest.mark.parametrize("waits_always", [True, False])
def test_pinning_a_draft_ends_a_pause_that_the_controller_began(waits_always: bool) -> None:
    controller = SpeculationController()
    controller.referee.insist()
    rounds = _Rounds(controller=controller, waits_always=waits_always)
    rounds.step(answers=True)
    controller.referee.stance = Stance.PAUSED
    rounds.revise()
    assert rounds.step().wish.is_paused
    rounds.draft.report = DraftReport(pinned_shape=PINNED)
    rounds.revise()
    assert not rounds.step().wish.is_paused


def test_adaptive_controller_pauses_by_itself_alone() -> None:
    attachments = Attachments(FallbackOrder(waits_always=False), SpeculationController())
    draft, sequence = make_attachment(), make_sequence()
    attachments.attach(draft, [sequence], 0.0)
    for step in range(3 * MISSES_WHEN_SLOW):
        commit(attachments, sequence, (9,), now_s=float(step))
    assert not any(each.wish.is_paused for each in draft.outbox_verdicts)
