"""The target's tensors as a running head has them."""

from __future__ import annotations

from torch import Tensor

from shared.models.config import ModelConfig
from shared.models.heads.head import DraftHead
from shared.models.heads.target_tensors import TargetTensors


class LentTensors(TargetTensors):
    """The target's tensors as a running head has them, so that they are not read again."""

    def __init__(self, head: DraftHead, target: ModelConfig) -> None:
        self._head, self._config = head, target

    @property
    def config(self) -> ModelConfig:
        return self._config

    def embedding(self) -> Tensor:
        return self._head.embedding

    def lm_head(self) -> Tensor:
        return self._head.vocabulary.lm_head.dense()
