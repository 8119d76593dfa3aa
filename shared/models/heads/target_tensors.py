"""The two tensors a head borrows from its target."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

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
