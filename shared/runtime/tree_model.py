"""The models that grow whole trees in one pass: a draft head, a language model of its own, or a
head that drafts blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shared.kernels.kernel_settings import has_triton
from shared.kernels.split_plan import sequence_of_rows
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.models.decoder import Decoder
from shared.models.heads.dflash import DflashHead
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead, SplitHeadLayer
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.round_selection import RoundSelection
from shared.runtime.round_verification import RoundVerification
from shared.runtime.tree_draft import (
    BlockDraft,
    DecoderDraft,
    DraftCode,
    LayeredDraft,
    RoundDraft,
    TreeDraft,
)

# Chooses the code that runs each of the two parts of a round.

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
        if not runs_fused(shape, device):
            return PLAIN
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_fused import FusedRoundDraft

        is_split = all(isinstance(layer, SplitHeadLayer) for layer in head.layers)
        return cls(FusedRoundDraft if is_split else RoundDraft, verification_for(shape, device))


def selection_for(device: torch.device) -> type[RoundSelection]:
    """Returns the fastest choice among trees that were prepared."""
    if not has_triton(device):
        return RoundSelection
    # Triton is not installed where there is no CUDA.
    from shared.runtime.round_fused import FusedRoundSelection

    return FusedRoundSelection


def verification_for(shape: RoundShape, device: torch.device) -> type[RoundVerification]:
    """Returns the fastest verification of trees of a shape."""
    if not runs_fused(shape, device):
        return RoundVerification
    # Triton is not installed where there is no CUDA.
    from shared.runtime.round_fused import FusedRoundVerification

    return FusedRoundVerification


PLAIN = RoundParts(RoundDraft, RoundVerification)


def runs_fused(shape: RoundShape, device: torch.device) -> bool:
    """Whether the fused kernels take trees of this shape, and the device has them."""
    fits = shape.num_tree_rows <= _MAX_ROWS and shape.num_candidates <= _MAX_CANDIDATES
    return fits and has_triton(device)


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes differ.

    Attributes:
        num_choices: see `TreeDraft`.
        is_split: it can stop after each forward. Each sequence has one open row, which comes
            behind one that a pass computed: where rows read states, it reads that one's.
        is_walk: it computes trees that are given instead of growing them.
        is_plain: it scores by `RequestScores`, in plain torch and without graphs.
    """

    num_choices: int = 0
    is_split: bool = False
    is_walk: bool = False
    is_plain: bool = False


class RoundModel(Protocol):
    """A model with its cache, as rounds use it."""

    @property
    def pool(self) -> KvPool: ...

    @property
    def block_size(self) -> int:
        """See `RoundShape`."""

    @property
    def vocab_size(self) -> int:
        """Tokens it can propose."""

    @property
    def id_limit(self) -> int:
        """Their ids are below it."""

    @property
    def feature_spec(self) -> FeatureSpec | None:
        """The target's hidden states that rows read beside tokens; None for none."""

    @property
    def token_lead(self) -> int:
        """By how many tokens a row reads ahead of its position."""

    def lane_states(self, num_slots: int) -> Tensor | None:
        """Returns room for `RoundState.last_states`; None where there is none of them."""

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> Tensor | None:
        """Computes rows for the cache, with the features `[R, W]` that they read.

        Returns:
            What each layer but the last left on them, `[N, R, H]`; None where nobody reads it.
        """

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> DraftCode:
        """Returns what drafts in the shape of `batches` for rounds, by the fastest code for it.

        Args:
            source_rows: `[any, source_width]`, the features of open rows; None where they read
                none.
        """


class TreeModel(RoundModel, Protocol):
    """A model that also grows trees in passes."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def group(self) -> TensorGroup | None:
        """Processes that share the model and grow the same trees."""

    def source_width(self, kind: PassKind) -> int:
        """Returns the width of what open rows read beside tokens; 0 when it is nothing."""

    def draft(self, batches: RoundBatches, source_rows: Tensor, kind: PassKind) -> TreeDraft:
        """Returns what drafts in the shape of `batches`, by the fastest code for it.

        Args:
            source_rows: `[any, source_width]`, the features of open rows or, in passes that are
                split, states.
        """


class _LevelByLevel:
    """A model that grows trees level by level, and keeps nothing of lanes but its cache."""

    __slots__ = ()

    @property
    def block_size(self) -> int:
        return 0

    def lane_states(self, num_slots: int) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True)
class _AnyHead(_LevelByLevel):
    """A draft head with its cache, of one layer or several."""

    head: DraftHead
    pool: KvPool

    @property
    def vocab_size(self) -> int:
        return self.head.vocabulary.size

    @property
    def id_limit(self) -> int:
        return self.head.config.vocab_size

    @property
    def feature_spec(self) -> FeatureSpec:
        return self.head.feature_spec

    @property
    def token_lead(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class HeadModel(_AnyHead):
    """See `TreeModel`."""

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def group(self) -> None:
        return None

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> None:
        assert features is not None, "a head reads features"
        self.head.forward(batch, self.head.fuse(features), self.pool)

    def source_width(self, kind: PassKind) -> int:
        return self.head.embedding.shape[1] if kind.is_split else self.head.feature_spec.width

    def draft(self, batches: RoundBatches, source_rows: Tensor, kind: PassKind) -> TreeDraft:
        parts = PLAIN if kind.is_plain else self._parts(batches)
        code = parts.draft(self.head, self.pool, batches, source_rows, kind.is_split)
        return TreeDraft(code, batches, kind.num_choices)

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> DraftCode:
        assert source_rows is not None, "a head reads features"
        return self._parts(batches).draft(self.head, self.pool, batches, source_rows)

    def _parts(self, batches: RoundBatches) -> RoundParts:
        return RoundParts.of(self.head, batches.shape, self.pool.device)


@dataclass(frozen=True, slots=True)
class DecoderModel(_LevelByLevel):
    """See `TreeModel`."""

    decoder: Decoder
    pool: KvPool

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def vocab_size(self) -> int:
        return self.decoder.num_proposed

    @property
    def id_limit(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def group(self) -> TensorGroup | None:
        return self.decoder.group

    @property
    def feature_spec(self) -> None:
        return None

    @property
    def token_lead(self) -> int:
        return 0

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> None:
        self.decoder.forward(batch, self.pool)

    def source_width(self, kind: PassKind) -> int:
        return 0

    def draft(self, batches: RoundBatches, source_rows: Tensor, kind: PassKind) -> TreeDraft:
        code = self._plain(batches) if kind.is_plain else self.code(batches, None)
        return TreeDraft(code, batches, kind.num_choices)

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> DecoderDraft:
        if not runs_fused(batches.shape, self.pool.device):
            return self._plain(batches)
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_fused import FusedDecoderDraft

        return FusedDecoderDraft(self.decoder, self.pool, batches)

    def _plain(self, batches: RoundBatches) -> DecoderDraft:
        return DecoderDraft(self.decoder, self.pool, batches)


@dataclass(frozen=True, slots=True)
class BlockModel:
    """A head that drafts blocks; see `RoundModel`."""

    head: DflashHead
    pool: KvPool
    block_size: int

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def id_limit(self) -> int:
        return self.head.vocab_size

    @property
    def feature_spec(self) -> FeatureSpec:
        return self.head.feature_spec

    @property
    def token_lead(self) -> int:
        return 1

    def lane_states(self, num_slots: int) -> None:
        return None

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> None:
        assert features is not None, "a head reads features"
        self.head.write_context(features, batch.positions, batch.slots, self.pool)

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> BlockDraft:
        assert source_rows is not None, "a head reads features"
        if not runs_fused(batches.shape, self.pool.device):
            return BlockDraft(self.head, self.pool, batches, source_rows)
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_fused import FusedBlockDraft

        return FusedBlockDraft(self.head, self.pool, batches, source_rows)


@dataclass(frozen=True, slots=True)
class LayeredModel(_AnyHead):
    """A head of several next-token layers, which drafts chains; see `RoundModel`."""

    def lane_states(self, num_slots: int) -> Tensor:
        size = (num_slots, len(self.head.layers) - 1, self.head.embedding.shape[1])
        return torch.zeros(size, dtype=self.head.dtype, device=self.pool.device)

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> Tensor:
        assert features is not None, "a head reads features"
        hidden, left = self.head.fuse(features), list[Tensor]()
        rows = torch.arange(len(batch.token_ids), device=hidden.device)
        ends = batch.query_starts[1:].index_select(0, sequence_of_rows(batch))
        for layer in range(len(self.head.layers)):
            # A layer reads tokens as many rows further on; behind the last one it has no row.
            is_own = rows + layer < ends
            tokens = batch.token_ids.index_select(0, torch.where(is_own, rows + layer, rows))
            own = replace(batch, token_ids=tokens, slots=torch.where(is_own, batch.slots, 0))
            hidden = self.head.forward(own, hidden, self.pool, layer=layer)
            left.append(hidden)
        return torch.stack(left[:-1])

    def code(self, batches: RoundBatches, source_rows: Tensor | None) -> LayeredDraft:
        assert source_rows is not None, "a head reads features"
        if not runs_fused(batches.shape, self.pool.device):
            return LayeredDraft(self.head, self.pool, batches, source_rows)
        # Triton is not installed where there is no CUDA.
        from shared.runtime.round_fused import FusedLayeredDraft

        return FusedLayeredDraft(self.head, self.pool, batches, source_rows)
