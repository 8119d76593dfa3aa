"""The draft's counters, a log line and a span for each sequence, and its metrics, read from the
counters when they are scraped."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

log = logging.getLogger(__name__)

_BATCH_SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0),
)


def counter(name: str, meaning: str) -> Any:
    """Declares a number of a dataclass that is a counter in metrics; see `families`."""
    return field(default=0, metadata={"family": (CounterMetricFamily, name, meaning)})


def gauge(name: str, meaning: str) -> Any:
    """Declares a number of a dataclass that is a gauge in metrics."""
    return field(default=0, metadata={"family": (GaugeMetricFamily, name, meaning)})


def families(prefix: str, figures: DataclassInstance) -> Iterator[Metric]:
    """Yields the metrics that the fields of a dataclass declare, as `PREFIX_NAME`."""
    for declared in fields(figures):
        if "family" in declared.metadata:
            family, name, meaning = declared.metadata["family"]
            yield family(f"{prefix}_{name}", meaning, value=getattr(figures, declared.name))


@dataclass(slots=True)
class DraftCounters:
    """Counters since the start. The engine thread writes them, any thread reads them.

    Attributes:
        outcomes: verdicts by what happened to the tree.
        batch_seconds: time of the drafter for one batch of trees.
    """

    num_trees: int = counter("trees", "Trees proposed")
    num_nodes: int = counter("tree_tokens", "Nodes of proposed trees")
    num_pushed: int = counter("pushed_trees", "Trees pushed ahead of their verdict, beside trees")
    num_ahead: int = counter("ahead_steps", "Steps that drafted ahead, mostly of one forward")
    ahead_s: float = counter("ahead_seconds", "Time of these steps; batch_seconds has none of it")
    num_lookahead_hits: int = counter("lookahead_hits", "Verdicts whose tree had been pushed")
    num_prepared: int = counter(
        "preparations",
        "One-time preparations, such as CUDA graphs, while serving or for a requested shape",
    )
    prepared_s: float = counter("preparation_seconds", "Time of one-time preparations")
    num_caught_up: int = counter("caught_up_tokens", "Tokens computed between proposals")
    caught_up_s: float = counter("caught_up_seconds", "Time of computing them")
    num_accepted: int = counter("accepted_tokens", "Nodes of verified trees that were committed")
    num_opened: int = counter("opened_sequences", "Sequences assigned by targets")
    num_released: int = counter(
        "released_sequences", "Sequences given back: memory was short or data invalid; near 0"
    )
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

    Besides `DraftCounters`: verdicts by outcome, live figures as in `GetServerInfo`, and by
    `WireMetrics` the bytes and messages of streams.

    Args:
        gauges: live figures by name; asked on the scraper's thread.
    """

    def __init__(self, counters: DraftCounters, gauges: Callable[[], Mapping[str, float]]) -> None:
        self._counters = counters
        self._gauges = gauges

    def collect(self) -> Iterator[Metric]:
        counters = self._counters
        yield from families(_PREFIX, counters)
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
