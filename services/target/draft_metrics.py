"""What the target wants of its drafts, as Prometheus metrics; asked for when they are scraped."""

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
    """Gauges by `attachment`, `worker` and `algorithm` of the drafts that are attached.

    | metric | unit | query |
    |---|---|---|
    | `outrider_target_wanted_step_count` | depth of trees | 0 while none is wanted |
    | `outrider_target_wanted_topk` | children of a node | 1 is a chain |
    | `outrider_target_wanted_draft_token_count` | rows of a tree | the root included |
    | `outrider_target_wanted_outcome_count` | verdicts | absent where the draft decides |
    | `outrider_target_draft_sequence_count` | sequences | how they are spread |
    | `outrider_target_draft_paused_sequence_count` | sequences without trees | |
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
                ("wanted_step_count", "Depth of the trees that are wanted"),
                ("wanted_topk", "Most children of a node of them"),
                ("wanted_draft_token_count", "Rows of one of them, root included"),
                ("wanted_outcome_count", "Verdicts to prepare for at most"),
                ("draft_sequence_count", "Sequences at the draft"),
                ("draft_paused_sequence_count", "Those that no tree is wanted for"),
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
    """Returns what is wanted of a draft, by name. Nothing says for how many verdicts it prepares
    where that is left to it."""
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
