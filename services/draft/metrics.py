"""The draft's counters, a log line and a span for each sequence, and its metrics, read from the
counters when they are scraped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.draft.drafters.drafter import Proposal
from services.draft.events import Probe
from services.draft.sequence import DraftSequence, SequenceKey
from shared.telemetry.start_up import RoundLog
from shared.telemetry.tracing import NO_REQUEST, NO_TRACER, Span, Tracer, current_request_id
from shared.telemetry.vllm_metrics import StepHistogram
from shared.tokens import OpenedSequence, Outcome, Verdict

log = logging.getLogger(__name__)

_BATCH_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0),
)


@dataclass(slots=True)
class DraftCounters:
    """Counters since the start. The engine thread writes them, any thread reads them.

    Attributes:
        num_trees, num_nodes: proposed trees and their nodes.
        num_caught_up: committed tokens computed between proposals.
        caught_up_s: time of computing them.
        num_accepted: nodes of verified trees that were committed.
        outcomes: verdicts by what happened to the tree.
        num_pushed: trees pushed ahead of their verdict; not counted in `num_trees`.
        num_ahead: steps that drafted ahead, mostly of one forward.
        ahead_s: time of these steps, choosing the verdicts included; not part of `batch_seconds`.
        num_lookahead_hits: verdicts for which a tree had been pushed.
        num_prepared: one-time preparations, such as capturing a graph, while sequences were open or
            for a requested shape.
        prepared_s: time of these preparations.
        num_opened: sequences opened.
        num_released: sequences given back, because memory was short or the target's data invalid.
        batch_seconds: time of the drafter for one batch of trees.
    """

    num_trees: int = 0
    num_nodes: int = 0
    num_caught_up: int = 0
    caught_up_s: float = 0.0
    num_accepted: int = 0
    num_pushed: int = 0
    num_ahead: int = 0
    ahead_s: float = 0.0
    num_lookahead_hits: int = 0
    num_prepared: int = 0
    prepared_s: float = 0.0
    num_opened: int = 0
    num_released: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    batch_seconds: StepHistogram = field(default_factory=lambda: StepHistogram(_BATCH_SECONDS))


@dataclass(slots=True)
class _Record:
    request_id: str
    span: Span
    num_rounds: int = 0
    num_verified: int = 0
    num_accepted: int = 0


class DraftRecorder:
    """Records the sequences of an engine. Called on the engine's thread."""

    def __init__(self, tracer: Tracer = NO_TRACER, log: RoundLog | None = None) -> None:
        self.counters = DraftCounters()
        self._tracer = tracer
        self._log = log
        self._records: dict[SequenceKey, _Record] = {}

    @property
    def on_span(self) -> Callable[[str, float, float], None] | None:
        """Logs a name, start and end of the drafter's part of a round; None without a round log."""
        return None if self._log is None else self._span

    def _span(self, name: str, start_s: float, end_s: float) -> None:
        assert self._log is not None
        self._log.span(name, end_s - start_s, end_s=end_s)

    def opened(self, key: SequenceKey, opening: OpenedSequence) -> None:
        """A target opened a sequence. Probes come from no target and are not recorded."""
        if isinstance(opening, Probe):
            return
        self.counters.num_opened += 1
        attributes: dict[str, str | int] = {
            "outrider.request_id": opening.request_id,
            "outrider.num_tokens": len(opening.token_ids),
        }
        span = self._tracer.begin("draft.sequence", opening.traceparent, attributes)
        self._records[key] = _Record(opening.request_id or NO_REQUEST, span)

    def decided(self, key: SequenceKey, verdict: Verdict) -> None:
        """A verdict on a round of the sequence arrived."""
        num_accepted = len(verdict.accepted_node_indices)
        self.counters.outcomes[verdict.outcome] += 1
        self.counters.num_accepted += num_accepted
        record = self._records.get(key)
        if record is not None:
            record.num_rounds += 1
            record.num_verified += verdict.outcome in (
                Outcome.VERIFIED,
                Outcome.VERIFIED_NEXT_READY,
            )
            record.num_accepted += num_accepted

    def closed(self, sequence: DraftSequence) -> None:
        """The sequence ended, was released, or its link closed."""
        record = self._records.pop(sequence.key, None)
        if record is None:
            return
        figures: dict[str, str | int | float] = {
            "num_rounds": record.num_rounds,
            "num_verified_rounds": record.num_verified,
            "num_accepted": record.num_accepted,
            "draft_s": round(sequence.draft_s, 6),
        }
        token = current_request_id.set(record.request_id)
        log.info("sequence closed", extra=figures)
        current_request_id.reset(token)
        record.span.end({f"outrider.{name}": value for name, value in figures.items()})

    def proposed(self, proposals: Sequence[Proposal], elapsed_s: float) -> None:
        """The drafter proposed a batch of trees."""
        counters = self.counters
        counters.num_trees += len(proposals)
        counters.num_nodes += sum(len(proposal.tree) for proposal in proposals)
        counters.batch_seconds.observe(elapsed_s)
        if self._log is not None:
            self._log.span("propose", elapsed_s, trees=len(proposals))

    def drafted_ahead(self, num_trees: int, elapsed_s: float) -> None:
        """The drafter spent a step on drafting ahead, which completed `num_trees` trees."""
        self.counters.num_pushed += num_trees
        self.counters.num_ahead += 1
        self.counters.ahead_s += elapsed_s
        if self._log is not None:
            self._log.span("ahead", elapsed_s, trees=num_trees)

    def prepared(self, elapsed_s: float) -> None:
        """The drafter did a one-time preparation."""
        self.counters.num_prepared += 1
        self.counters.prepared_s += elapsed_s
        if self._log is not None:
            self._log.span("prepare", elapsed_s, trees=0)

    def caught_up(self, num_tokens: int, elapsed_s: float) -> None:
        """The drafter computed committed tokens."""
        self.counters.num_caught_up += num_tokens
        self.counters.caught_up_s += elapsed_s
        if self._log is not None:
            self._log.span("read", elapsed_s, tokens=num_tokens)


_PREFIX = "outrider_draft"


class DraftMetrics(Collector):
    """Counters and gauges of one draft.

    | metric | unit | query |
    |---|---|---|
    | `outrider_draft_trees` | trees proposed | trees a second: its rate |
    | `outrider_draft_tree_tokens` | nodes proposed | nodes a tree: over trees |
    | `outrider_draft_batch_seconds` | seconds | p99 by `histogram_quantile(0.99, …)` |
    | `outrider_draft_pushed_trees` | trees pushed ahead of their verdict | |
    | `outrider_draft_ahead_steps` | steps that drafted ahead, mostly of a forward | |
    | `outrider_draft_ahead_seconds` | seconds of these steps | share of time: its rate |
    | `outrider_draft_lookahead_hits` | verdicts with a pushed tree | hit rate: over verdicts |
    | `outrider_draft_preparations`, `…_preparation_seconds` | one-time work, such as graphs | |
    | `outrider_draft_wire_bytes`, `…_wire_messages` | by `direction` | |
    | `outrider_draft_caught_up_tokens` | committed tokens computed between proposals | |
    | `outrider_draft_caught_up_seconds` | seconds of computing them | share of time: its rate |
    | `outrider_draft_verdicts` | rounds, by `outcome` | misses: rate of `missed` over all |
    | `outrider_draft_accepted_tokens` | nodes accepted | accepted a round: over verdicts |
    | `outrider_draft_opened_sequences` | sequences opened | |
    | `outrider_draft_released_sequences` | sequences given back | should be near 0 |
    | `outrider_draft_attached_target_count` | targets | at 0 the draft is idle |
    | `outrider_draft_weight_swap_count` | swaps of weights since the start | |
    | `outrider_draft_sequence_count`, … | live figures of the drafter, as in `GetServerInfo` | |

    Args:
        gauges: live figures by name; asked on the scraper's thread.
    """

    def __init__(self, counters: DraftCounters, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        for name, meaning, value in (
            ("trees", "Trees proposed", counters.num_trees),
            ("tree_tokens", "Nodes of proposed trees", counters.num_nodes),
            ("pushed_trees", "Trees pushed ahead of their verdict", counters.num_pushed),
            ("ahead_steps", "Steps that drafted ahead of a verdict", counters.num_ahead),
            ("ahead_seconds", "Time of steps that drafted ahead of a verdict", counters.ahead_s),
            ("lookahead_hits", "Verdicts whose tree had been pushed", counters.num_lookahead_hits),
            ("preparations", "One-time preparations, such as CUDA graphs", counters.num_prepared),
            ("preparation_seconds", "Time of one-time preparations", counters.prepared_s),
            ("caught_up_tokens", "Committed tokens computed by the draft", counters.num_caught_up),
            ("caught_up_seconds", "Time of computing committed tokens", counters.caught_up_s),
            ("accepted_tokens", "Nodes that targets accepted", counters.num_accepted),
            ("opened_sequences", "Sequences assigned by targets", counters.num_opened),
            ("released_sequences", "Sequences handed back to targets", counters.num_released),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", meaning, value=value)
        verdicts = CounterMetricFamily(
            f"{_PREFIX}_verdicts", "Rounds decided, by outcome", labels=("outcome",)
        )
        for outcome in Outcome:
            verdicts.add_metric((outcome.name.lower(),), counters.outcomes[outcome])
        seconds = HistogramMetricFamily(
            f"{_PREFIX}_batch_seconds", "Time to draft a batch of trees"
        )
        counters.batch_seconds.add_to(seconds, ())
        yield from (verdicts, seconds)
        for name, figure in self._gauges().items():
            yield GaugeMetricFamily(f"{_PREFIX}_{name}", "Live figure", value=figure)
