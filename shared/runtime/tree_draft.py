"""Whole trees of one shape, grown or walked level by level by any model and kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState
from shared.speculation.growth import Children
from shared.speculation.tree import TreeRows


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """Trees and how likely the target is to accept them.

    Attributes:
        paths: `[S, T]` float32, score of the path to each row; the root's is 0.
        beams: `[2, S, L, K]` int64, token of each node that is computed on each of L levels, and
            the place of its parent in the level before.
    """

    rows: TreeRows
    paths: Tensor
    beams: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ComputedRows:
    """Candidates and states of the root and of L computed levels of K nodes.

    Attributes:
        choices: what may follow each row, `[S, 1 + L * K, W]`.
        states: `[S, 1 + L * K, H]`, which rows below them read; None for a model without.
    """

    choices: Children
    states: Tensor | None


GrowthLevels: TypeAlias = Iterator[ScoredRows | ComputedRows | None]
"""Trees that grow in parts: nothing after each forward that others follow, then the trees, and at
the end, where it was asked for, what is known of their rows."""


KnownLevel: TypeAlias = tuple[ForwardBatch, Tensor]
"""Rows, and for each the row of the level before whose state it reads; see `Growth.beam`."""


class Scores(Protocol):
    """Finds the best tokens after the rows of S slots, level by level from the root on."""

    def look(self, logits: Tensor) -> None:
        """Takes the next level's logits `[S * N, Vd]`."""

    def choices(self) -> Children:
        """Returns what may follow each row so far, see `ComputedRows`."""


class Growth(Protocol):
    """`TreeGrowth` of S slots: `add` a level's logits, compute the rows of `beam`."""

    @property
    def scores(self) -> Scores:
        """Scores of the rows that were added."""

    def add(self, logits: Tensor) -> None:
        """Adds the children of the root, later of the last beam, from logits `[S * N, Vd]`."""

    def beam(self) -> tuple[ForwardBatch, Tensor]:
        """Returns the rows of the last level's beam, and for each the row `[S * K]` int64 of the
        level before whose state it reads."""

    def scored(self) -> ScoredRows:
        """Returns the trees with their best nodes."""

    def finish(self) -> RoundTree:
        """Returns them laid out for the target."""


class Forwards(Protocol):
    """The forwards of one pass, each of which may read what the one before left."""

    def first(self) -> Tensor:
        """Computes the open rows; returns the logits of the last one of each slot."""

    def next(self, batch: ForwardBatch, parents: Tensor) -> Tensor:
        """Computes a level; returns its logits. See `Growth.beam`."""

    def walk(self, levels: Iterable[KnownLevel]) -> Iterable[Tensor]:
        """Computes the open rows and levels that do not depend on what is found; returns the logits
        of each, those of the open rows first."""

    def states(self) -> Tensor | None:
        """Returns the states of all rows, see `ComputedRows`."""


class DraftCode(Protocol):
    """A model with the kernels that draft with it."""

    @property
    def batches(self) -> RoundBatches: ...

    def seen(self, state: RoundState) -> RoundState:
        """Returns the state of lanes as this code counts their tokens."""

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """See `RoundBatches.of_open_rows`."""

    def forwards(self, batch: ForwardBatch, sources: Tensor, *, keeps_states: bool) -> Forwards:
        """Returns what computes open rows and levels.

        Args:
            sources: the row of what is read beside tokens that each open row reads.
        """

    def scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Scores:
        """Returns what looks for so many tokens after each row; 0 finds what trees need."""

    def growth(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Growth:
        """Returns trees without a level; see `scores`."""

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """Returns the kind that does all that this code does for `sampling`."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeDraft:
    """Drafts for all slots of a state, for a target that is elsewhere.

    Attributes:
        num_choices: W, tokens to find after the root and each computed node, at least as many as
            children; the best leaves are computed for it when the trees are there. 0 for none.
    """

    code: DraftCode
    batches: RoundBatches
    num_choices: int = 0

    def grow_levels(
        self, state: RoundState, sampling: RoundSampling, sources: Tensor
    ) -> GrowthLevels:
        """Grows trees behind the open rows.

        Args:
            state: its `page_table` is not read.
            sources: `[S * W]` int64, see `DraftCode.forwards`.
        """
        forwards = self._forwards(state, sources)
        growth = self.code.growth(state, sampling, self.num_choices)
        yield from grow(growth, forwards, self.batches.shape.tree.num_steps)
        leaves = growth.beam() if self.num_choices else None
        yield growth.scored()
        if leaves is not None:
            growth.scores.look(forwards.next(*leaves))
            yield ComputedRows(growth.scores.choices(), forwards.states())

    def walk(
        self, state: RoundState, sampling: RoundSampling, sources: Tensor, walks: Tensor
    ) -> ComputedRows:
        """Computes given trees behind the open rows; see `grow_levels`.

        Args:
            walks: `[S, L * K, 2 + L]` int64, see `RoundBatches.of_walks`.
        """
        forwards = self._forwards(state, sources)
        scores = self.code.scores(state, sampling, self.num_choices)
        for logits in forwards.walk(self.batches.of_walks(state, walks)):
            scores.look(logits)
        return ComputedRows(scores.choices(), forwards.states())

    def _forwards(self, state: RoundState, sources: Tensor) -> Forwards:
        batch, _ = self.code.open_rows(state)
        return self.code.forwards(batch, sources, keeps_states=bool(self.num_choices))


def grow(growth: Growth, forwards: Forwards, num_steps: int) -> Iterator[None]:
    """Computes what trees of so many levels grow from; stops between two forwards."""
    growth.add(forwards.first())
    for _ in range(num_steps - 1):
        yield None
        growth.add(forwards.next(*growth.beam()))


def grown(
    code: DraftCode,
    state: RoundState,
    sampling: RoundSampling,
    batch: ForwardBatch,
    sources: Tensor,
) -> RoundTree:
    """Returns the trees that grow behind the open rows of a state.

    Args:
        batch: the open rows.
        sources: see `DraftCode.forwards`.
    """
    growth = code.growth(state, sampling, 0)
    forwards = code.forwards(batch, sources, keeps_states=False)
    for _ in grow(growth, forwards, code.batches.shape.tree.num_steps):
        pass
    return growth.finish()


@dataclass(frozen=True, slots=True, eq=False)
class PackedTrees:
    """Trees: `[S, 3 T + 2 L K]` int32, tokens, parents and the bits of the scores of T rows, then
    tokens and parents of the rows of L levels."""

    numbers: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """Candidates and states of computed rows.

    Attributes:
        numbers: `[S, 2 N W]` int32, the tokens that may follow N rows, then the bits of their
            scores.
        states: `[S, N, H]`; None for a model without.
    """

    numbers: Tensor
    states: Tensor | None


Part: TypeAlias = PackedTrees | PackedRows | None
Parts: TypeAlias = Iterator[Part]
"""A pass under way: each step queues a part of it on the device, and some bring a result, which
holds until the next pass."""


def packed(part: ScoredRows | ComputedRows | None) -> Part:
    """Returns what `GrowthLevels` yield."""
    match part:
        case ScoredRows():
            rows, beams = part.rows, part.beams.flatten(2).int().unbind()
            bits = part.paths.view(torch.int32)
            columns = (rows.token_ids.int(), rows.parents.int(), bits, *beams)
            return PackedTrees(torch.cat(columns, dim=1))
        case ComputedRows():
            choices = part.choices
            bits = choices.log_probs.contiguous().view(torch.int32)
            numbers = torch.cat((choices.token_ids.int(), bits), dim=1).flatten(1)
            return PackedRows(numbers, part.states)
        case None:
            return None
