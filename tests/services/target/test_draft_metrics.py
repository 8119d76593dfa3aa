"""What is wanted of a draft is what it was asked for, wherever an operator looks."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from services.target.admin_service import attachment_message, wanted_gauges
from services.target.drafts.attachments import Attachments
from services.target.metrics import WantedMetrics
from shared.tokens import NO_TREE, DraftReport, TreeRequest, TreeShape
from tests.helpers.one_draft import make_attachment, make_sequence, with_one_draft

LABELS = {"attachment": "a", "worker": "worker-a", "algorithm": "NGRAM"}


def _figures(attachments: Attachments) -> tuple[float | None, ...]:
    """Depth, breadth, rows and verdicts of the one draft, which every page says alike."""
    registry, statuses = CollectorRegistry(), attachments.statuses()
    registry.register(WantedMetrics(lambda: statuses))
    [status] = statuses
    message, gauges = attachment_message(status), wanted_gauges(statuses)
    names = ("step_count", "topk", "draft_token_count", "outcome_count")
    scraped = [
        registry.get_sample_value(f"outrider_target_wanted_{name}", LABELS) for name in names
    ]
    assert [gauges.get(f"wanted_{name}_of_a") for name in names] == scraped
    told = [getattr(message, f"wanted_{name}") for name in names[:3]]
    has_count = message.HasField("wanted_outcome_count")
    assert [*told, message.wanted_outcome_count if has_count else None] == scraped
    return tuple(scraped)


def test_with_no_sequence_asked_for_anything_it_is_the_draft_s_own_or_what_is_pinned() -> None:
    attachments, attachment, _ = with_one_draft()
    own = attachment.base_shape
    assert _figures(attachments) == (own.num_steps, own.topk, own.num_draft_tokens, None)
    attachment.report = DraftReport(pinned_shape=TreeShape(5, 4, 16))
    assert _figures(attachments) == (5, 4, 16, None)


def test_it_is_what_the_sequences_were_asked_for_last() -> None:
    attachments, _, sequence = with_one_draft()
    assignment = attachments.assignments.get(sequence.sequence_id)
    assert assignment is not None
    assignment.requested = TreeRequest(TreeShape(7, 1, 8), num_outcomes=4)
    assert _figures(attachments) == (7, 1, 8, 4)
    assignment.requested = NO_TREE
    assert _figures(attachments) == (0, 0, 0, None)


def test_a_request_fixes_the_number_of_verdicts() -> None:
    attachments, attachment = Attachments(), make_attachment()
    sequence = make_sequence()
    sequence.request = replace(sequence.request, num_outcomes=2)
    attachments.attach(attachment, [sequence], 0.0)
    [opened] = attachment.outbox.opened
    assert opened.tree_request.num_outcomes == 2
    assert _figures(attachments)[-1] == 2
