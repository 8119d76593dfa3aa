"""Tiny random targets with next-token layers in their folder, under the real key names, and a plain
implementation of the layers as an oracle."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.dense_layer import DenseLayer, plain_norm
from tests.helpers.head_oracle import Paths

_Rows = tuple[int, list[int], Tensor, Tensor]

_MTP_KEYS = {
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


@dataclass(frozen=True)
class TinyMtp:
    """A target with next-token layers.

    Attributes:
        style: deepseek or mimo; MiMo's layers have Qwen2's biases.
        family: family of a DeepSeek-style target and of its layers.
        has_copies: the folder has copies of embedding and lm_head, like DeepSeek's files.
    """

    style: str = "deepseek"
    num_layers: int = 1
    family: str = "llama"
    has_copies: bool = False
    shape: TinyShape = field(default_factory=lambda: TinyShape(vocab_size=64))

    def prefix(self, layer: int) -> str:
        """Returns the prefix of a next-token layer's keys."""
        if self.style == "mimo":
            return f"model.mtp_layers.{layer}."
        return f"model.layers.{self.shape.num_layers + layer}."


def write_mtp(folder: Path, mtp: TinyMtp, *, seed: int = 11) -> Path:
    """Writes the target with its next-token layers; returns `folder`."""
    family = "qwen2" if mtp.style == "mimo" else mtp.family
    write_checkpoint(folder, family, mtp.shape)
    change_mtp(folder, config=_config_changes(mtp), tensors=mtp_tensors(mtp, seed=seed))
    return folder


def change_mtp(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    tensors: dict[str, Tensor | None] | dict[str, Tensor] | None = None,
) -> None:
    """Replaces keys of config and weights; None removes a key."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    weights: dict[str, Any] = load_file(folder / "model.safetensors") | (tensors or {})
    kept = {key: value for key, value in weights.items() if value is not None}
    save_file(kept, folder / "model.safetensors")


def mtp_tensors(mtp: TinyMtp, *, seed: int = 11) -> dict[str, Tensor]:
    """Returns every tensor of the next-token layers; biases and norms are random, too."""
    draw = torch.Generator().manual_seed(seed)
    return {
        f"{mtp.prefix(layer)}{key}": (1.0 if "norm" in key else 0.0)
        + 0.25 * torch.randn(shape, generator=draw)
        for layer in range(mtp.num_layers)
        for key, shape in _shapes(mtp).items()
    }


def _config_changes(mtp: TinyMtp) -> dict[str, Any]:
    changes: dict[str, Any] = {"num_nextn_predict_layers": mtp.num_layers}
    if mtp.style == "mimo":
        changes |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
    return changes


def _shapes(mtp: TinyMtp) -> dict[str, tuple[int, ...]]:
    shape = mtp.shape
    hidden, wide = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    first, second, projection, final = _MTP_KEYS[mtp.style]
    shapes: dict[str, tuple[int, ...]] = {
        f"{first}.weight": (hidden,),
        f"{second}.weight": (hidden,),
        f"{projection}.weight": (hidden, 2 * hidden),
        f"{final}.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if mtp.style == "mimo" or mtp.family == "qwen2":
        shapes |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"}
        shapes["self_attn.q_proj.bias"] = (queries,)
    if mtp.family == "qwen3":
        shapes |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    if mtp.has_copies:
        size = (shape.vocab_size, hidden)
        shapes |= {"embed_tokens.weight": size, "shared_head.head.weight": size}
    return shapes


class LayerOracle(ABC):
    """Computes next-token layers over whole sequences, from scratch.

    Attributes:
        num_layers: number of next-token layers.
        vocab_size: vocabulary size of the target.
    """

    def __init__(self, num_layers: int, vocab_size: int) -> None:
        self.num_layers, self.vocab_size = num_layers, vocab_size
        self._paths = Paths[_Rows]()

    @abstractmethod
    def states(self, layer: int, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Returns the states `[N, H]` of rows 0 … N-1 (token, hidden state)."""

    @abstractmethod
    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        """Returns the logits `[N, V]` of a layer's states."""

    def known_tokens(self) -> list[int]:
        return list(range(self.vocab_size))

    def continue_path(
        self, token_ids: Sequence[int], features: Tensor, path: Sequence[int]
    ) -> Tensor:
        """Returns the logits `[V]` after N committed tokens and a path of tree tokens.

        Args:
            features: `[N - 1, H]`, of positions 0 … N-2.
        """

        def rows(layer: int, tokens: list[int], hidden: Tensor) -> _Rows:
            return layer, tokens, hidden, self.states(layer, tokens, hidden)

        def longer(before: _Rows, token: int) -> _Rows:
            layer, tokens, hidden, states = before
            if layer + 1 < self.num_layers:
                return rows(layer + 1, [*tokens[1:], token], states)
            return rows(layer, [*tokens, token], torch.cat((hidden, states[-1:])))

        start = partial(rows, 0, list(token_ids[1:]), features)
        layer, *_, states = self._paths.find(token_ids, features, path, start, longer)
        return self.logits(states[-1:], layer)[0]


class MtpOracle(LayerOracle):
    """See `LayerOracle`."""

    def __init__(self, mtp: TinyMtp, folder: Path) -> None:
        super().__init__(mtp.num_layers, mtp.shape.vocab_size)
        self.mtp = mtp
        self.tensors = load_file(folder / "model.safetensors")

    def states(self, layer: int, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Returns the states `[N, H]` of rows 0 … N-1 (token, hidden state)."""
        prefix = self.mtp.prefix(layer)
        embedded = self.tensors["model.embed_tokens.weight"][torch.tensor(tokens)]
        token_norm, hidden_norm, projection, final = (
            self.tensors[f"{prefix}{key}.weight"] for key in _MTP_KEYS[self.mtp.style]
        )
        if self.mtp.style == "mimo":
            embedded[0] = 0.0
            parts = (plain_norm(hidden, hidden_norm), plain_norm(embedded, token_norm))
        else:
            parts = (plain_norm(embedded, token_norm), plain_norm(hidden, hidden_norm))
        rows = torch.cat(parts, dim=1) @ projection.T
        block = DenseLayer(self.tensors, prefix, self.mtp.shape.head_dim)
        causal = torch.ones(len(rows), len(rows), dtype=torch.bool).tril()
        return plain_norm(block(rows, torch.arange(len(rows)), causal), final)

    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        return states @ self.tensors["lm_head.weight"].T
