"""A step closes gaps within its budget; pages decide who runs."""

from __future__ import annotations

import pytest

from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.scheduler import MAX_SCORED_ROWS, Scheduler, SchedulerLimits, StepPlan, pruned
from services.target.sequence import Sequence
from shared.errors import QueueFull
from shared.generation import PromptScoring
from shared.kv.leases import KvLeases
from shared.tokens import EMPTY_TREE, SamplingParams, StopParams, TokenTree

LIMITS = ModelLimits(1000, 1000, 1000, frozenset())


def _sequence(
    sequence_id: int,
    num_prompt: int = 6,
    max_output: int = 50,
    *,
    priority: int = 0,
    scoring: PromptScoring | None = None,
) -> Sequence:
    prompt = tuple(sequence_id * 100 + i for i in range(num_prompt))
    request = GenerationRequest(
        "r",
        prompt,
        SamplingParams(),
        StopParams(max_output),
        0.0,
        priority=priority,
        prompt_scoring=scoring,
    )
    return Sequence(sequence_id, request, LIMITS)


def _scheduler(
    num_pages: int = 20, max_running: int = 8, max_step_rows: int = 64, num_groups: int = 1
) -> tuple[Scheduler, KvLeases]:
    leases = KvLeases(num_pages, 4, num_groups=num_groups)
    return Scheduler(leases, SchedulerLimits(max_running, 3, max_step_rows)), leases


def _plan(scheduler: Scheduler, tree: TokenTree = EMPTY_TREE) -> StepPlan:
    return scheduler.plan(lambda sequence: True, lambda sequence: tree)


def _run(plan: StepPlan, token_id: int = 7) -> None:
    for entry in plan.scheduled:
        is_complete = entry.is_complete
        entry.sequence.num_computed += entry.num_rows
        if is_complete:
            entry.sequence.commit([token_id])


def test_prompt_is_computed_in_chunks_within_the_budget() -> None:
    scheduler, _ = _scheduler(max_step_rows=4)
    sequence = _sequence(1, num_prompt=6)
    scheduler.submit(sequence)
    first = _plan(scheduler)
    assert [(e.num_rows, e.is_complete) for e in first.scheduled] == [(4, False)]
    _run(first)
    second = _plan(scheduler)
    assert [(e.num_rows, e.is_complete) for e in second.scheduled] == [(2, True)]


def test_decode_rows_run_beside_prompt_chunks() -> None:
    scheduler, _ = _scheduler(max_step_rows=6)
    scheduler.submit(_sequence(1))
    _run(_plan(scheduler))
    scheduler.submit(_sequence(2, num_prompt=12))
    plan = _plan(scheduler)
    assert [e.num_rows for e in plan.scheduled] == [1, 6]


def test_sequence_that_awaits_candidates_is_left_out() -> None:
    scheduler, _ = _scheduler()
    scheduler.submit(_sequence(1))
    scheduler.submit(_sequence(2))
    _run(_plan(scheduler))
    plan = scheduler.plan(lambda sequence: sequence.sequence_id == 2, lambda sequence: EMPTY_TREE)
    assert [e.sequence.sequence_id for e in plan.scheduled] == [2]


def test_tree_does_not_hang_off_a_token_in_flight() -> None:
    scheduler, _ = _scheduler()
    scheduler.submit(_sequence(1))
    [entry] = _plan(scheduler).scheduled
    entry.sequence.num_computed += entry.num_rows
    entry.sequence.num_pending = 1
    [behind] = _plan(scheduler, TokenTree.chain([1, 2])).scheduled
    assert (behind.start, behind.num_rows, len(behind.tree)) == (6, 1, 0)
    assert (behind.num_rows, behind.is_complete, behind.node_indices) == (1, True, ())


def test_sequence_whose_last_token_is_in_flight_is_left_out() -> None:
    scheduler, _ = _scheduler()
    scheduler.submit(_sequence(1, max_output=1))
    [entry] = _plan(scheduler).scheduled
    entry.sequence.num_computed += entry.num_rows
    entry.sequence.num_pending = 1
    assert not _plan(scheduler).scheduled


def test_tree_rides_with_a_short_gap_only() -> None:
    scheduler, _ = _scheduler(num_pages=100, max_step_rows=500)
    scheduler.submit(_sequence(1, num_prompt=64))
    scheduler.submit(_sequence(2, num_prompt=65))
    plan = _plan(scheduler, TokenTree.chain([1, 2]))
    assert [len(e.tree) for e in plan.scheduled] == [2, 0]


def test_tree_is_dropped_before_anyone_is_preempted() -> None:
    scheduler, _ = _scheduler(num_pages=3)
    scheduler.submit(_sequence(1, num_prompt=6))
    _run(_plan(scheduler))
    plan = _plan(scheduler, TokenTree.chain(list(range(9))))
    assert [len(e.tree) for e in plan.scheduled] == [0]
    assert not plan.preempted


def test_youngest_is_preempted_when_pages_run_out_and_resumes_later() -> None:
    scheduler, leases = _scheduler(num_pages=5)
    old, young = _sequence(1, num_prompt=7), _sequence(2, num_prompt=7)
    scheduler.submit(old)
    scheduler.submit(young)
    _run(_plan(scheduler))
    _run(_plan(scheduler))
    plan = _plan(scheduler)
    assert plan.preempted == [young]
    assert [e.sequence for e in plan.scheduled] == [old]
    assert young.lease is None
    assert young.num_computed == 0
    assert scheduler.waiting == (young,)
    scheduler.finish(old)
    scheduler.release(old)
    resumed = _plan(scheduler)
    assert [e.sequence for e in resumed.scheduled] == [young]
    assert resumed.scheduled[0].is_complete
    leases.check()


def test_only_sequences_of_the_full_group_are_preempted() -> None:
    scheduler, leases = _scheduler(num_pages=10, num_groups=2)
    first, second, third = (_sequence(i) for i in (1, 2, 3))
    for sequence in (first, second, third):
        scheduler.submit(sequence)
    # Two pages each, of four that a group has: the third one shares the first one's group.
    _run(_plan(scheduler))
    assert first.open_lease.group is third.open_lease.group is not second.open_lease.group
    for _ in range(2):
        _run(_plan(scheduler))
    plan = _plan(scheduler)
    assert plan.preempted == [third]
    assert [entry.sequence for entry in plan.scheduled] == [first, second]
    assert leases.num_free_pages > 0
    leases.check()
    # Where the other group has room, it goes on there.
    _run(plan)
    scheduler.finish(second)
    scheduler.release(second)
    assert _plan(scheduler).admitted == [third]
    assert third.open_lease.group is not first.open_lease.group
    leases.check()


def test_last_sequence_standing_can_use_every_page() -> None:
    scheduler, leases = _scheduler(num_pages=5)
    sequence = _sequence(1, num_prompt=3, max_output=13)
    scheduler.submit(sequence)
    while sequence.finish_reason is None:
        plan = _plan(scheduler)
        assert not plan.preempted
        _run(plan)
    assert len(sequence.token_ids) == 16
    scheduler.finish(sequence)
    leases.check()


def test_who_had_no_room_may_be_admitted_once_pages_come_free() -> None:
    scheduler, leases = _scheduler(num_pages=5)
    running, large, urgent = _sequence(1), _sequence(2, 15), _sequence(3, 15, priority=-1)
    scheduler.submit(running)
    scheduler.submit(large)
    assert scheduler.may_admit
    _plan(scheduler)
    assert scheduler.waiting == (large,)
    assert not scheduler.may_admit, "nothing has changed since"
    scheduler.submit(urgent)
    assert scheduler.may_admit, "another is the first in the queue, who may share a prefix"
    scheduler.finish(urgent)
    leases.publish(running.open_lease, running.token_ids)
    assert scheduler.may_admit
    _plan(scheduler)
    assert not scheduler.may_admit
    scheduler.finish(running)
    scheduler.release(running)
    assert scheduler.may_admit
    assert _plan(scheduler).admitted == [large]


def test_admission_stops_at_the_running_bound() -> None:
    scheduler, _ = _scheduler(max_running=1)
    scheduler.submit(_sequence(1))
    scheduler.submit(_sequence(2))
    assert [s.sequence_id for s in _plan(scheduler).admitted] == [1]
    assert scheduler.num_waiting == 1


def test_full_queue_names_its_bound() -> None:
    scheduler, _ = _scheduler()
    for sequence_id in range(3):
        scheduler.submit(_sequence(sequence_id))
    with pytest.raises(QueueFull, match="3 requests are waiting; the queue holds 3"):
        scheduler.submit(_sequence(9))


def test_finishing_a_waiting_sequence_takes_it_out_of_the_queue() -> None:
    scheduler, _ = _scheduler()
    sequence = _sequence(1)
    scheduler.submit(sequence)
    scheduler.finish(sequence)
    assert not _plan(scheduler).scheduled


def test_nodes_beyond_the_output_are_cut_and_keep_their_drafted_index() -> None:
    tree = TokenTree((1, 2, 3, 4), (None, 0, 1, None), (-0.1, -0.2, -0.3, -0.4))
    cut, node_indices = pruned(tree, max_depth=1)
    assert cut == TokenTree((1, 4), (None, None), (-0.1, -0.4))
    assert node_indices == (0, 3)


def test_tree_within_the_output_is_untouched() -> None:
    tree = TokenTree.chain([1, 2])
    assert pruned(tree, max_depth=2) == (tree, (0, 1))


def test_least_priority_value_is_admitted_first_and_equals_in_order() -> None:
    scheduler, _ = _scheduler(max_running=1)
    sequences = [_sequence(1, priority=5), _sequence(2, priority=-1), _sequence(3, priority=5)]
    for sequence in sequences:
        scheduler.submit(sequence)
    assert [each.sequence_id for each in scheduler.waiting] == [2, 1, 3]
    assert [each.sequence_id for each in _plan(scheduler).admitted] == [2]


def test_least_urgent_sequence_is_preempted_and_waits_before_its_equals() -> None:
    scheduler, _ = _scheduler(num_pages=6)
    urgent, lesser = _sequence(1, num_prompt=8, priority=-1), _sequence(2, num_prompt=8, priority=3)
    for sequence in (lesser, urgent):
        scheduler.submit(sequence)
        _run(_plan(scheduler))
    late = _sequence(3, priority=3)
    scheduler.submit(late)
    preempted: list[Sequence] = []
    while not preempted:
        plan = _plan(scheduler)
        preempted += plan.preempted
        _run(plan)
    assert preempted == [lesser]
    assert [each.sequence_id for each in scheduler.waiting] == [2, 3]


def test_scored_rows_of_a_step_are_bounded_over_all_sequences() -> None:
    limits = ModelLimits(10_000, 2000, 2000, frozenset())
    leases = KvLeases(600, 4)
    scheduler = Scheduler(leases, SchedulerLimits(8, 8, 2048))
    for number in (1, 2):
        prompt = tuple(range(number * 1000, number * 1000 + 500))
        request = GenerationRequest(
            "r", prompt, SamplingParams(), StopParams(4), 0.0, prompt_scoring=PromptScoring(0, 0)
        )
        scheduler.submit(Sequence(number, request, limits))
    num_scored: dict[int, int] = {1: 0, 2: 0}
    for _ in range(8):
        plan = _plan(scheduler)
        assert sum(len(entry.scored) for entry in plan.scheduled) <= MAX_SCORED_ROWS
        for entry in plan.scheduled:
            num_scored[entry.sequence.sequence_id] += len(entry.scored)
            entry.sequence.next_scored += len(entry.scored)
        _run(plan)
    assert num_scored == {1: 499, 2: 499}
