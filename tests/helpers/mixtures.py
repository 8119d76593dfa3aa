"""Tiny mixtures of experts with a next-token layer in their folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.models.heads.mtp_loader import load_mtp
from shared.models.heads.target_tensors import TargetFolder
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import VOCAB_SIZE

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "deepseek_v3": EXPERTS
    | {
        "head_dim": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "glm4_moe": EXPERTS | {"use_qk_norm": True, "attention_bias": True},
}
NUM_LAYERS = 3


def mixture_shape(family: str, vocab_size: int = 64) -> TinyShape:
    """Returns a shape with one layer more than the target: the block of the next-token layer."""
    return TinyShape(
        vocab_size=vocab_size, num_layers=NUM_LAYERS + 1, num_kv_heads=4, overrides=MIXTURES[family]
    )


def write_mixture(folder: Path, family: str, vocab_size: int = 64) -> dict[str, Tensor]:
    """Turns the last layer of a checkpoint into a next-token layer; returns its own tensors."""
    write_checkpoint(folder, family, mixture_shape(family, vocab_size))
    path = folder / "config.json"
    changes = {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1, "layer_types": None}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    draw = torch.Generator().manual_seed(3)
    sizes = {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}
    own = {
        name: float("norm" in name) + 0.25 * torch.randn(size, generator=draw)
        for name, size in sizes.items()
    }
    prefixed = {f"model.layers.{NUM_LAYERS}.{name}.weight": own[name] for name in own}
    file = folder / "model.safetensors"
    save_file(load_file(file) | prefixed, file)
    return own


def load_mixture(folder: Path, family: str, device: torch.device) -> Pair:
    """Writes a mixture with the vocabulary of small engines; loads it and its next-token layer."""
    write_mixture(folder, family, VOCAB_SIZE)
    target = TargetFolder(folder, dtype=torch.float32, device=device)
    return Pair(
        load_decoder(folder, dtype=torch.float32, device=device),
        load_mtp(folder, target, dtype=torch.float32, device=device),
    )
