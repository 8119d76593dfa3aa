"""Chooses the code that runs each of the two parts of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from shared.kernels.kernel_settings import has_triton
from shared.models.heads.head import DraftHead, SplitHeadLayer
from shared.runtime.round_batches import RoundShape
from shared.runtime.round_draft import RoundDraft
from shared.runtime.round_selection import RoundSelection
from shared.runtime.round_verification import RoundVerification

# A kernel holds a whole tree, row by row, in the registers of one program.
_MAX_ROWS = 64
_MAX_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class RoundParts:
    """Makers of the parts, called with the fields of `RoundDraft` and `RoundVerification`."""

    draft: Callable[..., RoundDraft]
    verification: Callable[..., RoundVerification]

    @classmethod
    def of(cls, head: DraftHead, shape: RoundShape, device: torch.device) -> RoundParts:
        """Returns the fastest parts for a head."""
        if not (has_triton(device) and fits_kernels(shape)):
            return PLAIN
        # Triton is not installed where there is no CUDA.
        from shared.runtime.fused_code import FusedRoundDraft

        is_split = all(isinstance(layer, SplitHeadLayer) for layer in head.layers)
        return cls(FusedRoundDraft if is_split else RoundDraft, verification_for(shape, device))


@dataclass(frozen=True, slots=True)
class SelectionParts:
    """Makers of the parts of rounds without a head, called with the fields of `RoundSelection` and
    `RoundVerification`."""

    selection: Callable[..., RoundSelection]
    verification: Callable[..., RoundVerification]

    @classmethod
    def of(cls, device: torch.device) -> SelectionParts:
        """Returns the fastest parts on a device."""
        if not has_triton(device):
            return cls(RoundSelection, RoundVerification)
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_selection_fused import FusedRoundSelection
        from shared.runtime.round_verification_fused import FusedRoundVerification

        return cls(FusedRoundSelection, FusedRoundVerification)


def verification_for(shape: RoundShape, device: torch.device) -> type[RoundVerification]:
    """Returns the fastest verification of trees of a shape."""
    if not (has_triton(device) and fits_kernels(shape)):
        return RoundVerification
    # Triton is not installed where there is no CUDA.
    from shared.runtime.round_verification_fused import FusedRoundVerification

    return FusedRoundVerification


PLAIN = RoundParts(RoundDraft, RoundVerification)


def fits_kernels(shape: RoundShape) -> bool:
    """Whether the fused kernels take trees of this shape."""
    return shape.num_tree_rows <= _MAX_ROWS and shape.num_candidates <= _MAX_CANDIDATES
