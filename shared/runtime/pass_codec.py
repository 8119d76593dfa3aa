"""Packs the results of a pass, part by part, into tensors that take one copy to the host each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shared.runtime.tree_draft import ComputedRows, ScoredRows


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
