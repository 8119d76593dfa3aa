"""One tree for a prompt, asked for by `ProposeTree`: a link of its own with a single sequence."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from services.draft.events import (
    CandidatesReady,
    FeatureRows,
    LinkTerms,
    Opening,
    Output,
    ProbeDone,
    SequencesOpened,
)
from services.draft.worker import MAX_TREE_NODES
from shared.tokens import SamplingParams, TreeShape

_UNLIMITED_VOCAB = 2**31


def probe_terms(vocab_size: int | None) -> LinkTerms:
    """Returns the terms of a probe's link.

    Args:
        vocab_size: of the drafter; None takes any token.
    """
    size = vocab_size or _UNLIMITED_VOCAB
    return LinkTerms(size, MAX_TREE_NODES, max_sequences=1, mirrors_noise=True)


def probe_opening(
    link: int,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    shape: TreeShape | None,
    features: FeatureRows | None,
) -> SequencesOpened:
    """Returns the event that makes the tree due. See `DraftEngine.propose_once`."""
    opening = Opening(
        0, token_ids, len(token_ids), sampling, 0, shape, is_probe=True, features=features
    )
    return SequencesOpened(link, (opening,))


def resolve_probe(future: Future[ProbeDone], output: Output) -> None:
    """Takes what the engine delivers on a probe's link: candidates never come there, announcements
    do; a refused probe comes back as released."""
    if isinstance(output, CandidatesReady):
        return
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(output, ProbeDone):
        future.set_result(output)
    else:
        future.set_result(ProbeDone(output.link, None, 0.0))
