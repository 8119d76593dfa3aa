"""Newcomers get no more slots than are free, whoever asked for them first."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.rounds.head_rounds import HeadSteps
from services.target.rounds.round_steps import StepParts


@dataclass
class _Sequence:
    """A sequence whose prompt is read but for some tokens."""

    sequence_id: int
    num_uncomputed: int
    num_pending: int = 0
    num_computed: int = 4
    token_ids: tuple[int, ...] = (1, 2, 3, 4, 5)


@dataclass
class _Rounds:
    """Free slots; a round reads two tokens in each."""

    num_free: int
    held: set[int] = field(default_factory=set)

    def holds(self, sequence: _Sequence) -> bool:
        return sequence.sequence_id in self.held

    def suits(self, sequence: _Sequence) -> bool:
        return True

    def num_slots_to_read(self, sequence: _Sequence) -> int:
        return -(-sequence.num_uncomputed // 2) if sequence.num_uncomputed > 1 else 0


def _steps(
    rounds: _Rounds, running: list[_Sequence], elsewhere: frozenset[int] = frozenset()
) -> Any:
    """Args:
    elsewhere: sequences that have a lane of another kind.
    """
    unused: Any = None
    lanes = SimpleNamespace(holds=lambda each: rounds.holds(each) or each.sequence_id in elsewhere)
    parts = StepParts(
        scheduler=SimpleNamespace(running=running, lanes=lanes),  # type: ignore[arg-type]
        attachments=unused,
        committer=unused,
        clock=unused,
        host_gap=unused,
        forget=unused,
        runs_ahead=True,
    )
    steps: Any = HeadSteps(parts, unused, DEFAULT_CONFIG, launches_late=False)
    steps._lanes = rounds
    return steps


def test_a_sequence_has_one_lane() -> None:
    """Two rounds would each draw its next token."""
    running = [_Sequence(1, 1), _Sequence(2, 1)]
    rounds = _Rounds(num_free=2)
    assert _steps(rounds, running, frozenset({1}))._joining(rounds) == running[1:]
    assert _steps(rounds, running)._joining(rounds) == running


def _num_slots(rounds: _Rounds, joining: list[_Sequence]) -> int:
    return sum(max(rounds.num_slots_to_read(each), 1) for each in joining)


def test_who_was_not_asked_for_in_the_plan_does_not_take_what_others_got() -> None:
    rounds = _Rounds(num_free=2)
    running = [_Sequence(1, 1), _Sequence(2, 1), _Sequence(3, 4)]
    joining = _steps(rounds, running)._joining(rounds)
    assert [each.sequence_id for each in joining] == [1, 2]


def test_who_was_asked_for_in_the_plan_comes_first() -> None:
    rounds = _Rounds(num_free=2)
    running = [_Sequence(1, 1), _Sequence(2, 1), _Sequence(3, 4)]
    steps = _steps(rounds, running)
    assert steps.num_taken(running[2]) == 4
    assert [each.sequence_id for each in steps._joining(rounds)] == [3]


@pytest.mark.parametrize("seed", range(20))
def test_joining_lanes_never_have_more_slots_than_are_free(seed: int) -> None:
    source = random.Random(seed)
    for num_free in range(1, 7):
        rounds = _Rounds(num_free)
        numbers = itertools.count(1)
        running = [_Sequence(next(numbers), source.choice((1, 1, 2, 5))) for _ in range(8)]
        steps = _steps(rounds, running)
        for each in running[: source.randrange(9)]:
            steps.num_taken(each)
        joining = steps._joining(rounds)
        assert 0 < _num_slots(rounds, joining) <= num_free
