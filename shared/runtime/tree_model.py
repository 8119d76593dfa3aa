"""The models that grow whole trees in one pass: a draft head, or a language model of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shared.kernels.kernel_settings import has_triton
from shared.kv.pool import KvPool
from shared.layers.tensor_group import TensorGroup
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.runtime.decoder_draft import DecoderDraft
from shared.runtime.round_batches import RoundBatches
from shared.runtime.round_draft import GrowthLevels
from shared.runtime.round_parts import RoundParts, fits_kernels
from shared.runtime.round_sampling import RoundSampling
from shared.runtime.round_state import RoundState


class TreeDraft(Protocol):
    """Grows trees of one shape for all slots of a state."""

    def grow_levels(
        self, state: RoundState, sampling: RoundSampling, feature_slots: Tensor
    ) -> GrowthLevels:
        """Grows as `RoundDraft.grow_scored` says, in parts."""

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        """See `RoundDraft.kind_of`."""


class TreeModel(Protocol):
    """A model with its cache."""

    @property
    def pool(self) -> KvPool: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def vocab_size(self) -> int:
        """Tokens it can propose."""

    @property
    def feature_width(self) -> int:
        """Of the rows it reads beside tokens; 0 when it reads tokens only."""

    @property
    def group(self) -> TensorGroup | None:
        """Processes that share the model and grow the same trees."""

    def draft(self, batches: RoundBatches, feature_rows: Tensor, num_choices: int) -> TreeDraft:
        """Returns what drafts in the shape of `batches`, by the fastest code for it.

        Args:
            num_choices: see `DecoderDraft`; heads find none.
        """


@dataclass(frozen=True, slots=True)
class HeadModel:
    """See `TreeModel`."""

    head: DraftHead
    pool: KvPool

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def vocab_size(self) -> int:
        return self.head.vocabulary.size

    @property
    def feature_width(self) -> int:
        return self.head.feature_spec.width

    @property
    def group(self) -> None:
        return None

    def draft(self, batches: RoundBatches, feature_rows: Tensor, num_choices: int) -> TreeDraft:
        assert num_choices == 0, "a head looks for no choices"
        parts = RoundParts.of(self.head, batches.shape, self.pool.device)
        return parts.draft(self.head, self.pool, batches, feature_rows)


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """See `TreeModel`."""

    decoder: Decoder
    pool: KvPool

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.dtype

    @property
    def vocab_size(self) -> int:
        return self.decoder.config.vocab_size

    @property
    def feature_width(self) -> int:
        return 0

    @property
    def group(self) -> TensorGroup | None:
        return self.decoder.group

    def draft(self, batches: RoundBatches, feature_rows: Tensor, num_choices: int) -> TreeDraft:
        if not (has_triton(self.pool.device) and fits_kernels(batches.shape)):
            return DecoderDraft(self.decoder, self.pool, batches, num_choices)
        # Triton is not installed where there is no CUDA.
        from shared.runtime.decoder_draft_fused import FusedDecoderDraft

        return FusedDecoderDraft(self.decoder, self.pool, batches, num_choices)
