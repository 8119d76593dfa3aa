"""Metrics of the target, declared in one place. Counters cost one call per step, not per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from operator import attrgetter
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.target.drafts.attachment import AttachmentStatus
from services.target.engine import Engine
from services.target.settings import TargetSettings
from services.target.step_report import StepReport, shape_name
from shared.errors import OutriderError
from shared.telemetry.start_up import RoundLog
from shared.telemetry.vllm_metrics import EngineFigures
from shared.tokens import TreeShape

T = TypeVar("T")
_PREFIX = "outrider_target"
_LABELS = ("attachment", "worker", "algorithm")
_TIMEOUT_S = 1.0
_GAUGES = {
    "wanted_step_count": "Depth of the requested trees; 0 where none are requested",
    "wanted_topk": "Most children of a node in the requested trees; 1 is a chain",
    "wanted_draft_token_count": "Rows of a requested tree, root included",
    "wanted_outcome_count": "Most outcomes to prepare trees for; absent where the draft decides",
    "draft_sequence_count": "Sequences at the draft",
    "draft_paused_sequence_count": "Sequences without tree requests",
}


class WantedMetrics(Collector):
    """Gauges of each draft, read at each scrape: `_GAUGES`, and the reason why it is idle.

    Args:
        statuses: returns the statuses of all drafts; called on the scraper's thread.
    """

    def __init__(self, statuses: Callable[[], Sequence[AttachmentStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        families = {
            name: GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=_LABELS)
            for name, meaning in _GAUGES.items()
        }
        idle = GaugeMetricFamily(
            f"{_PREFIX}_draft_idle",
            "1 while no tree of the draft is verified, by reason",
            labels=(*_LABELS, "reason"),
        )
        for status in self._statuses():
            identity = status.attachment.identity
            labels = (identity.attachment_id, identity.worker_id, identity.algorithm)
            figures = {
                **wanted_figures(status),
                "draft_sequence_count": len(status.attachment.sequence_ids),
                "draft_paused_sequence_count": status.num_paused,
            }
            for name, figure in figures.items():
                families[name].add_metric(labels, figure)
            if status.idle is not None:
                idle.add_metric((*labels, status.idle.reason.value), 1)
        yield from families.values()
        yield idle


def wanted_figures(status: AttachmentStatus) -> Mapping[str, int]:
    """Returns a draft's tree request by name; no `wanted_outcome_count` if the draft decides it."""
    figures = shape_figures("wanted", status.shape)
    outcomes = status.num_outcomes
    return figures if outcomes is None else {**figures, "wanted_outcome_count": outcomes}


def shape_figures(prefix: str, shape: TreeShape | None) -> Mapping[str, int]:
    """Returns the sizes of a tree shape by name; zeros for None."""
    return {
        f"{prefix}_step_count": 0 if shape is None else shape.num_steps,
        f"{prefix}_topk": 0 if shape is None else shape.topk,
        f"{prefix}_draft_token_count": 0 if shape is None else shape.num_draft_tokens,
    }


_MOST_LABELS = 8
_GAP_SECONDS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.005, 0.01)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_COUNTERS = (
    ("rows", "Rows computed: prompt, plain and tree.", "num_rows"),
    ("rounds", "Rounds, each of one sequence: draw, verify, commit.", "num_rounds"),
    ("tokens", "Tokens committed.", "num_committed"),
    ("drafted_tokens", "Draft nodes verified.", "num_drafted"),
    ("accepted_tokens", "Draft nodes accepted.", "num_accepted"),
    ("preemptions", "Sequences preempted for want of KV pages.", "num_preempted"),
    ("lookahead_absent", "Verdicts without any tree pushed ahead.", "outcomes.num_unprepared"),
    ("lookahead_late", "Verdicts whose next tree arrived too late.", "outcomes.num_late_hits"),
    ("discarded_sequences", "Sequences computed once after their end.", "num_discarded"),
    ("host_gap_seconds", "Time the device waited for the host.", "host_gap_s"),
    ("busy_seconds", "Time of steps; its rate is their share of the time.", "duration_s"),
    ("paused_rounds", "Rounds without a tree; plain is faster.", "speculation.num_paused_rounds"),
    ("probe_rounds", "Rounds that measure what trees gain.", "speculation.num_probe_rounds"),
)
"""Name, meaning, and the attribute of a `StepReport` that is added. Rows per step, tokens per round
and the acceptance rate are ratios of two counters."""


class TargetMetrics:
    """Counters and histograms of the step loop: `_COUNTERS`, three counters with labels, and two
    histograms, whose quantiles are `histogram_quantile(0.99, …)`.

    Attributes:
        num_preempted: preempted sequences since the start.
    """

    def __init__(self, registry: CollectorRegistry, log: RoundLog | None = None) -> None:
        """`log` gets a span for each step."""

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"{_PREFIX}_{name}", meaning, labels, registry=registry)

        def histogram(name: str, meaning: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"{_PREFIX}_{name}", meaning, buckets=bounds, registry=registry)

        self.num_preempted = 0
        self._follows_hits = False
        self._log = log
        self._steps = counter("steps", "Engine steps that ran a forward.")
        self._counters = [
            (counter(name, meaning), attrgetter(added)) for name, meaning, added in _COUNTERS
        ]
        self._hits = counter(
            "lookahead_hits", "Verdicts whose next tree had been pushed ahead.", "position", "rank"
        )
        self._misses = counter(
            "lookahead_misses", "Verdicts that no tree pushed ahead fits.", "position"
        )
        self._device_rounds = counter(
            "device_rounds", "Rounds on the device, each of one sequence.", "shape"
        )
        self._seconds = histogram("step_seconds", "Duration of a step.", _STEP_SECONDS)
        self._hit_gaps = histogram(
            "hit_gap_seconds",
            "Time the device waited for the host after a step whose verdicts were all lookahead "
            "hits.",
            _GAP_SECONDS,
        )

    def observe_step(self, report: StepReport) -> None:
        """Counts one step; called on the engine thread."""
        self._steps.inc()
        for counter, added in self._counters:
            counter.inc(added(report))
        self.num_preempted += report.num_preempted
        if report.round_shape is not None:
            self._device_rounds.labels(shape_name(report.round_shape)).inc(report.num_rounds)
        for (position, rank), count in report.outcomes.hits.items():
            self._hits.labels(_label(position), _label(rank)).inc(count)
        for position, count in report.outcomes.misses.items():
            self._misses.labels(_label(position)).inc(count)
        # The gap before this step follows the verdicts of the step before it. The gap is unknown
        # (0) if that step was not the last one read, or if the loop waited for something else in
        # between. A device round behind lookahead hits was launched before the verdicts were read,
        # so its gap of 0 is real: the device did not wait at all.
        is_known = report.host_gap_s > 0.0 or report.round_shape is not None
        if self._follows_hits and is_known:
            self._hit_gaps.observe(report.host_gap_s)
        outcomes = report.outcomes
        is_all_hits = not outcomes.misses and not outcomes.num_unprepared
        self._follows_hits = bool(outcomes.hits) and is_all_hits
        self._seconds.observe(report.duration_s)
        if self._log is not None:
            self._log.span(
                "step",
                report.duration_s,
                end_s=report.end_s,
                rows=report.num_rows,
                sequences=report.num_rounds,
                drafted=report.num_drafted,
                committed=report.num_committed,
                ahead=report.round_shape is not None and report.round_shape.is_ahead,
                hits=report.outcomes.num_hits,
                late=report.outcomes.num_late_hits,
                misses=report.outcomes.num_misses + report.outcomes.num_unprepared,
            )


def _label(number: int) -> str:
    """Returns a label; large numbers share one, because each label value is a time series."""
    return str(number) if number < _MOST_LABELS else f"{_MOST_LABELS}+"


def answer(ask: Callable[[], Future[T]]) -> T | None:
    """Returns the engine's answer on a scraper's thread; None if none comes within a second."""
    with suppress(OutriderError, TimeoutError):
        return ask().result(_TIMEOUT_S)
    return None


def engine_figures(
    engine: Engine, settings: TargetSettings, num_preempted: int
) -> EngineFigures | None:
    """Returns the live figures under vLLM's names; None when the engine does not answer."""
    gauges = answer(engine.gauges)
    if gauges is None:
        return None
    return EngineFigures(
        model_id=settings.model_id,
        num_running=gauges.num_running,
        num_waiting=gauges.num_waiting,
        kv_usage=gauges.num_held_pages / gauges.num_pages,
        num_pages=gauges.num_pages,
        page_size=settings.page_size,
        num_preemptions=num_preempted,
    )
