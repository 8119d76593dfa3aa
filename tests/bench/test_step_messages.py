"""The bench of messages drives both sides through steps that match."""

from __future__ import annotations

from shared.tokens import Outcome
from tests.bench.step_messages import PARTS, StepMessages


def test_every_verdict_selects_a_tree_that_was_pushed_for_it() -> None:
    bench = StepMessages.of(3, 4)
    for number in range(3):
        bench.step(number)
    outcomes = bench.table.recorder.counters.outcomes
    assert outcomes == {Outcome.VERIFIED_NEXT_READY: 9}
    assert {part: len(spent) for part, spent in bench.cpu_s.items()} == dict.fromkeys(PARTS, 3)
