"""Sizes of a head, and the `config.json` that describes them to an engine."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import Any

from shared.models.heads.dflash import spread_layers


class Algorithm(enum.Enum):
    """Heads that can be trained, by the name of the flag that serves them."""

    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    MTP = "MTP"
    DFLASH = "DFLASH"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of one head.

    Attributes:
        hidden_size: H, of the target and of the head.
        vocab_size: V, of the target.
        draft_vocab_size: Vd, tokens scored by the lm_head of an EAGLE3 head; None for heads with
            the target's lm_head.
        num_layers: 1, except for DFLASH.
        num_target_layers: n.
        feature_layers: i < n is the residual stream that enters layer i of the target, n the
            output of its last layer, n + 1 that output after the final norm.
        max_position_embeddings: longest context, in tokens.
        block_size: DFLASH, the known token and the positions drafted after it.
        mask_token_id: DFLASH, the token whose embedding is the input of a drafted position.
    """

    algorithm: Algorithm
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int | None
    num_layers: int
    num_target_layers: int
    feature_layers: tuple[int, ...]
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    block_size: int = 1
    mask_token_id: int = 0

    @property
    def feature_width(self) -> int:
        """Columns of a feature row: H for each of the layers."""
        return len(self.feature_layers) * self.hidden_size

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"algorithm": self.algorithm.value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> HeadShape:
        return cls(
            **values
            | {
                "algorithm": Algorithm(values["algorithm"]),
                "feature_layers": tuple(values["feature_layers"]),
            }
        )


def default_feature_layers(algorithm: Algorithm, num_target_layers: int) -> tuple[int, ...]:
    """Returns the default layers that a head reads.

    EAGLE3 reads the inputs of layers 2, n // 2 and n - 3; if these do not increase, an early, a
    middle and the last stream. DFLASH reads the outputs of five evenly spaced layers.
    """
    n = num_target_layers
    match algorithm:
        case Algorithm.EAGLE | Algorithm.MTP:
            return (n + 1,)
        case Algorithm.EAGLE3:
            layers = (2, n // 2, n - 3)
            is_increasing = layers[0] < layers[1] < layers[2]
            return layers if is_increasing else (min(2, n - 1), max(n // 2 + 1, n - 2), n)
        case Algorithm.DFLASH:
            num_layers = max(1, min(5, n - 3))
            return tuple(index + 1 for index in spread_layers(num_layers, n))


def head_config(shape: HeadShape) -> dict[str, Any]:
    """Returns `config.json` in the format of the algorithm's published heads."""
    config = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    return _identity(shape) | config


def _identity(shape: HeadShape) -> dict[str, Any]:
    """Returns the keys in which the formats differ."""
    match shape.algorithm:
        case Algorithm.EAGLE:
            names = {"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}
            return names | {"num_hidden_layers": 1, "attention_bias": False}
        case Algorithm.EAGLE3:
            size = shape.draft_vocab_size
            return {
                "architectures": ["LlamaForCausalLMEagle3"],
                "model_type": "llama",
                "num_hidden_layers": 1,
                "attention_bias": False,
                # Without this key engines take the target's lm_head.
                **({} if size is None else {"draft_vocab_size": size}),
                "target_hidden_size": shape.hidden_size,
                "eagle_config": {
                    "use_aux_hidden_state": True,
                    "eagle_aux_hidden_state_layer_ids": list(shape.feature_layers),
                    "norm_before_fc": False,
                },
            }
        case Algorithm.MTP:
            return {
                "architectures": ["MiMoForCausalLM"],
                "model_type": "mimo",
                "num_hidden_layers": shape.num_target_layers,
                "num_nextn_predict_layers": 1,
                "attention_bias": True,
            }
        case Algorithm.DFLASH:
            return {
                "architectures": ["DFlashDraftModel"],
                "model_type": "qwen3",
                "num_hidden_layers": shape.num_layers,
                "num_target_layers": shape.num_target_layers,
                "attention_bias": False,
                "block_size": shape.block_size,
                "dflash_config": {
                    "target_layer_ids": [
                        min(layer, shape.num_target_layers) - 1 for layer in shape.feature_layers
                    ],
                    "mask_token_id": shape.mask_token_id,
                },
            }
