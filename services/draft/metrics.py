"""Metrics of the draft, declared in one place; read from its counters when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from services.draft.engine import DraftEngine
from services.draft.recorder import DraftCounters
from shared.errors import OutriderError
from shared.tokens import Outcome

_PREFIX = "outrider_draft"
_GAUGES_TIMEOUT_S = 1.0


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


def engine_figures(engine: DraftEngine) -> Mapping[str, float]:
    """Returns the engine's live figures; empty when it does not answer. Waits a second at most."""
    try:
        return engine.gauges().result(_GAUGES_TIMEOUT_S)
    except (OutriderError, TimeoutError):
        return {}
