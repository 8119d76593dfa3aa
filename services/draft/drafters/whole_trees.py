"""Which sequences have trees that one pass of the device can grow, and the batches it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from services.draft.sequence import DraftSequence


def grows_whole(sequence: DraftSequence) -> bool:
    """Whether a pass can score what the request asks for: greedily, or by the coupled rule without
    penalties and bias."""
    sampling = sequence.sampling
    is_plain = not (sampling.has_penalties or sampling.logit_bias)
    is_scored = sampling.is_greedy or sequence.mirrors_noise
    return is_plain and is_scored and not sequence.draws_chains


def split(
    sequences: Sequence[DraftSequence],
) -> tuple[list[DraftSequence], list[DraftSequence]]:
    """Returns those whose trees a pass can grow, and the others."""
    return (
        [each for each in sequences if grows_whole(each)],
        [each for each in sequences if not grows_whole(each)],
    )


def batches(
    sequences: Sequence[DraftSequence], max_sequences: int
) -> Iterator[Sequence[DraftSequence]]:
    """Yields the sequences, as many at a time as a pass takes."""
    for start in range(0, len(sequences), max_sequences):
        yield sequences[start : start + max_sequences]
