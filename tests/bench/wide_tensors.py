"""What a head borrows from a wide target."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.models.config import ModelConfig
from shared.models.decoder_weights import LM_HEAD_KEY
from tests.bench.wide_model import EMBEDDING_KEY, WideModel


@dataclass(frozen=True, slots=True)
class WideTensors:
    """Embedding and lm_head, widened when they are asked for."""

    model: WideModel
    dtype: torch.dtype

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    def embedding(self) -> Tensor:
        return self.model.read(EMBEDDING_KEY).to(self.dtype)

    def lm_head(self) -> Tensor:
        return self.model.read(LM_HEAD_KEY).to(self.dtype)
