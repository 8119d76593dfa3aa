"""What sets the supported decoder families apart, as data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class WindowRule(enum.Enum):
    """Which layers look back over a sliding window only."""

    NEVER = "never"
    EVERY_LAYER = "every layer, if the config has a window"
    SWITCHED = "the layers the config names, if it switches windows on"


@dataclass(frozen=True, slots=True)
class Family:
    """Where a family departs from Llama.

    Attributes:
        qkv_bias: whether queries, keys and values have a bias; None asks the config.
        output_bias: whether the attention output has one; None asks the config.
        has_qk_norm: queries and keys are normalised a head before rotation.
        window_rule: which layers slide.
        default_window: the window of a config that does not mention one.
        default_head_dim: None divides the hidden size by the heads.
    """

    qkv_bias: bool | None
    output_bias: bool | None
    has_qk_norm: bool = False
    window_rule: WindowRule = WindowRule.NEVER
    default_window: int | None = None
    default_head_dim: int | None = None


_QWEN2 = Family(
    qkv_bias=True, output_bias=False, window_rule=WindowRule.SWITCHED, default_window=4096
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "LlamaForCausalLM": Family(qkv_bias=None, output_bias=None),
        "MistralForCausalLM": Family(
            qkv_bias=False,
            output_bias=False,
            window_rule=WindowRule.EVERY_LAYER,
            default_window=4096,
        ),
        "Qwen2ForCausalLM": _QWEN2,
        "Qwen3ForCausalLM": Family(
            qkv_bias=None,
            output_bias=None,
            has_qk_norm=True,
            window_rule=WindowRule.SWITCHED,
            default_window=4096,
            default_head_dim=128,
        ),
        "MiMoForCausalLM": Family(
            qkv_bias=True,
            output_bias=False,
            window_rule=WindowRule.SWITCHED,
            default_window=4096,
        ),
    }
)
