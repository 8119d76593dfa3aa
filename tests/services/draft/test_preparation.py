"""A tree request takes effect once it is prepared for, which takes a share of the time."""

from __future__ import annotations

import pytest

from services.draft.rounds import (
    MAX_DEFERRAL_S,
    MAX_WAITING_SHAPES,
    WARM_UP_SHARE,
    Preparation,
)
from shared.tokens import TreeShape

OWN, DEEP, DEEPER = TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(7, 1, 8)
PART_S = 0.1


class Drafter:
    """Has to do `num_parts` things once for each shape and number of sequences."""

    def __init__(self, num_parts: int = 2) -> None:
        self.num_parts, self.now_s = num_parts, 0.0
        self.done: dict[TreeShape, dict[int, int]] = {}

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        return self.done.get(shape, {}).get(num_sequences, 0) >= self.num_parts

    def prepare(self, shape: TreeShape, num_sequences: int) -> bool:
        if self.is_prepared(shape, num_sequences):
            return False
        sizes = self.done.setdefault(shape, {})
        sizes[num_sequences] = sizes.get(num_sequences, 0) + 1
        self.now_s += PART_S
        return True


class Bench:
    """Attributes:
    announced: whether the draft was warming each time that this changed.
    """

    def __init__(self) -> None:
        self.drafter = Drafter()
        self.announced: list[bool] = []
        self.preparation = Preparation(self.drafter, self._announce, lambda: self.drafter.now_s)

    def _announce(self) -> None:
        self.announced.append(self.preparation.is_warming)

    def serve(self, wished: TreeShape, num_sequences: int = 1) -> TreeShape:
        self.preparation.begin_step()
        return self.preparation.shape_for(wished, OWN, num_sequences)

    def prepare_own(self) -> None:
        self.preparation.ensure(OWN, 1)
        self.announced.clear()

    def work_off(self, *, is_idle: bool) -> int:
        """Prepares whatever is due; returns how many things that were."""
        count = 0
        while self.preparation.is_due(is_idle=is_idle):
            self.preparation.advance()
            count += 1
        return count


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_wish_is_served_once_it_is_prepared_for(bench: Bench) -> None:
    bench.prepare_own()
    assert bench.serve(DEEP) == OWN
    assert bench.work_off(is_idle=True) == 2
    assert bench.serve(DEEP) == DEEP
    assert bench.announced == [True, False] * 2
    assert bench.preparation.num_waiting == 0


def test_until_then_trees_keep_to_what_was_served_last(bench: Bench) -> None:
    bench.prepare_own()
    bench.serve(DEEP)
    bench.work_off(is_idle=True)
    assert bench.serve(DEEP) == DEEP
    assert bench.serve(DEEPER) == DEEP


def test_within_a_step_a_tree_request_gets_one_shape(bench: Bench) -> None:
    bench.prepare_own()
    assert bench.serve(DEEP) == OWN
    bench.work_off(is_idle=True)
    assert bench.preparation.shape_for(DEEP, OWN, 1) == OWN
    bench.preparation.begin_step()
    assert bench.preparation.shape_for(DEEP, OWN, 1) == DEEP


def test_where_nothing_is_prepared_the_own_shape_comes_first(bench: Bench) -> None:
    assert bench.serve(DEEP) == OWN
    bench.preparation.ensure(OWN, 1)
    assert bench.drafter.is_prepared(OWN, 1)
    assert not bench.drafter.is_prepared(DEEP, 1)
    assert bench.announced == [True, False], "all of it in one go"
    bench.preparation.ensure(OWN, 1)
    assert bench.announced == [True, False], "nothing is left"


def test_more_sequences_are_prepared_for_anew(bench: Bench) -> None:
    bench.prepare_own()
    bench.serve(DEEP)
    bench.work_off(is_idle=True)
    assert bench.serve(DEEP, num_sequences=4) == OWN, "which nobody has prepared for 4 either"
    assert bench.preparation.num_waiting == 2
    bench.work_off(is_idle=True)
    assert bench.serve(DEEP, num_sequences=4) == DEEP


def test_while_sequences_are_open_preparing_takes_a_share_of_the_time(bench: Bench) -> None:
    bench.prepare_own()
    bench.serve(DEEP)
    start_s = bench.drafter.now_s
    assert bench.work_off(is_idle=False) == 0, "what was prepared last has used the share up"
    num_turns = 0
    while bench.preparation.num_waiting:
        bench.work_off(is_idle=False)
        bench.drafter.now_s += 0.01
        num_turns += 1
        assert num_turns < 1000
    elapsed_s = bench.drafter.now_s - start_s
    assert WARM_UP_SHARE * elapsed_s * 1.1 >= 2 * PART_S


def test_trees_that_are_owed_go_first_but_not_for_ever(bench: Bench) -> None:
    bench.prepare_own()
    bench.drafter.now_s += 100.0
    bench.serve(DEEP)
    assert bench.preparation.is_due(is_idle=False)
    assert not bench.preparation.is_due(is_idle=False, is_tree_due=True)
    bench.drafter.now_s += MAX_DEFERRAL_S
    assert bench.preparation.is_due(is_idle=False, is_tree_due=True)
    bench.preparation.advance()
    bench.drafter.now_s += MAX_DEFERRAL_S
    assert not bench.preparation.is_due(is_idle=False, is_tree_due=True)


def test_the_shape_that_was_wished_for_last_comes_first(bench: Bench) -> None:
    bench.prepare_own()
    bench.serve(DEEP)
    bench.serve(DEEPER)
    bench.preparation.is_due(is_idle=True)
    bench.preparation.advance()
    assert DEEPER in bench.drafter.done
    assert DEEP not in bench.drafter.done


def test_tree_requests_that_are_old_are_given_up(bench: Bench) -> None:
    bench.prepare_own()
    for steps in range(4, 6 + MAX_WAITING_SHAPES):
        bench.serve(TreeShape(steps, 1, steps + 1))
    assert bench.preparation.num_waiting == MAX_WAITING_SHAPES
    bench.work_off(is_idle=True)
    assert not bench.drafter.is_prepared(TreeShape(4, 1, 5), 1)
