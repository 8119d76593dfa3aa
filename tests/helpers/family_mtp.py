"""Tiny targets of families with their own kind of next-token layers, under published key names, and
an oracle: transformers' layers with the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.checkpoints import DELTA, TinyShape, build_model, write_checkpoint
from tests.helpers.mtp_heads import LayerOracle

_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
_QWEN: dict[str, Any] = DELTA | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]
}
_STEP: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "share_expert_dim": 20,
    "sliding_window": 12,
    "num_sliding_attention_heads": 6,
    "layer_types": ["full_attention", *["sliding_attention"] * 4],
    "mlp_layer_types": ["dense", "sparse", "dense", "dense", "dense"],
    "swiglu_limits": [0.0] * 5,
    "swiglu_limits_shared": [0.0, 0.0, 0.3, 0.0, 0.2],
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": partial_factor}
        for kind, theta, partial_factor in (
            ("full_attention", 500.0, 0.5),
            ("sliding_attention", 50.0, 1.0),
        )
    },
}


@dataclass(frozen=True)
class FamilyMtp:
    """A target and its next-token layers, which are the last layers of a model in transformers.

    Attributes:
        num_layers: layers of the decoder.
        count: number of next-token layers.
        names: checkpoint names of the norms of embedding and hidden state, of the projection, and
            of the norm after the block.
        is_flat: config and keys hold the text model only, which transformers nests.
    """

    family: str
    num_layers: int
    count: int
    names: tuple[str, str, str, str]
    overrides: dict[str, Any]
    changes: dict[str, Any] = field(default_factory=dict)
    is_flat: bool = False

    @property
    def is_step(self) -> bool:
        return self.family == "step3p5"

    def shape(self, vocab_size: int) -> TinyShape:
        return TinyShape(
            vocab_size=vocab_size,
            num_layers=self.num_layers + self.count,
            overrides=self.overrides,
        )

    def key(self, layer: int, name: str) -> str:
        """Returns the key of one of `names` in a layer. Qwen's keys name no layer."""
        if not self.is_step:
            return f"mtp.{name}.weight"
        root = "model." if self.is_flat else "model.language_model."
        return f"{root}layers.{self.num_layers + layer}.{name}.weight"


_QWEN_NAMES = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_STEP_NAMES = ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")
_STEP_CHANGES: dict[str, Any] = {"num_nextn_predict_layers": 3}
_COUNTED: dict[str, Any] = {"mtp_num_hidden_layers": 1}
FAMILY_MTPS = {
    "qwen3-next": FamilyMtp("qwen3_next", 3, 1, _QWEN_NAMES, _QWEN | _EXPERTS),
    "qwen3.5": FamilyMtp("qwen3_5", 3, 1, _QWEN_NAMES, _QWEN, _COUNTED),
    "qwen3.5 moe": FamilyMtp("qwen3_5_moe", 3, 1, _QWEN_NAMES, _QWEN | _EXPERTS, _COUNTED),
    "step 3.5": FamilyMtp("step3p5", 2, 3, _STEP_NAMES, _STEP, _STEP_CHANGES, is_flat=True),
    "step 3.7": FamilyMtp("step3p5", 2, 3, _STEP_NAMES, _STEP, _STEP_CHANGES),
}


def write_family_mtp(
    folder: Path, mtp: FamilyMtp, vocab_size: int = 64, *, with_tokenizer: bool = False
) -> dict[str, Tensor]:
    """Turns the last layers of a checkpoint into next-token layers; returns their own tensors."""
    shape = mtp.shape(vocab_size)
    write_checkpoint(folder, mtp.family, shape, with_tokenizer=with_tokenizer)
    path, file = folder / "config.json", folder / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    own_config = config.get("text_config", config)
    own_config |= {"num_hidden_layers": mtp.num_layers} | mtp.changes
    if not mtp.is_step:
        own_config["layer_types"] = own_config["layer_types"][: mtp.num_layers]
        first = f"model.layers.{mtp.num_layers}."
        tensors = {key.replace(first, "mtp.layers.0."): tensors[key] for key in tensors}
    if mtp.is_flat:
        config = own_config | {"architectures": ["Step3p5ForCausalLM"]}
        tensors = {key: tensors[key] for key in tensors if not _is_vision(key)}
    elif mtp.is_step:
        tensors = {_nested(key): tensor for key, tensor in tensors.items()}
    path.write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(3)
    own = {
        mtp.key(layer, name): 0.25 * torch.randn(_size(name, shape), generator=draw)
        for layer in range(mtp.count)
        for name in mtp.names
    }
    if mtp.is_step:  # each layer has a copy of the lm_head
        copies = "transformer.shared_head.output"
        own |= {mtp.key(layer, copies): tensors["lm_head.weight"].clone() for layer in range(3)}
    save_file(tensors | own, file)
    return own


def _is_vision(key: str) -> bool:
    return "vision" in key or "vit" in key or "projector" in key


def _nested(key: str) -> str:
    """Returns the key of a text tensor in a checkpoint with a vision model."""
    is_text = key.startswith(("model.layers.", "model.embed_tokens.", "model.norm."))
    return key.replace("model.", "model.language_model.", 1) if is_text else key


def _size(name: str, shape: TinyShape) -> tuple[int, ...]:
    hidden = shape.hidden_size
    return (hidden, 2 * hidden) if name in ("fc", "eh_proj") else (hidden,)


class FamilyOracle(LayerOracle):
    """See `LayerOracle`. Blocks, embedding and lm_head are transformers'.

    In norms of both families the stored weight is the difference from one.
    """

    def __init__(self, mtp: FamilyMtp, own: dict[str, Tensor], vocab_size: int = 64) -> None:
        super().__init__(mtp.count, vocab_size)
        model: Any = build_model(mtp.family, mtp.shape(vocab_size))
        model.set_attn_implementation("eager")
        self.model = model
        self._mtp, self._own = mtp, own
        self._inner = model.model.language_model if mtp.is_step else model.model
        self._eps = self._inner.config.rms_norm_eps

    @torch.no_grad()
    def states(self, layer: int, tokens: Sequence[int], hidden: Tensor) -> Tensor:
        """Returns the states `[N, H]` of rows (token, hidden state), for Step without the norm."""
        inner, mtp = self._inner, self._mtp
        embedding_norm, hidden_norm, projection, _ = (
            self._own[mtp.key(layer, name)] for name in mtp.names
        )
        embedded = inner.embed_tokens(torch.tensor(list(tokens)))
        parts = self._normed(embedded, embedding_norm), self._normed(hidden, hidden_norm)
        rows = (torch.cat(parts, dim=1) @ projection.T).unsqueeze(0)
        positions = torch.arange(len(tokens)).unsqueeze(0)
        distance = positions.T - positions
        is_seen = distance >= 0
        tables: Callable[..., Any] = inner.rotary_emb
        if mtp.is_step:
            is_seen &= distance < inner.config.sliding_window
            tables = partial(tables, layer_type="sliding_attention")
        [states] = inner.layers[mtp.num_layers + layer](
            rows,
            attention_mask=torch.where(is_seen, 0.0, -torch.inf)[None, None],
            position_embeddings=tables(rows, positions),
            position_ids=positions,
        )
        return states if mtp.is_step else self._normed_last(states, layer)

    @torch.no_grad()
    def logits(self, states: Tensor, layer: int = 0) -> Tensor:
        read = self._normed_last(states, layer) if self._mtp.is_step else states
        logits: Tensor = self.model.lm_head(read)
        return logits

    @torch.no_grad()
    def features(self, token_ids: Sequence[int]) -> Tensor:
        """Returns the target's hidden states that the first layer reads, `[N, H]`."""
        output = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        raw: Tensor = output.hidden_states[self._mtp.num_layers][0]
        return raw if self._mtp.is_step else self._inner.norm(raw)

    def _normed_last(self, states: Tensor, layer: int) -> Tensor:
        return self._normed(states, self._own[self._mtp.key(layer, self._mtp.names[3])])

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rows * (rows.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt() * (1.0 + weight)
