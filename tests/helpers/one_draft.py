"""`Attachments` without an engine: one draft that never answers, and one sequence."""

from __future__ import annotations

from collections.abc import Iterable

from services.target.drafts.attachment import (
    Attachment,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
    Offer,
)
from services.target.drafts.attachments import Attachments
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.sequence import Sequence
from shared.candidate_columns import CandidateColumns
from shared.tokens import (
    NO_REPORT,
    Candidate,
    Condition,
    DraftReport,
    SamplingParams,
    StopParams,
    TokenTree,
)

TREE = TokenTree.chain([5, 6])
_LIMITS = ModelLimits(1000, 1000, 1000, frozenset())


class _SilentPort:
    """Accepts every message and answers none."""

    def send(self, message: DraftMessage) -> bool:
        return True

    def close(self) -> None:
        pass


def make_attachment(name: str = "a", max_sequences: int = 8, wait_s: float = 1.0) -> Attachment:
    identity = DraftIdentity(name, f"worker-{name}", "m", "NGRAM", max_sequences, 0.0)
    return Attachment(identity, _SilentPort(), DraftTimeout(wait_s))


def make_sequence(
    sequence_id: int = 1,
    *,
    disabled: bool = False,
    num_tokens: int = 50,
    num_draft_tokens: int | None = None,
) -> Sequence:
    """Returns a sequence of two prompt tokens, in round 0."""
    stop = StopParams(num_tokens)
    request = GenerationRequest(
        "r",
        (1, 2),
        SamplingParams(seed=3),
        stop,
        0.0,
        speculation_disabled=disabled,
        num_draft_tokens=num_draft_tokens,
    )
    return Sequence(sequence_id, request, _LIMITS)


def with_one_draft(
    wait_s: float = 1.0, *, num_draft_tokens: int | None = None
) -> tuple[Attachments, Attachment, Sequence]:
    """Returns a sequence assigned to draft `a`, which has not been informed yet."""
    attachments, attachment = Attachments(), make_attachment(wait_s=wait_s)
    sequence = make_sequence(num_draft_tokens=num_draft_tokens)
    attachments.attach(attachment, [sequence], 0.0)
    return attachments, attachment, sequence


def offer(
    attachments: Attachments,
    candidates: Iterable[Candidate],
    now_s: float,
    report: DraftReport = NO_REPORT,
) -> None:
    """Pushes candidates of draft `a`."""
    attachments.offer(Offer("a", CandidateColumns.of(candidates), report, now_s))


def make_candidate(sequence: Sequence, tree: TokenTree = TREE, **changes: int) -> Candidate:
    """Returns a candidate for the sequence's current round and length; `changes` replace these."""
    fence = {"round": sequence.round, "committed_token_count": len(sequence.token_ids)}
    fence.update(changes)
    return Candidate(sequence.sequence_id, fence["round"], fence["committed_token_count"], tree)


def pushed_ahead(condition: Condition, tree: TokenTree = TREE, candidate_id: int = 2) -> Candidate:
    """Returns a candidate for the case that `make_sequence`'s first round meets `condition`."""
    return Candidate(1, 0, 2, tree, condition, candidate_id)


def commit(
    attachments: Attachments,
    sequence: Sequence,
    tokens: tuple[int, ...],
    *,
    accepted: tuple[int, ...] = (),
    was_verified: bool = False,
    now_s: float = 0.0,
) -> None:
    """Commits a round as the engine does."""
    since_s = sequence.decided_s if sequence.has_output else None
    sequence.commit(tokens)
    sequence.decided_s = now_s
    verdicts = attachments.verdicts
    verdicts.count_round(sequence, len(accepted), was_verified=was_verified, now_s=now_s)
    verdicts.decided(
        sequence, tokens, accepted, was_verified=was_verified, since_s=since_s, now_s=now_s
    )
