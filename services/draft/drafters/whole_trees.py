"""Which trees a pass on the device can score by the kind of their sampling. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.draft.sequence import DraftSequence
from shared.tokens import SamplingParams, TreeShape

# What is cut away beyond these is drawn too often by a pass that leaves cuts out.
_FEWEST_TOP_K = 4
_LEAST_TOP_P = 0.5
_MOST_MIN_P = 0.5


def grows_whole(sequence: DraftSequence) -> bool:
    """Whether a pass can score what the request asks for: greedily, or by the coupled rule without
    penalties and bias, and without cuts that leave a few tokens to draw from."""
    if sequence.shape is not None:
        # One tree of a shape that somebody has made up is not worth a graph.
        return False
    sampling = pass_sampling(sequence)
    is_coupled = sequence.mirrors_noise and not _cuts_deep(sampling)
    is_drawn_whole = not sampling.shapes_logits and (sampling.is_greedy or is_coupled)
    return is_drawn_whole and not sequence.draws_chains


def grown_shape(shape: TreeShape, vocab_size: int) -> TreeShape:
    """Returns a shape without useless parts: levels beyond the last kept node of a
    chain, and children beyond the vocabulary."""
    num_steps, topk = min(shape.num_steps, shape.max_node_count), min(shape.topk, vocab_size)
    if (num_steps, topk) == (shape.num_steps, shape.topk):
        return shape
    return replace(shape, num_steps=num_steps, topk=topk)


def pass_sampling(sequence: DraftSequence) -> SamplingParams:
    """Returns what a pass scores the sequence's tokens by: the request's own sampling, or greedy
    where that leaves the target one token, whatever the noise is."""
    sampling = sequence.sampling
    return replace(sampling, temperature=0.0) if sampling.top_k == 1 else sampling


def _cuts_deep(sampling: SamplingParams) -> bool:
    return (
        0 < sampling.top_k < _FEWEST_TOP_K
        or sampling.top_p < _LEAST_TOP_P
        or sampling.min_p > _MOST_MIN_P
    )


def batches(
    sequences: Sequence[DraftSequence], max_sequences: int
) -> Iterator[Sequence[DraftSequence]]:
    """Yields the sequences, as many at a time as a pass takes."""
    for start in range(0, len(sequences), max_sequences):
        yield sequences[start : start + max_sequences]
