"""Selects sequences whose trees one pass on the device can grow, and builds its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.draft.sequence import DraftSequence
from shared.tokens import SamplingParams, TreeShape

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from shared.runtime.tree_grower import TreeGrower

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


def split(
    sequences: Sequence[DraftSequence],
) -> tuple[list[DraftSequence], list[DraftSequence]]:
    """Returns those whose trees a pass can grow, and the others."""
    whole: list[DraftSequence] = []
    rest: list[DraftSequence] = []
    for each in sequences:
        (whole if grows_whole(each) else rest).append(each)
    return whole, rest


def batches(
    sequences: Sequence[DraftSequence], max_sequences: int
) -> Iterator[Sequence[DraftSequence]]:
    """Yields the sequences, as many at a time as a pass takes."""
    for start in range(0, len(sequences), max_sequences):
        yield sequences[start : start + max_sequences]


@dataclass(frozen=True, slots=True)
class PassUse:
    """Something that passes are used for.

    Attributes:
        num_sequences: most trees at a time.
        num_choices, is_walk: see `PassKind`.
    """

    grower: TreeGrower
    num_sequences: int
    num_choices: int
    is_walk: bool = False

    def is_ready(self, shape: TreeShape) -> bool:
        """See `TreeGrower.is_ready`."""
        return self.grower.is_ready(
            shape, self.num_sequences, num_choices=self.num_choices, is_walk=self.is_walk
        )

    def capture_next(self, shape: TreeShape, *, is_any_size: bool = False) -> bool:
        """See `TreeGrower.capture_next`."""
        return self.grower.capture_next(
            shape,
            num_choices=self.num_choices,
            is_walk=self.is_walk,
            num_sequences=None if is_any_size else self.num_sequences,
        )


class PassGraphs:
    """See `Drafter` on what is prepared.

    Args:
        uses: returns the uses of passes for trees of a shape, for so many sequences that prepare
            for so many verdicts each.
        budget: returns for how many they do.
        vocab_size: tokens the model can propose.
    """

    def __init__(
        self,
        uses: Callable[[TreeShape, int, int], Sequence[PassUse]],
        budget: Callable[[], int],
        *,
        vocab_size: int,
    ) -> None:
        self._uses, self._budget, self._vocab_size = uses, budget, vocab_size

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """Whether all graphs are there."""
        grown = grown_shape(shape, self._vocab_size)
        return all(use.is_ready(grown) for use in self._uses(grown, num_sequences, self._budget()))

    def prepare_for(self, shape: TreeShape, num_sequences: int) -> bool:
        """Captures one of these; returns whether one was left."""
        grown = grown_shape(shape, self._vocab_size)
        uses = self._uses(grown, num_sequences, self._budget())
        return any(use.capture_next(grown) for use in uses)

    def prepare_next(self, shape: TreeShape) -> bool:
        """Captures one for any number of sequences; returns whether one was left."""
        grown = grown_shape(shape, self._vocab_size)
        uses = self._uses(grown, 1, self._budget())
        return any(use.capture_next(grown, is_any_size=True) for use in uses)
