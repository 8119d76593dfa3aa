"""The two tensors a head borrows from its target."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shared.layers.linear import Linear
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.weights import WeightPart, read_weights

EMBEDDING_KEY = DecoderKeys().embedding


class TargetTensors(Protocol):
    """Where a head gets the target's embedding and lm_head from; either may never be asked for."""

    @property
    def config(self) -> ModelConfig: ...

    def embedding(self) -> Tensor:
        """Returns `[V, H]` in the head's dtype, on its device."""

    def lm_head(self) -> Tensor:
        """Returns `[V, H]`, unpacked; the embedding itself where the target ties the two."""


class TargetFolder:
    """Reads them from the target's folder and nothing else of it."""

    def __init__(self, folder: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises: CheckpointError if the folder has no usable config or weights."""
        self._config = ModelConfig.from_folder(folder)
        self._checkpoint = Checkpoint.open(folder)
        self._keys = DecoderKeys.of(self._checkpoint.files)
        self._dtype = dtype
        self._device = device
        self._embedding: Tensor | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    def embedding(self) -> Tensor:
        if self._embedding is None:
            self._embedding = self._read(self._keys.embedding)
        return self._embedding

    def lm_head(self) -> Tensor:
        return (
            self.embedding() if self._config.tie_word_embeddings else self._read(self._keys.lm_head)
        )

    def _read(self, key: str) -> Tensor:
        shape = (self._config.vocab_size, self._config.hidden_size)
        tensors = read_weights(
            self._checkpoint,
            [WeightPart(key, shape, key)],
            # Everything else in the folder is none of a head's business.
            ignored_prefixes=("",),
            dtype=self._dtype,
            device=self._device,
        )
        return tensors[key]


class DecoderTensors:
    """Those of a target in this process, which hold no memory of their own where the head's dtype
    is the target's, but for a packed lm_head."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype) -> None:
        assert decoder.group is None, "this process has a part of the tensors only"
        self._decoder = decoder
        self._dtype = dtype

    @property
    def config(self) -> ModelConfig:
        return self._decoder.config

    def embedding(self) -> Tensor:
        return self._decoder.embedding.to(self._dtype)

    def lm_head(self) -> Tensor:
        if self.config.tie_word_embeddings:
            return self.embedding()
        return self._decoder.lm_head.dense().to(self._dtype)


class BorrowedTensors:
    """Tensors that a head copies from a target in its process, and copies again after a weight
    update. Found by value, so make this before either changes.

    Args:
        token_ids: `[Vd]` int64, the target's tokens that the head scores; None when all.
    """

    def __init__(
        self, decoder: Decoder, embedding: Tensor, lm_head: Linear, token_ids: Tensor | None
    ) -> None:
        self._target = DecoderTensors(decoder, embedding.dtype)
        self._token_ids = token_ids
        self._embedding = _if_equal(embedding, self._target.embedding())
        own = _if_equal(lm_head.dense(), self._lm_head())
        self._head = None if own is None else lm_head

    @torch.inference_mode()
    def follow(self) -> None:
        """Copies what is borrowed; where it is the target's memory, there is nothing to copy."""
        if self._embedding is not None:
            _copy(self._embedding, self._target.embedding())
        if self._head is not None:
            _copy(self._head.weight.values, Linear.of(self._lm_head()).weight.values)

    def _lm_head(self) -> Tensor:
        whole = self._target.lm_head()
        return whole if self._token_ids is None else whole.index_select(0, self._token_ids)


def _if_equal(own: Tensor, target: Tensor) -> Tensor | None:
    return own if own.shape == target.shape and torch.equal(own, target) else None


def _copy(place: Tensor, source: Tensor) -> None:
    is_packed = place.layout != torch.strided
    if is_packed or place.data_ptr() != source.data_ptr():
        place.copy_(source)


def target_tensors(
    folder: Path, decoder: Decoder | None, *, dtype: torch.dtype, device: torch.device
) -> TargetTensors:
    """Returns the tensors of `decoder`, or those in its folder where it is of another process.

    Raises:
        CheckpointError: the folder has no usable config or weights.
    """
    if decoder is None:
        return TargetFolder(folder, dtype=dtype, device=device)
    assert decoder.device.type == device.type, f"head on {device}, target on {decoder.device}"
    return DecoderTensors(decoder, dtype)
