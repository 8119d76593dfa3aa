"""The models that draft whole trees in one pass: a draft head, a separate language model, or a head
that drafts blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

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
from shared.models.heads.head import DraftHead
from shared.runtime.round_batches import RoundBatches, RoundShape
from shared.runtime.tree_draft import (
    BlockDraft,
    DecoderDraft,
    DraftCode,
    LayeredDraft,
    RoundDraft,
)

_Code = TypeVar("_Code")
# One program of a fused kernel holds a whole tree in its registers.
_MAX_ROWS = 64
_MAX_CANDIDATES = 1024


def runs_fused(shape: RoundShape, device: torch.device) -> bool:
    """Whether the fused kernels support trees of this shape on the device."""
    fits = shape.num_tree_rows <= _MAX_ROWS and shape.num_candidates <= _MAX_CANDIDATES
    return fits and has_triton(device)


def fastest(plain: type[_Code], shape: RoundShape, device: torch.device) -> type[_Code]:
    """Returns the fused replacement of a class in plain torch, named `Fused` and its name; or
    `plain` itself where the fused kernels do not run."""
    if not runs_fused(shape, device):
        return plain
    # Triton is not installed where there is no CUDA.
    from shared.runtime import round_fused

    fused: type[_Code] = getattr(round_fused, f"Fused{plain.__name__}")
    return fused


@dataclass(frozen=True, slots=True)
class PassKind:
    """The properties by which passes differ.

    Attributes:
        num_choices: see `TreeDraft`.
        is_split: whether the pass can stop after each forward. Each sequence then has one open row,
            behind a row that an earlier pass computed; if rows read states, it reads that row's.
        is_walk: whether the pass computes given trees instead of growing trees.
        is_plain: whether it scores by `RequestScores`, in plain torch and without graphs.
    """

    num_choices: int = 0
    is_split: bool = False
    is_walk: bool = False
    is_plain: bool = False


class RoundModel:
    """A model with its cache, as rounds use it."""

    __slots__ = ()
    pool: KvPool

    @property
    def block_size(self) -> int:
        """See `RoundShape`."""
        return 0

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the model can propose."""
        raise NotImplementedError

    @property
    def id_limit(self) -> int:
        """Upper bound of their ids, exclusive."""
        return self.vocab_size

    @property
    def feature_spec(self) -> FeatureSpec | None:
        """The target's hidden states that rows read beside tokens; None for none."""
        raise NotImplementedError

    @property
    def token_lead(self) -> int:
        """By how many tokens a row reads ahead of its position."""
        return 1

    def lane_states(self, num_slots: int) -> Tensor | None:
        """Returns a new tensor for `RoundState.last_states`; None if the model has none."""
        return None

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> Tensor | None:
        """Computes rows for the cache, with the features `[R, W]` that they read.

        Returns:
            The output of each layer but the last, `[N, R, H]`; None if nothing reads it.
        """
        raise NotImplementedError

    def code(
        self, batches: RoundBatches, source_rows: Tensor | None, kind: PassKind = PassKind()
    ) -> DraftCode:
        """Returns the fastest code that drafts in the shape of `batches`.

        Args:
            source_rows: `[any, source_width]`, the features of open rows or, in split passes, their
                states; None if rows read neither.
            kind: kind of the passes of a `TreeModel`.
        """
        raise NotImplementedError


class TreeModel(RoundModel):
    """A model that also grows trees in passes."""

    __slots__ = ()

    @property
    def dtype(self) -> torch.dtype:
        raise NotImplementedError

    @property
    def group(self) -> TensorGroup | None:
        """Ranks that share the model and grow the same trees."""
        return None

    def source_width(self, kind: PassKind) -> int:
        """Returns the width of the source rows of open rows; 0 if they read only tokens."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class _AnyHead(RoundModel):
    """A draft head, of one layer or several."""

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


@dataclass(frozen=True, slots=True)
class HeadModel(_AnyHead, TreeModel):
    """A draft head of one layer."""

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> None:
        assert features is not None, "a head reads features"
        self.head.forward(batch, self.head.fuse(features), self.pool)

    def source_width(self, kind: PassKind) -> int:
        return self.head.embedding.shape[1] if kind.is_split else self.head.feature_spec.width

    def code(
        self, batches: RoundBatches, source_rows: Tensor | None, kind: PassKind = PassKind()
    ) -> RoundDraft:
        assert source_rows is not None, "a head reads features"
        draft = RoundDraft
        if not kind.is_plain:
            draft = fastest(RoundDraft, batches.shape, self.pool.device)
        return draft(self.head, self.pool, batches, source_rows, kind.is_split)


@dataclass(frozen=True, slots=True)
class DecoderModel(TreeModel):
    """A language model."""

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

    def code(
        self, batches: RoundBatches, source_rows: Tensor | None, kind: PassKind = PassKind()
    ) -> DecoderDraft:
        draft = DecoderDraft
        if not kind.is_plain:
            draft = fastest(DecoderDraft, batches.shape, self.pool.device)
        return draft(self.decoder, self.pool, batches)


@dataclass(frozen=True, slots=True)
class BlockModel(RoundModel):
    """A head that drafts blocks.

    Attributes:
        num_rows: rows of a block.
    """

    head: DflashHead
    pool: KvPool
    num_rows: int

    @property
    def block_size(self) -> int:
        return self.num_rows

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def feature_spec(self) -> FeatureSpec:
        return self.head.feature_spec

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> None:
        assert features is not None, "a head reads features"
        self.head.write_context(features, batch.positions, batch.slots, self.pool)

    def code(
        self, batches: RoundBatches, source_rows: Tensor | None, kind: PassKind = PassKind()
    ) -> BlockDraft:
        assert source_rows is not None, "a head reads features"
        draft = fastest(BlockDraft, batches.shape, self.pool.device)
        return draft(self.head, self.pool, batches, source_rows)


@dataclass(frozen=True, slots=True)
class LayeredModel(_AnyHead):
    """A head of several next-token layers, which drafts chains."""

    def lane_states(self, num_slots: int) -> Tensor:
        size = (num_slots, len(self.head.layers) - 1, self.head.embedding.shape[1])
        return torch.zeros(size, dtype=self.head.dtype, device=self.pool.device)

    def compute(self, batch: ForwardBatch, features: Tensor | None) -> Tensor:
        assert features is not None, "a head reads features"
        hidden, outputs = self.head.fuse(features), list[Tensor]()
        rows = torch.arange(len(batch.token_ids), device=hidden.device)
        ends = batch.query_starts[1:].index_select(0, sequence_of_rows(batch))
        for layer in range(len(self.head.layers)):
            # Layer k reads the token k rows further on; without such a token it has no row.
            is_row = rows + layer < ends
            tokens = batch.token_ids.index_select(0, torch.where(is_row, rows + layer, rows))
            moved = replace(batch, token_ids=tokens, slots=torch.where(is_row, batch.slots, 0))
            hidden = self.head.forward(moved, hidden, self.pool, layer=layer)
            outputs.append(hidden)
        return torch.stack(outputs[:-1])

    def code(
        self, batches: RoundBatches, source_rows: Tensor | None, kind: PassKind = PassKind()
    ) -> LayeredDraft:
        assert source_rows is not None, "a head reads features"
        draft = fastest(LayeredDraft, batches.shape, self.pool.device)
        return draft(self.head, self.pool, batches, source_rows)
