"""Tiny random EAGLE and EAGLE-3 checkpoints with the key names of published ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class TinyHead:
    """Sizes and switches of a head; the defaults fit the default `TinyShape` with 64 tokens.

    Attributes:
        draft_vocab_size: None leaves lm_head and d2t out.
        num_features: target layers that `fc` reads.
        config: further keys of config.json; None removes a key.
    """

    kind: str = "EAGLE"
    vocab_size: int = 64
    hidden_size: int = 32
    target_hidden_size: int = 32
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    max_position_embeddings: int = 128
    draft_vocab_size: int | None = None
    num_features: int = 3
    has_embedding: bool = True
    has_fc_bias: bool = False
    has_fc_norms: bool = False
    has_input_norm: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


HEADS = {
    "eagle": TinyHead(),
    "mapped": TinyHead(),
    "eagle3": TinyHead(kind="EAGLE3", draft_vocab_size=20, has_embedding=False),
    "eagle3.1": TinyHead(
        kind="EAGLE3", draft_vocab_size=20, has_fc_norms=True, config={"norm_output": True}
    ),
}
"""EAGLE with and without a token map, EAGLE-3 and EAGLE-3.1."""


def write_head(folder: Path, head: TinyHead, *, seed: int = 7, suffix: str = "safetensors") -> Path:
    """Writes `config.json` and `model.safetensors` or, for `bin`, `pytorch_model.bin`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(head)))
    save_head(folder, head_tensors(head, seed=seed), suffix=suffix)
    return folder


def save_head(folder: Path, tensors: dict[str, Tensor], *, suffix: str = "safetensors") -> None:
    """Writes only the tensors."""
    if suffix == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")


def head_config(head: TinyHead) -> dict[str, Any]:
    """Returns the contents of config.json."""
    architecture = "LlamaForCausalLMEagle3" if head.kind == "EAGLE3" else "LlamaForCausalLMEagle"
    config: dict[str, Any] = {
        "architectures": [architecture],
        "hidden_size": head.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "intermediate_size": head.intermediate_size,
        "vocab_size": head.vocab_size,
        "max_position_embeddings": head.max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "float32",
    }
    if head.kind == "EAGLE3":
        config["draft_vocab_size"] = head.draft_vocab_size
        config["target_hidden_size"] = head.target_hidden_size
        config["fc_norm"] = head.has_fc_norms
        config["norm_before_fc"] = head.has_input_norm
    config.update(head.config)
    return {key: value for key, value in config.items() if value is not None}


def head_tensors(head: TinyHead, *, seed: int = 7) -> dict[str, Tensor]:
    """Returns every tensor of the checkpoint. Biases and norms are random, too, so that a test
    notices if one is left out."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        key: (1.0 if "norm" in key else 0.0) + 0.25 * torch.randn(shape, generator=draw)
        for key, shape in _shapes(head).items()
    }
    if head.kind == "EAGLE3" and head.draft_vocab_size is not None:
        chosen = torch.randperm(head.vocab_size, generator=draw)[: head.draft_vocab_size]
        token_ids = chosen.sort().values
        tensors["d2t"] = token_ids - torch.arange(head.draft_vocab_size)
        mask = torch.zeros(head.vocab_size, dtype=torch.bool)
        tensors["t2d"] = mask.index_fill(0, token_ids, True)
    return tensors


def _shapes(head: TinyHead) -> dict[str, tuple[int, ...]]:
    hidden = head.hidden_size
    is_eagle3 = head.kind == "EAGLE3"
    layer = "midlayer." if is_eagle3 else "layers.0."
    read = head.num_features * head.target_hidden_size if is_eagle3 else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, read)}
    if head.has_embedding:
        shapes["embed_tokens.weight"] = (head.vocab_size, hidden)
    if head.has_fc_bias:
        shapes["fc.bias"] = (hidden,)
    norms = ["post_attention_layernorm"]
    if is_eagle3:
        norms += ["input_layernorm", "hidden_norm"]
        shapes["norm.weight"] = (hidden,)
        if head.draft_vocab_size is not None:
            shapes["lm_head.weight"] = (head.draft_vocab_size, hidden)
        if head.has_input_norm:
            shapes["input_norm.weight"] = (read,)
        for index in range(head.num_features if head.has_fc_norms else 0):
            shapes[f"fc_norm.{index}.weight"] = (head.target_hidden_size,)
    shapes |= {f"{layer}{norm}.weight": (hidden,) for norm in norms}
    queries, keys = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    inputs = 2 * hidden if is_eagle3 else hidden
    shapes |= {
        f"{layer}self_attn.q_proj.weight": (queries, inputs),
        f"{layer}self_attn.k_proj.weight": (keys, inputs),
        f"{layer}self_attn.v_proj.weight": (keys, inputs),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (head.intermediate_size, hidden),
        f"{layer}mlp.up_proj.weight": (head.intermediate_size, hidden),
        f"{layer}mlp.down_proj.weight": (hidden, head.intermediate_size),
    }
    return shapes
