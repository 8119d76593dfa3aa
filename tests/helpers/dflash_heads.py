"""Tiny random DFlash checkpoints with the key names of published ones, and a plain implementation
of the head as an oracle."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.speculation.distributions import gumbel_noise
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.dense_layer import DenseLayer, plain_norm
from tests.helpers.head_oracle import Values


@dataclass(frozen=True)
class TinyDflash:
    """Sizes of a head; the defaults fit a `TinyShape` of 64 tokens and 6 layers.

    Attributes:
        target_layer_ids: None leaves the key out of config.json.
        config: further keys of config.json; None removes a key.
    """

    vocab_size: int = 64
    hidden_size: int = 32
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    intermediate_size: int = 48
    max_position_embeddings: int = 128
    block_size: int = 5
    mask_token_id: int = 63
    num_features: int = 3
    target_layer_ids: tuple[int, ...] | None = (1, 3, 4)
    config: Mapping[str, Any] = field(default_factory=dict)


def write_dflash(folder: Path, head: TinyDflash, *, seed: int = 13) -> Path:
    """Writes `config.json` and `model.safetensors`; returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dflash_config(head)))
    save_file(dflash_tensors(head, seed=seed), folder / "model.safetensors")
    return folder


def dflash_config(head: TinyDflash) -> dict[str, Any]:
    """Returns the contents of config.json."""
    dflash: dict[str, Any] = {"mask_token_id": head.mask_token_id}
    if head.target_layer_ids is not None:
        dflash["target_layer_ids"] = list(head.target_layer_ids)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": head.hidden_size,
        "num_hidden_layers": head.num_layers,
        "num_target_layers": 6,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "intermediate_size": head.intermediate_size,
        "vocab_size": head.vocab_size,
        "max_position_embeddings": head.max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * head.num_layers,
        "block_size": head.block_size,
        "dflash_config": dflash,
        "torch_dtype": "float32",
        **head.config,
    }
    return {key: value for key, value in config.items() if value is not None}


def dflash_tensors(head: TinyDflash, *, seed: int = 13) -> dict[str, Tensor]:
    """Returns every tensor of the checkpoint; norms are random, too."""
    draw = torch.Generator().manual_seed(seed)
    return {
        key: (1.0 if "norm" in key else 0.0) + 0.25 * torch.randn(shape, generator=draw)
        for key, shape in _shapes(head).items()
    }


def _shapes(head: TinyDflash) -> dict[str, tuple[int, ...]]:
    hidden, wide = head.hidden_size, head.intermediate_size
    queries, keys = head.num_heads * head.head_dim, head.num_kv_heads * head.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, head.num_features * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(head.num_layers):
        shapes |= {
            f"layers.{layer}.{key}.weight": shape
            for key, shape in {
                "input_layernorm": (hidden,),
                "post_attention_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "self_attn.q_norm": (head.head_dim,),
                "self_attn.k_norm": (head.head_dim,),
                "mlp.gate_proj": (wide, hidden),
                "mlp.up_proj": (wide, hidden),
                "mlp.down_proj": (hidden, wide),
            }.items()
        }
    return shapes


class DflashOracle:
    """Computes blocks from scratch."""

    def __init__(
        self, head: TinyDflash, *, target_embedding: Tensor, target_lm_head: Tensor
    ) -> None:
        self.head, self.tensors = head, dflash_tensors(head)
        self.embedding, self.lm_head = target_embedding, target_lm_head

    def block_logits(
        self,
        token_ids: Sequence[int],
        features: Tensor,
        *,
        block_size: int | None = None,
        start: int = 0,
        num_supposed: int = 0,
    ) -> Tensor:
        """Returns the logits `[block_size - 1, V]` of the tokens that follow N known ones.

        Args:
            features: `[N - 1 - num_supposed, K * H]`, the concatenated target layers from
                position 0 on.
            start: the first position that the block sees.
            num_supposed: how many of the last known tokens are not committed yet.
        """
        size, first = block_size or self.head.block_size, len(token_ids) - 1 - num_supposed
        context = plain_norm(
            features[start:] @ self.tensors["fc.weight"].T, self.tensors["hidden_norm.weight"]
        )
        block = [*token_ids[first:], *[self.head.mask_token_id] * (size - 1)]
        rows = self.embedding[torch.tensor(block)]
        sees = torch.ones(len(block), len(context) + len(block), dtype=torch.bool)
        for row in range(num_supposed):
            sees[row, len(context) + row + 1 :] = False
        for index in range(self.head.num_layers):
            layer = DenseLayer(self.tensors, f"layers.{index}.", self.head.head_dim)
            rows = layer(
                rows,
                torch.arange(first, first + len(block)),
                sees,
                context,
                torch.arange(start, first),
            )
        return plain_norm(rows, self.tensors["norm.weight"])[num_supposed + 1 :] @ self.lm_head.T


def best_block_paths(
    logits: Tensor, sampling: SamplingParams, shape: TreeShape, *, num_tokens: int
) -> Values:
    """Returns the best paths over a block with their values, by enumerating all paths.

    Args:
        logits: `[P, V]`, of the P tokens after the committed ones.
        num_tokens: committed tokens; positions of the sampling noise follow them.
    """
    if not sampling.is_greedy:
        positions = torch.arange(len(logits)) + num_tokens
        seeds = torch.full_like(positions, sampling.seed)
        logits = logits + gumbel_noise(seeds, positions, logits.shape[1])
    best = logits.log_softmax(1)[: shape.num_steps].topk(shape.topk, dim=1)
    marginals = [
        list(zip(*row, strict=True))
        for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    values = {
        tuple(token for token, _ in path): sum(score for _, score in path)
        for length in range(1, len(marginals) + 1)
        for path in itertools.product(*marginals[:length])
    }
    return dict(sorted(values.items(), key=lambda item: -item[1])[: shape.max_node_count])
