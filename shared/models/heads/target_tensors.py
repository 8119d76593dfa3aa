"""The two tensors a head borrows from its target."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder_weights import LM_HEAD_KEY
from shared.models.weights import WeightPart, read_weights

EMBEDDING_KEY = "model.embed_tokens.weight"


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
        self._dtype = dtype
        self._device = device
        self._embedding: Tensor | None = None

    @property
    def config(self) -> ModelConfig:
        return self._config

    def embedding(self) -> Tensor:
        if self._embedding is None:
            self._embedding = self._read(EMBEDDING_KEY)
        return self._embedding

    def lm_head(self) -> Tensor:
        return self.embedding() if self._config.tie_word_embeddings else self._read(LM_HEAD_KEY)

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
