"""Prometheus gauges of the attached drafts: requested trees, sequences, idle drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.target.drafts.attachment import AttachmentStatus
from services.target.engine import Engine
from shared.errors import OutriderError

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
