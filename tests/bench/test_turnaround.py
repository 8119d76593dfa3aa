"""Logs of both ends tell where the time between a verdict and its tree goes."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from tests.bench.round_svg import Box, Message, Rounds
from tests.bench.turnaround import report, turnarounds

_PARTS = (0.0001, 0.0002, 0.0003, 0.002, 0.0004, 0.0005, 0.0006)


def _rounds(num_rounds: int = 3) -> Rounds:
    """Steps of 5 ms, and what happens after each."""
    steps, drafts, messages, now_s = [], [], [], 10.0
    for _ in range(num_rounds):
        steps.append(Box("miss", now_s, now_s + 0.005))
        times_s = [now_s + 0.005]
        for part in _PARTS:
            times_s.append(times_s[-1] + part)
        _, told, there, begun, drafted, answered, back, now_s = times_s
        messages.append(Message("verdicts", True, told, there, 30))
        drafts.append(Box("propose", begun, drafted))
        messages.append(Message("candidates", False, answered, back, 50))
    return Rounds(tuple(steps), tuple(drafts), tuple(messages))


def test_parts_are_those_of_each_round_that_another_step_follows() -> None:
    found = turnarounds(_rounds())
    assert len(found) == 2
    for each in found:
        assert astuple(each) == pytest.approx(_PARTS)


def test_a_verdict_that_no_tree_answers_is_left_out() -> None:
    whole = _rounds()
    quiet = Rounds(whole.steps, whole.drafts[1:], whole.messages[:1] + whole.messages[2:])
    assert len(turnarounds(quiet)) == 1


def test_table_has_medians_in_milliseconds() -> None:
    lines = report(_rounds()).splitlines()
    assert lines[0].split() == ["median", "of", "2", "ms"]
    assert lines[4].split() == ["drafts", "2.00"]
    assert lines[-1].split() == ["all", "4.10"]


def test_without_trees_it_says_so() -> None:
    assert report(Rounds((), (), ())) == "no verdict of these rounds was answered by one tree"
