"""Metrics of the target, declared in one place. A counter costs one call a step, not a token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.target.step_report import StepReport

_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class TargetMetrics:
    """Counters and histograms of the step loop.

    | metric | unit | query |
    |---|---|---|
    | `outrider_target_steps` | steps | `rate(outrider_target_steps_total[1m])` |
    | `outrider_target_step_seconds` | seconds | p99 by `histogram_quantile(0.99, …)` |
    | `outrider_target_rows` | rows computed | rows a step: its rate over that of steps |
    | `outrider_target_tokens` | tokens committed | tokens a second: its rate |
    | `outrider_target_rounds` | draws | accepted length: rate of tokens over rate of rounds |
    | `outrider_target_drafted_tokens` | tree nodes verified | |
    | `outrider_target_accepted_tokens` | tree nodes accepted | acceptance: over drafted |
    | `outrider_target_preemptions` | sequences | should be near 0 |
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str) -> Counter:
            return Counter(f"outrider_target_{name}", meaning, registry=registry)

        self._steps = counter("steps", "Engine steps that ran a forward.")
        self._rows = counter("rows", "Rows computed: prompt, plain and tree.")
        self._rounds = counter("rounds", "Times a sequence drew tokens.")
        self._tokens = counter("tokens", "Tokens committed.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._preempted = counter("preemptions", "Sequences that lost their pages.")
        self._seconds = Histogram(
            "outrider_target_step_seconds",
            "Duration of a step.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )

    def observe_step(self, report: StepReport) -> None:
        """Counts one step; called on the engine thread."""
        self._steps.inc()
        self._rows.inc(report.num_rows)
        self._rounds.inc(report.num_rounds)
        self._tokens.inc(report.num_committed)
        self._drafted.inc(report.num_drafted)
        self._accepted.inc(report.num_accepted)
        self._preempted.inc(report.num_preempted)
        self._seconds.observe(report.duration_s)
