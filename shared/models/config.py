"""The shape of a decoder, read from a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from shared.errors import CheckpointError
from shared.layers.rotary import RopeConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.families import FAMILIES, Family, WindowRule
from shared.models.rope_config import read_rope
from shared.models.scaled_weights import scale_block

GENERATION_CONFIG_FILE = "generation_config.json"
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    Attributes:
        architecture: class name in `architectures`, a key of `FAMILIES`.
        sliding_windows: one entry a layer; None sees everything.
        max_position_embeddings: longest sequence the model accepts, prompt and output.
        eos_token_ids: tokens that end generation, from config and generation config.
        dtype: what the checkpoint was saved in; None if the config does not say.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype | None

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads `config.json` and, if there is one, `generation_config.json`.

        Raises:
            CheckpointError: for a missing file, a missing or mistyped key, or an architecture
                that is not supported.
        """
        config = ConfigFile.read(folder / CONFIG_FILE)
        return cls.of(config, _architecture(config))

    @classmethod
    def of(cls, config: ConfigFile, architecture: str) -> Self:
        """Reads the config of a model with the layers of `architecture`, whatever it is called.

        Raises:
            CheckpointError: as for `from_folder`.
        """
        family = FAMILIES[architecture]
        check_supported(config)
        num_heads = config.integer("num_attention_heads")
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{config.path}: num_attention_heads is {num_heads}; it must be a multiple of "
                f"num_key_value_heads, {num_kv_heads}"
            )
        max_positions = config.integer("max_position_embeddings")
        attention_bias = config.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            hidden_size=config.integer("hidden_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_head_dim(config, family, num_heads),
            intermediate_size=config.integer("intermediate_size"),
            vocab_size=config.integer("vocab_size"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            rope=read_rope(config, max_position_embeddings=max_positions),
            sliding_windows=_sliding_windows(config, family),
            has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
            has_mlp_bias=config.flag("mlp_bias", False),
            has_qk_norm=family.has_qk_norm,
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            max_position_embeddings=max_positions,
            eos_token_ids=_eos_token_ids(config),
            dtype=saved_dtype(config),
        )


def _architecture(config: ConfigFile) -> str:
    names = config.texts("architectures")
    for name in names:
        if name in FAMILIES:
            return name
    raise CheckpointError(
        f"{config.path}: architectures is {list(names)}; supported are {', '.join(FAMILIES)}"
    )


def check_supported(config: ConfigFile) -> None:
    """Raises: CheckpointError for an activation or a quantisation that is not supported."""
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"{config.path}: hidden_act is {activation!r}; it must be 'silu'")
    scale_block(config)


def _head_dim(config: ConfigFile, family: Family, num_heads: int) -> int:
    default = family.default_head_dim or config.integer("hidden_size") // num_heads
    if config.is_null("head_dim"):
        default = config.integer("hidden_size") // num_heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2:
        raise CheckpointError(f"{config.path}: head_dim is {head_dim}; it must be even")
    return head_dim


def _sliding_windows(config: ConfigFile, family: Family) -> tuple[int | None, ...]:
    num_layers = config.integer("num_hidden_layers")
    window = _window(config, family)
    if family.window_rule is WindowRule.NEVER or window is None:
        return (None,) * num_layers
    if family.window_rule is WindowRule.EVERY_LAYER:
        return (window,) * num_layers
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.texts("layer_types")
    if not kinds:
        first = config.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _window(config: ConfigFile, family: Family) -> int | None:
    """An explicit null means no window; only an absent key takes the family's default."""
    if "sliding_window" in config:
        return config.integer("sliding_window")
    return None if config.is_null("sliding_window") else family.default_window


def _eos_token_ids(config: ConfigFile) -> frozenset[int]:
    token_ids = set(config.integers("eos_token_id"))
    path = config.path.parent / GENERATION_CONFIG_FILE
    if path.is_file():
        token_ids.update(ConfigFile.read(path).integers("eos_token_id"))
    return frozenset(token_ids)


def saved_dtype(config: ConfigFile) -> torch.dtype | None:
    """Returns what the checkpoint was saved in; None if the config does not say."""
    name = config.text("dtype", config.text("torch_dtype", ""))
    if name not in _DTYPES:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
