"""The target's metrics: what a scrape says after a few steps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.target.metrics import TargetMetrics
from services.target.step_report import Foreseen, OutcomeTally, StepReport
from shared.tokens import TreeShape
from tests.helpers.step_reports import step_report


def _report(host_gap_s: float, *verdicts: bool, shape: TreeShape | None = None) -> StepReport:
    outcomes = OutcomeTally()
    for is_hit in verdicts:
        outcomes.count(1, Foreseen(1, 0) if is_hit else None, was_prepared=True)
    return step_report(
        duration_s=0.01,
        host_gap_s=host_gap_s,
        num_rows=4,
        num_committed=2,
        num_drafted=3,
        num_accepted=1,
        outcomes=outcomes,
        round_shape=shape,
    )


def test_gaps_behind_lookahead_hits_are_counted_apart() -> None:
    registry = CollectorRegistry()
    metrics = TargetMetrics(registry)
    for report in (
        _report(1.0, True),  # behind nothing
        _report(0.25, True, True),  # behind a hit
        _report(0.5, True, False),  # behind hits
        _report(2.0, True),  # behind a hit and a miss
        _report(0.0),  # behind a hit, but something was awaited
        _report(4.0),  # behind no verdict
        _report(0.5, True, shape=TreeShape(3, 1, 4)),
        _report(0.0, shape=TreeShape(3, 1, 4)),  # behind a hit, launched before that was read
    ):
        metrics.observe_step(report)
    assert registry.get_sample_value("outrider_target_hit_gap_seconds_sum") == 0.75
    assert registry.get_sample_value("outrider_target_hit_gap_seconds_count") == 3.0
    assert registry.get_sample_value("outrider_target_host_gap_seconds_total") == 8.25
