"""Metrics of the target, declared in one place. A counter costs one call a step, not a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.target.drafts.attachment import AttachmentStatus
from services.target.engine import Engine
from services.target.settings import TargetSettings
from services.target.step_report import OutcomeTally, StepReport, shape_name
from shared.errors import OutriderError
from shared.telemetry.start_up import RoundLog
from shared.telemetry.vllm_metrics import EngineFigures

_PREFIX = "outrider_target"
_LABELS = ("attachment", "worker", "algorithm")
_TIMEOUT_S = 1.0


class WantedMetrics(Collector):
    """Gauges by `attachment`, `worker` and `algorithm`, read at each scrape.

    | metric | unit | query |
    |---|---|---|
    | `outrider_target_wanted_step_count` | depth of the requested trees | 0: none requested |
    | `outrider_target_wanted_topk` | their children of a node | 1 is a chain |
    | `outrider_target_wanted_draft_token_count` | their rows | root included |
    | `outrider_target_wanted_outcome_count` | outcomes to prepare for | absent: the draft decides |
    | `outrider_target_draft_sequence_count` | sequences at the draft | |
    | `outrider_target_draft_paused_sequence_count` | those without tree requests | |
    | `outrider_target_draft_idle` | 1 while none of its trees is verified, by `reason` | |

    Args:
        statuses: called on the scraper's thread.
    """

    def __init__(self, statuses: Callable[[], Sequence[AttachmentStatus]]) -> None:
        self._statuses = statuses

    def collect(self) -> Iterator[Metric]:
        families = {
            name: GaugeMetricFamily(f"{_PREFIX}_{name}", meaning, labels=_LABELS)
            for name, meaning in (
                ("wanted_step_count", "Depth of the requested trees"),
                ("wanted_topk", "Most children of a node in the requested trees"),
                ("wanted_draft_token_count", "Rows of a requested tree, root included"),
                ("wanted_outcome_count", "Most outcomes to prepare trees for"),
                ("draft_sequence_count", "Sequences at the draft"),
                ("draft_paused_sequence_count", "Sequences without tree requests"),
            )
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
    """Returns what is requested of a draft, by name; without `wanted_outcome_count` where the draft
    decides."""
    shape = status.shape
    figures = {
        "wanted_step_count": 0 if shape is None else shape.num_steps,
        "wanted_topk": 0 if shape is None else shape.topk,
        "wanted_draft_token_count": 0 if shape is None else shape.num_draft_tokens,
    }
    if status.num_outcomes is not None:
        figures["wanted_outcome_count"] = status.num_outcomes
    return figures


def engine_statuses(engine: Engine) -> Sequence[AttachmentStatus]:
    """Returns the drafts of an engine; none when it does not answer. Waits a second at most."""
    try:
        return engine.attachments().result(_TIMEOUT_S)
    except (OutriderError, TimeoutError):
        return ()


_GAUGES_TIMEOUT_S = 1.0
_MOST_LABELS = 8
_GAP_SECONDS = (0.00005, 0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.005, 0.01)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class TargetMetrics:
    """Counters and histograms of the step loop.

    | metric | unit | query |
    |---|---|---|
    | `outrider_target_steps` | steps | `rate(outrider_target_steps_total[1m])` |
    | `outrider_target_step_seconds` | seconds | p99 by `histogram_quantile(0.99, …)` |
    | `outrider_target_rows` | rows computed | rows a step: its rate over that of steps |
    | `outrider_target_tokens` | tokens committed | tokens a second: its rate |
    | `outrider_target_rounds` | rounds, each of one sequence | tokens a round: tokens over rounds |
    | `outrider_target_drafted_tokens` | tree nodes verified | |
    | `outrider_target_accepted_tokens` | tree nodes accepted | acceptance: over drafted |
    | `outrider_target_busy_seconds` | seconds of steps | share of the time: its rate |
    | `outrider_target_paused_rounds` | rounds | without a tree, because plain steps are faster |
    | `outrider_target_probe_rounds` | rounds | of trials: what they bring is measured |
    | `outrider_target_fallback_rounds` | rounds | with an n-gram tree of the target |
    | `outrider_target_fallback_tokens` | tokens of those rounds | a round: over these |
    | `outrider_target_device_rounds` | rounds on the device by `shape` | share: over rounds |
    | `outrider_target_preemptions` | sequences | near 0 is good |
    | `outrider_target_lookahead_hits` | verdicts | the next tree was here |
    | `outrider_target_lookahead_misses` | verdicts | trees were here, none fits |
    | `outrider_target_lookahead_absent` | verdicts | no tree was here |
    | `outrider_target_lookahead_late` | verdicts | the tree came too late |
    | `outrider_target_wire_bytes`, `…_wire_messages` | by `direction`: sent to drafts, received | |
    | `outrider_target_discarded_sequences` | computed once after their end | |
    | `outrider_target_host_gap_seconds` | seconds the device waits | near 0 is good |
    | `outrider_target_hit_gap_seconds` | those after a lookahead hit | mean: sum over count |
    """

    def __init__(self, registry: CollectorRegistry, log: RoundLog | None = None) -> None:
        """`log` also takes a span a step."""

        def counter(name: str, meaning: str, *labels: str) -> Counter:
            return Counter(f"outrider_target_{name}", meaning, labels, registry=registry)

        self.num_preempted = 0
        self._follows_hits = False
        self._log = log
        self._steps = counter("steps", "Engine steps that ran a forward.")
        self._rows = counter("rows", "Rows computed: prompt, plain and tree.")
        self._rounds = counter("rounds", "Rounds, each of one sequence: draw, verify, commit.")
        self._tokens = counter("tokens", "Tokens committed.")
        self._drafted = counter("drafted_tokens", "Draft nodes verified.")
        self._accepted = counter("accepted_tokens", "Draft nodes accepted.")
        self._preempted = counter("preemptions", "Sequences preempted for want of KV pages.")
        self._hits = counter(
            "lookahead_hits", "Verdicts whose next tree had been pushed ahead.", "position", "rank"
        )
        self._misses = counter(
            "lookahead_misses", "Verdicts that no tree pushed ahead fits.", "position"
        )
        self._unprepared = counter("lookahead_absent", "Verdicts without any tree pushed ahead.")
        self._late = counter("lookahead_late", "Verdicts whose next tree arrived too late.")
        self._discarded = counter("discarded_sequences", "Sequences computed once after their end.")
        self._host_gap = counter("host_gap_seconds", "Time the device waited for the host.")
        self._busy = counter("busy_seconds", "Time of steps.")
        self._paused = counter(
            "paused_rounds", "Rounds without a tree because plain steps are faster."
        )
        self._probes = counter("probe_rounds", "Rounds of trials, which measure what they bring.")
        self._fallback_rounds = counter(
            "fallback_rounds", "Rounds that verified an n-gram tree of the target."
        )
        self._fallback_tokens = counter("fallback_tokens", "Tokens committed by these rounds.")
        self._device_rounds = counter(
            "device_rounds", "Rounds on the device, each of one sequence.", "shape"
        )
        self._seconds = Histogram(
            "outrider_target_step_seconds",
            "Duration of a step.",
            buckets=_STEP_SECONDS,
            registry=registry,
        )
        self._hit_gaps = Histogram(
            "outrider_target_hit_gap_seconds",
            "Time the device waited for the host after a step whose verdicts were all lookahead "
            "hits.",
            buckets=_GAP_SECONDS,
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
        self.num_preempted += report.num_preempted
        if report.round_shape is not None:
            self._device_rounds.labels(shape_name(report.round_shape)).inc(report.num_rounds)
        self._observe_outcomes(report.outcomes)
        self._paused.inc(report.speculation.num_paused_rounds)
        self._probes.inc(report.speculation.num_probe_rounds)
        self._busy.inc(report.duration_s)
        self._discarded.inc(report.num_discarded)
        self._fallback_rounds.inc(report.num_fallback_rounds)
        self._fallback_tokens.inc(report.num_fallback_committed)
        self._observe_gap(report)
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

    def _observe_gap(self, report: StepReport) -> None:
        """A gap follows the verdicts of the step before. There is none where that step was not the
        last to be read, or where something else was awaited in between. A round on the device
        behind hits was launched before they were read: the device did not wait at all."""
        self._host_gap.inc(report.host_gap_s)
        is_known = report.host_gap_s > 0.0 or report.round_shape is not None
        if self._follows_hits and is_known:
            self._hit_gaps.observe(report.host_gap_s)
        self._follows_hits = report.outcomes.is_all_hits

    def _observe_outcomes(self, outcomes: OutcomeTally) -> None:
        for (position, rank), count in outcomes.hits.items():
            self._hits.labels(_label(position), _label(rank)).inc(count)
        for position, count in outcomes.misses.items():
            self._misses.labels(_label(position)).inc(count)
        self._unprepared.inc(outcomes.num_unprepared)
        self._late.inc(outcomes.num_late_hits)


def _label(number: int) -> str:
    """Every label value is a time series of its own, so large numbers share one."""
    return str(number) if number < _MOST_LABELS else f"{_MOST_LABELS}+"


def engine_figures(
    engine: Engine, settings: TargetSettings, num_preempted: int
) -> EngineFigures | None:
    """Returns the live figures; None when the engine does not answer. Called while scraped, on
    another thread than the engine's."""
    try:
        gauges = engine.gauges().result(_GAUGES_TIMEOUT_S)
    except (OutriderError, TimeoutError):
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
