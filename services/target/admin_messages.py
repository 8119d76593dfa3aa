"""Maintenance messages about the engine and its drafts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from services.target.draft_metrics import wanted_figures
from services.target.drafts.attachment import AttachmentStatus
from services.target.engine_gauges import EngineGauges
from services.target.settings import TargetSettings
from services.target.step_report import shape_name
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.settings import shown_settings


def gauge_values(gauges: EngineGauges) -> Mapping[str, float]:
    """Returns the live figures by their names on the wire."""
    shape = gauges.round_shape
    return {
        "waiting_request_count": gauges.num_waiting,
        "running_request_count": gauges.num_running,
        "page_count": gauges.num_pages,
        "free_page_count": gauges.num_free_pages,
        "cached_page_count": gauges.num_cached_pages,
        "held_page_count": gauges.num_held_pages,
        "drafted_for_sequence_count": gauges.num_drafted_for,
        "paused_sequence_count": gauges.num_paused,
        "probe_seconds": gauges.probe_s,
        "speculation_on": float(gauges.speculates),
        "round_step_count": 0 if shape is None else shape.num_steps,
        "round_topk": 0 if shape is None else shape.topk,
        "round_draft_token_count": 0 if shape is None else shape.num_draft_tokens,
        **{
            f"round_ms_of_{shape_name(tree)}_for_{size}": 1e3 * each
            for (tree, size), each in gauges.round_s.items()
        },
    }


def wanted_gauges(statuses: Iterable[AttachmentStatus]) -> Mapping[str, float]:
    """Returns the gauges of each draft, by names that end in that of its attachment."""
    return {
        f"{name}_of_{status.attachment.identity.attachment_id}": value
        for status in statuses
        for name, value in wanted_figures(status).items()
    }


def target_settings(settings: TargetSettings) -> Mapping[str, str]:
    """Returns every setting by flag name; the verification mode is the rule in force, whichever
    flag names it."""
    return {**shown_settings(settings), "verification-mode": settings.verification.value}


def attachment_message(status: AttachmentStatus) -> pb.Attachment:
    """Returns the message about one draft."""
    attachment = status.attachment
    identity, counters = attachment.identity, attachment.counters
    message = pb.Attachment(
        attachment_id=identity.attachment_id,
        worker_id=identity.worker_id,
        model_id=identity.model_id,
        algorithm=identity.algorithm,
        sequence_count=len(attachment.sequence_ids),
        verified_round_count=counters.num_verified_rounds,
        accepted_token_count=counters.num_accepted,
        missed_round_count=counters.num_missed_rounds,
        stale_candidate_count=counters.num_stale_candidates,
        paused_sequence_count=status.num_paused,
        level_acceptances=status.level_rates,
        warming=attachment.report.is_warming,
        idle_detail="" if status.idle is None else status.idle.detail,
    )
    for name, value in wanted_figures(status).items():
        setattr(message, name, value)
    message.turnaround_duration.FromNanoseconds(_ns(attachment.timeout.response_s or 0.0))
    message.draft_duration.FromNanoseconds(_ns(attachment.report.draft_s or 0.0))
    message.attach_time.FromNanoseconds(_ns(identity.attach_time_s))
    return message


def _ns(duration_s: float) -> int:
    return round(duration_s * 1e9)
