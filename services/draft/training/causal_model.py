"""Any causal language model of transformers, with weights in 8 bits read by this project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint
from shared.models.decoder_weights import LM_HEAD_KEY
from shared.models.heads.target_tensors import EMBEDDING_KEY
from shared.models.scaled_weights import QUANTIZATION_CONFIG


def load_causal_model(folder: Path, dtype: torch.dtype) -> Any:
    """Returns the model of a folder on the CPU, in `dtype`.

    Raises:
        OSError, ValueError: transformers cannot load the folder.
        CheckpointError: its weights in 8 bits cannot be read, or are not those of the config.
    """
    config: Any = AutoConfig.from_pretrained(folder)
    if getattr(config, QUANTIZATION_CONFIG, None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    delattr(config, QUANTIZATION_CONFIG)
    checkpoint = Checkpoint.open(folder)
    weights = {key: checkpoint.read(key) for key in checkpoint.files}
    if config.tie_word_embeddings:
        weights[LM_HEAD_KEY] = weights[EMBEDDING_KEY]
    build: Any = AutoModelForCausalLM.from_config
    model = build(config, dtype=dtype)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return model.eval()
