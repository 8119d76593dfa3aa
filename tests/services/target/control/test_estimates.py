"""What is learnt from steps, answers and verdicts."""

from __future__ import annotations

import math
import random

import pytest

from services.target.control.acceptance import FIRST_RATE, Confidences, LevelRates, expected_tokens
from services.target.control.averages import Average, Typical
from services.target.control.course import Course, Population, seen_round
from services.target.control.probe_budget import ProbeBudget
from services.target.control.step_times import StepTimes, non_decreasing
from services.target.control.turnarounds import Turnarounds
from shared.tokens import TokenTree, TreeShape
from tests.helpers.one_draft import make_attachment, make_sequence


def _measured(times: StepTimes, points: dict[int, float], count: int = 5) -> StepTimes:
    for _ in range(count):
        for rows, duration_s in points.items():
            times.observe(rows, duration_s)
    return times


def test_a_stall_moves_an_average_a_little() -> None:
    average = Average()
    for sample in (1.0, 1.0, 1.0, 1.0, 100.0):
        average.add(sample)
    assert average.value < 2.0


def test_first_samples_that_compile_and_later_stalls_do_not_count() -> None:
    typical = Typical()
    for sample_s in (5.0, 2.0, 0.011):
        typical.add(sample_s)
    assert typical.value == pytest.approx(0.011)
    for sample_s in (0.010, 0.012, 0.011, 0.010, 0.9, 0.011):
        typical.add(sample_s)
    assert typical.value == pytest.approx(0.011)


def test_what_lasts_becomes_typical() -> None:
    typical = Typical()
    for _ in range(9):
        typical.add(1.0)
    for _ in range(7):
        typical.add(2.0)
    assert typical.value == 2.0


def test_step_times_are_interpolated_and_untried_ones_hoped_to_be_short() -> None:
    times = _measured(StepTimes(), {4: 0.010, 8: 0.014})
    assert times(4) == pytest.approx(0.010)
    assert times(6) == pytest.approx(0.012)
    assert times(64) == pytest.approx(0.014 + 56 * 0.0005), "half of what a row took last"
    assert times(2) == pytest.approx(0.005)
    assert StepTimes()(3) == 0.0


def test_a_width_counts_once_it_was_tried_a_few_times() -> None:
    times = _measured(StepTimes(), {1: 0.010, 4: 0.012})
    times.observe(8, 0.5)
    times.observe(8, 0.2)
    assert times(8) < 0.016, "it may have been cold"
    times.observe(8, 0.018)
    assert times(8) == pytest.approx(0.018)


def test_steps_beside_a_draft_tell_how_much_it_slows_them_down() -> None:
    times = StepTimes()
    for _ in range(3):
        times.observe(16, 0.030, is_quiet=False)
    assert times(16) == pytest.approx(0.030), "nothing better is known"
    for _ in range(5):
        times.observe(16, 0.020)
    times.observe(16, 0.030, is_quiet=False)
    assert times.slowdown == pytest.approx(1.5)
    assert times(16) == pytest.approx(0.020)


def test_the_pace_follows_all_widths_and_ignores_a_stall() -> None:
    times = _measured(StepTimes(), {1: 0.010, 4: 0.012}, count=9)
    times.observe(4, 1.0)
    assert times(1) == pytest.approx(0.010, rel=0.02)
    for _ in range(12):
        times.observe(4, 0.024)
    assert times(1) > 0.016, "the machine is slower, whatever the width"


def test_more_rows_never_seem_to_cost_less() -> None:
    times = _measured(StepTimes(), {1: 0.010, 2: 0.009, 4: 0.012, 8: 0.011})
    curve = [times(rows) for rows in range(1, 9)]
    assert curve == sorted(curve)


def test_wide_steps_of_like_width_share_a_bucket() -> None:
    times = _measured(StepTimes(), {100: 0.010, 104: 0.012})
    assert len(times.measured()) == 1
    assert times.age(101) < 3
    assert times.age(300) == 10


def test_step_times_follow_a_change() -> None:
    times = _measured(StepTimes(), {4: 0.010})
    assert _measured(times, {4: 0.020}, count=40)(4) == pytest.approx(0.020, rel=0.05)


def test_pooling_keeps_the_weighted_mean() -> None:
    assert non_decreasing([1.0, 3.0, 2.0, 4.0], [1, 1, 3, 1]) == [1.0, 2.25, 2.25, 4.0]


def test_untried_depths_cost_the_drafters_own_time_a_level() -> None:
    turnarounds = Turnarounds()
    for duration_s in (0.9, 0.010, 0.010):
        assert turnarounds(4, 2) == 0.0, "a draft is not judged by its first answers"
        turnarounds.observe(4, 2, duration_s, draft_s=0.8 * duration_s)
    assert turnarounds(4, 2) == pytest.approx(0.010)
    assert turnarounds(6, 2) == pytest.approx(0.014)
    assert turnarounds(1, 2) == pytest.approx(0.004)
    assert Turnarounds()(3, 1) == 0.0


def test_trees_pushed_ahead_shorten_the_usual_wait_by_their_share() -> None:
    turnarounds = Turnarounds()
    for _ in range(200):
        turnarounds.observe(3, 1, 0.0, draft_s=None, is_foreseen=True)
        turnarounds.observe(3, 1, 0.010, draft_s=None)
    assert turnarounds(3, 1) == pytest.approx(0.005, rel=0.1)
    assert turnarounds(3, 1, is_ahead=False) == pytest.approx(0.010)


def test_what_comes_a_little_late_is_not_taken_for_what_is_drafted_after_a_verdict() -> None:
    """A chain of 7 that is drafted ahead comes 2 ms late, and one of 3 in time; drafted after the
    verdict they take 9 and 5 ms."""
    turnarounds = Turnarounds()
    for place in range(200):
        is_foreseen = place % 10 > 0
        for depth, late_s, asked_s in ((3, 0.0, 0.005), (7, 0.002, 0.009)):
            waited_s = late_s if is_foreseen else asked_s
            turnarounds.observe(depth, 1, waited_s, draft_s=None, is_foreseen=is_foreseen)
    assert turnarounds(3, 1) == pytest.approx(0.0005, rel=0.4)
    assert turnarounds(7, 1) == pytest.approx(0.0027, rel=0.2)
    assert turnarounds(3, 1) < turnarounds(5, 1) < turnarounds(7, 1)
    before_s = turnarounds(3, 1)
    for _ in range(200):
        turnarounds.observe(3, 1, 0.005, None, is_ahead=False)
    assert turnarounds(3, 1) == pytest.approx(before_s), "as while it drafts ahead"
    assert turnarounds(3, 1, is_ahead=False) == pytest.approx(0.005)


def test_untried_depths_are_hoped_to_be_in_time_where_the_tried_one_is() -> None:
    turnarounds = Turnarounds()
    for _ in range(50):
        turnarounds.observe(3, 1, 0.0, draft_s=0.003, is_foreseen=True)
    assert turnarounds(7, 1) == 0.0
    for _ in range(3):
        turnarounds.observe(7, 1, 0.002, draft_s=0.007, is_foreseen=True)
    assert turnarounds(7, 1) == pytest.approx(0.002)


def test_depths_between_and_beyond_two_tried_ones_lie_on_their_line() -> None:
    turnarounds = Turnarounds()
    for _ in range(3):
        turnarounds.observe(2, 1, 0.004, draft_s=None)
        turnarounds.observe(6, 1, 0.008, draft_s=None)
    assert turnarounds(4, 1) == pytest.approx(0.006)
    assert turnarounds(8, 1) == pytest.approx(0.010)
    assert turnarounds(4, 40) == pytest.approx(0.006), "the nearest batch size that is known"


def test_level_rates_come_to_what_happens() -> None:
    source, levels = random.Random(5), LevelRates.of(memory=0.995, strength=2.0)
    for _ in range(600):
        num_accepted = 0
        while num_accepted < 3 and source.random() < (0.9, 0.6, 0.3)[num_accepted]:
            num_accepted += 1
        levels.observe(num_accepted, 3)
    assert levels.rates(3) == pytest.approx([0.9, 0.6, 0.3], abs=0.1)


def test_levels_start_hopeful_and_a_sequence_starts_like_its_population() -> None:
    levels = LevelRates.of(memory=0.9, strength=6.0)
    assert levels.rates(3) == pytest.approx([FIRST_RATE] * 3)
    assert levels.rates(2, [0.4, 0.2]) == pytest.approx([0.4, 0.2])


def test_a_sequence_forgets_what_its_text_was_like() -> None:
    levels = LevelRates.of(memory=0.9, strength=6.0)
    for _ in range(200):
        levels.observe(0, 3)
    assert levels.rates(1)[0] < 0.35
    for _ in range(30):
        levels.observe(3, 3)
    assert levels.rates(1)[0] > 0.75


def test_a_level_that_is_rarely_tried_is_hoped_for_again_but_not_above_the_one_before() -> None:
    levels = LevelRates.of(memory=0.95, strength=2.0)
    for _ in range(40):
        levels.observe(1, 2)
    before = levels.hopeful_rates(2)[1]
    for _ in range(200):
        levels.observe(1, 1)
    after = levels.hopeful_rates(2)
    assert before < 0.3 < after[1] <= after[0]


def test_counts_outlive_any_number_of_rounds() -> None:
    levels = LevelRates.of(memory=0.5, strength=1.0)
    for _ in range(3000):
        levels.observe(1, 1)
    assert levels.rates(1)[0] == pytest.approx(1.0, abs=0.1)


def test_expected_tokens_count_the_bonus() -> None:
    assert expected_tokens([0.5, 0.5]) == pytest.approx([1.0, 1.5, 1.75])


def test_confidences_learn_that_a_draft_is_too_sure() -> None:
    confidences = Confidences(memory=0.99)
    sure = math.log(0.95)
    assert confidences(sure) > 0.9
    for _ in range(100):
        confidences.observe([(sure, False)])
    assert confidences(sure) < 0.15
    assert confidences(math.log(0.4)) == pytest.approx(0.42), "other bins are as they were"


def test_a_probe_is_paid_for_before_the_next_begins() -> None:
    budget = ProbeBudget(share=0.1)
    assert not budget.allows_probe
    budget.earn(1.0)
    assert budget.allows_probe
    budget.pay(0.3)
    assert not budget.allows_probe
    budget.earn(1.9)
    assert not budget.allows_probe
    budget.earn(0.7)
    assert budget.allows_probe
    budget.pay(-5.0)
    assert budget.spent_s == pytest.approx(0.3), "a probe that gains earns nothing"


#          0
#        1   2        node 1 is the draft's favourite below node 0
#        3
TREE = TokenTree((5, 6, 7, 8), (None, 0, 0, 1), (-0.1, -0.2, -1.0, -0.3))


def test_a_verdict_tells_levels_nodes_and_the_favourites_chain() -> None:
    seen = seen_round(TREE, (0, 1, 2, 3), (0, 2), 3, is_tree=True)
    assert (seen.num_accepted, seen.num_levels) == (2, 3), "node 2 has no child: the draft had none"
    assert (seen.num_chain_accepted, seen.num_chain_levels) == (1, 2)
    assert seen.tried == [(-0.1, True), (-0.2, False), (-1.0, True)]


def test_what_was_cut_was_not_put_to_the_test() -> None:
    seen = seen_round(TREE, (0, 1), (0, 1), 3, is_tree=True)
    assert (seen.num_accepted, seen.num_levels) == (2, 2)
    assert seen.tried == [(-0.1, True), (-0.2, True)]


def test_levels_beyond_the_outputs_end_do_not_count() -> None:
    assert seen_round(TREE, (0,), (0,), 1, is_tree=True).num_levels == 1
    assert seen_round(TREE, (0,), (), 1, is_tree=True).num_levels == 1


def _course(population: Population | None = None, num_draft_tokens: int | None = None) -> Course:
    sequence = make_sequence(num_draft_tokens=num_draft_tokens)
    return Course(make_attachment(), sequence, population or Population(), 0.1)


def test_a_narrowed_tree_promises_no_more_levels_than_it_has_nodes() -> None:
    shapes = [TreeShape(steps, 1, steps + 1) for steps in (1, 2, 5)]
    free = _course().tokens(shapes)
    assert free == sorted(set(free))
    assert _course(num_draft_tokens=3).tokens(shapes) == [free[0], free[1], free[1]]
    assert _course(num_draft_tokens=1).tokens(shapes) == [1.0, 1.0, 1.0]
    assert [_course(num_draft_tokens=3).num_rows(shape) for shape in shapes] == [2, 3, 3]


@pytest.mark.parametrize("num_draft_tokens", [None, 2])
def test_a_narrowed_tree_says_nothing_of_what_whole_levels_are_worth(
    num_draft_tokens: int | None,
) -> None:
    population = Population()
    course, other = _course(population, num_draft_tokens), _course(population)
    wide = [TreeShape(2, 4, 9)]
    before = other.tokens(wide)
    for _ in range(50):
        course.observe(seen_round(TREE, (0,), (), 3, is_tree=True))
    assert (other.tokens(wide) == before) == (num_draft_tokens is not None)
    assert course.tokens(wide) < before
    assert population.chains.rates(1)[0] < FIRST_RATE


def test_without_probabilities_a_node_is_judged_by_its_depth_whatever_its_token() -> None:
    """Cutting a drawn chain by its tokens would change what rejection sampling draws."""
    course = _course()
    for _ in range(40):
        course.observe(seen_round(TokenTree.chain([1, 2]), (0, 1), (0,), 2, is_tree=False))
    one, other = TokenTree.chain([1, 2]), TokenTree.chain([9, 7])
    judged = [course.acceptance(one, node) for node in (0, 1)]
    assert judged == [course.acceptance(other, node) for node in (0, 1)]
    assert judged[0] > 0.8 > 0.4 > judged[1]
