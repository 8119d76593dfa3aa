"""The shape of a decoder, read from a Hugging Face folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Self

import torch

from shared.errors import CheckpointError
from shared.kernels.delta_layer import STAMP_SIZE
from shared.kernels.pointwise import Activation
from shared.layers.rotary import RopeConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.families import FAMILIES, Family, QkNorm, WindowRule
from shared.models.layer_configs import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    DeltaConfig,
    ExpertConfig,
    layer_limits,
    read_delta,
    read_experts,
    read_rope,
)
from shared.models.scaled_weights import scale_block

GENERATION_CONFIG_FILE = "generation_config.json"
_OUTER_KEYS = ("dtype", "torch_dtype")
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Sizes of attention with two kinds of layers, which have equally many query heads.

    The cache has one shape: the larger number of key heads, and values as wide as keys.

    Attributes:
        full_kv_heads: key heads of layers with full attention.
        sliding_kv_heads: key heads of sliding layers.
    """

    full_kv_heads: int
    sliding_kv_heads: int
    value_dim: int
    value_scale: float

    @property
    def cached_kv_heads(self) -> int:
        return max(self.full_kv_heads, self.sliding_kv_heads)


def read_hybrid(config: ConfigFile) -> HybridConfig:
    """Raises: CheckpointError for a missing or mistyped key, or counts that do not fit."""
    full = config.integer("num_key_value_heads")
    hybrid = HybridConfig(
        full_kv_heads=full,
        sliding_kv_heads=config.integer("swa_num_key_value_heads", 2 * full),
        value_dim=config.integer("v_head_dim"),
        value_scale=config.number("attention_value_scale", 1.0),
    )
    cached = hybrid.cached_kv_heads
    if cached % full or cached % hybrid.sliding_kv_heads:
        raise CheckpointError(
            f"{config.path}: num_key_value_heads is {full} and swa_num_key_value_heads "
            f"{hybrid.sliding_kv_heads}; one must be a multiple of the other"
        )
    return hybrid


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of attention with latent vectors, see `LatentAttention`.

    Attributes:
        query_rank: width of the compressed queries; None computes queries from the input.
        latent_dim: size of the latent vector that becomes keys and values.
        unrotated_dim: size of the unrotated part of a head's query and key.
        rotary_dim: size of their rotated part.
    """

    query_rank: int | None
    latent_dim: int
    unrotated_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Size of a head's query and key."""
        return self.unrotated_dim + self.rotary_dim

    @property
    def row_dim(self) -> int:
        """Size of a token's row in the KV cache."""
        return self.latent_dim + self.rotary_dim


def read_latent(config: ConfigFile) -> LatentConfig:
    """Raises: CheckpointError for a missing or mistyped key."""
    return LatentConfig(
        query_rank=config.integer("q_lora_rank") if "q_lora_rank" in config else None,
        latent_dim=config.integer("kv_lora_rank"),
        unrotated_dim=config.integer("qk_nope_head_dim"),
        rotary_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )


def latent_scale(config: ConfigFile, latent: LatentConfig) -> float:
    """Returns the factor of the scores; scaled rotary frequencies add a temperature.

    Source: DeepSeek-V2, arXiv 2405.04434, section 3.1.4, as its code has it.
    """
    scale: float = latent.query_dim**-0.5
    spelling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.nested(spelling)
    factor, multiplier = rope.number("factor", 1.0), rope.number("mscale_all_dim", 0.0)
    if factor <= 1.0 or not multiplier:
        return scale
    temperature = 0.1 * multiplier * math.log(factor) + 1.0
    return scale * temperature * temperature


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    Attributes:
        architecture: class name in `architectures`, a key of `FAMILIES`, where the properties of
            the whole family are.
        sliding_windows: one entry per layer; None is full attention.
        max_position_embeddings: longest sequence the model accepts, prompt and output.
        eos_token_ids: tokens that end generation, from config and generation config.
        has_qk_norm: queries and keys are normed before rotation, each head by itself.
        dtype: dtype in which the checkpoint was saved; None if the config does not say.
        attention_scale: factor of the scores; None is `head_dim ** -0.5`.
        attention_cap: soft bound of the scores, see `paged_attention`; None in most families.
        logit_cap: likewise of the logits.
        sliding_rope: rotary parameters of sliding layers, where they have their own.
        experts: experts of the layers that have them; None in dense families.
        latent: latent attention, whose cache has one key head as wide as a row; None elsewhere.
        unrotated_layers: layers whose queries and keys are not rotated.
        has_unit_norm: in the other layers each head of queries and keys is normed without weights.
        hybrid: where sliding layers have other heads than the rest; None elsewhere.
        full_heads: query heads of layers with full attention, where sliding layers have more,
            `num_heads`; None where all layers have `num_heads`.
        delta: layers with a gated delta rule in place of attention; None in most families.
        mlp_limits, expert_limits: see `Mlp.limit`, one entry per layer, or empty; `mlp_limits`
            apply to shared experts, too.
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
    activation: Activation = Activation.SILU
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    sliding_rope: RopeConfig | None = None
    experts: ExpertConfig | None = None
    latent: LatentConfig | None = None
    hybrid: HybridConfig | None = None
    unrotated_layers: frozenset[int] = frozenset()
    has_unit_norm: bool = False
    full_heads: int | None = None
    mlp_limits: tuple[float | None, ...] = ()
    expert_limits: tuple[float | None, ...] = ()
    delta: DeltaConfig | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Reads `config.json` and, if there is one, `generation_config.json`.

        Raises:
            CheckpointError: for a missing file, a missing or mistyped key, or an architecture
                that is not supported.
        """
        config = ConfigFile.read(folder / CONFIG_FILE)
        scale_block(config)
        return cls.of(text_config(config), _architecture(config))

    @classmethod
    def of(cls, config: ConfigFile, architecture: str) -> Self:
        """Reads the config of a model as that of `architecture`, whichever architecture it names.

        Raises:
            CheckpointError: as for `from_folder`.
        """
        family = FAMILIES[architecture]
        config = config.with_defaults(family.defaults)
        if family.reads is not None:
            config = family.reads(config)
        check_supported(config)
        num_heads = config.integer("num_attention_heads")
        full_heads = None
        if family.has_head_gates:
            full_heads = num_heads
            num_heads = config.integer("num_sliding_attention_heads", num_heads)
        num_kv_heads = config.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"{config.path}: num_attention_heads is {num_heads}; it must be a multiple of "
                f"num_key_value_heads, {num_kv_heads}"
            )
        latent = read_latent(config) if family.is_latent else None
        hybrid = read_hybrid(config) if family.is_hybrid else None
        if hybrid is not None:
            num_kv_heads = hybrid.cached_kv_heads
        max_positions = config.integer("max_position_embeddings")
        hidden_size = config.integer("hidden_size")
        attention_bias = config.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=config.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads if latent is None else 1,
            head_dim=_head_dim(config, family, num_heads) if latent is None else latent.row_dim,
            intermediate_size=config.integer(
                "intermediate_size_mlp", config.integer("intermediate_size")
            ),
            vocab_size=config.integer("vocab_size"),
            rms_norm_eps=config.number("rms_norm_eps", config.number("layernorm_epsilon", 1e-6)),
            rope=read_rope(config, max_position_embeddings=max_positions, defaults=family.rope),
            sliding_windows=_sliding_windows(config, family),
            has_qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            has_output_bias=attention_bias if family.output_bias is None else family.output_bias,
            has_mlp_bias=config.flag("mlp_bias", False),
            has_qk_norm=family.qk_norm is QkNorm.HEAD
            or (family.qk_norm is QkNorm.ASKED and config.flag("use_qk_norm", False)),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            max_position_embeddings=_max_positions(config, family),
            eos_token_ids=_eos_token_ids(config),
            dtype=saved_dtype(config),
            activation=family.activation or activation_of(config),
            embedding_scale=hidden_size**0.5 if family.scales_embedding else 1.0,
            attention_scale=_attention_scale(config, latent),
            attention_cap=_optional_number(config, "attn_logit_softcapping"),
            logit_cap=_optional_number(config, "final_logit_softcapping"),
            sliding_rope=_sliding_rope(config, family, max_positions),
            experts=read_experts(config, family.experts),
            latent=latent,
            hybrid=hybrid,
            unrotated_layers=_unrotated_layers(config, family),
            has_unit_norm=family.skips_rotation and config.flag("use_qk_norm", True),
            full_heads=full_heads,
            mlp_limits=layer_limits(config, "swiglu_limits_shared"),
            expert_limits=layer_limits(config, "swiglu_limits"),
            delta=read_delta(config) if family.has_delta else None,
        )

    @property
    def family(self) -> Family:
        """Properties of the family, which are not in the config."""
        return FAMILIES[self.architecture]

    @property
    def norms_all_heads(self) -> bool:
        """Whether queries and keys are normed before rotation, all heads at once."""
        return self.family.qk_norm is QkNorm.ALL_HEADS

    @property
    def mtp_feature_layer(self) -> int:
        """The layer whose input next-token layers read, as `FeatureSpec` counts."""
        return self.num_layers + (not self.family.has_raw_mtp)

    @property
    def num_cache_layers(self) -> int:
        """Layers of the cache; a decoder layer with a recurrent state takes several."""
        return self.first_cache_layer(self.num_layers)

    def first_cache_layer(self, layer: int) -> int:
        """Returns the first layer of the cache that holds a decoder layer's keys and values, or the
        rows of its state."""
        if self.delta is None:
            return layer
        num_states = sum(delta_layer < layer for delta_layer in self.delta.layers)
        return layer + num_states * (self.cache_layers_each - 1)

    @property
    def cache_layers_each(self) -> int:
        """Layers of the cache for one decoder layer with a state, whose row holds a token's stamp
        and inputs."""
        assert self.delta is not None
        row = STAMP_SIZE + self.delta.shape.num_inputs
        return -(-row // (2 * self.num_kv_heads * self.head_dim))

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a gated delta rule in place of attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that `rope` rotates."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    def layer_has_own_rotation(self, layer: int) -> bool:
        """Whether a layer's rotation is `sliding_rope`."""
        if self.unrotated_layers:
            return layer in self.unrotated_layers
        return self.sliding_rope is not None and self.sliding_windows[layer] is not None

    def layer_rope(self, layer: int) -> RopeConfig:
        """Returns the rotation of a layer; for an unrotated layer, that of the other layers."""
        has_own = self.layer_has_own_rotation(layer) and not self.unrotated_layers
        if not has_own or self.sliding_rope is None:
            return self.rope
        return self.sliding_rope

    def layer_heads(self, layer: int) -> int:

        is_sliding = self.sliding_windows[layer] is not None
        return self.num_heads if is_sliding or self.full_heads is None else self.full_heads

    def layer_limits(self, layer: int) -> tuple[float | None, float | None]:
        """Returns the limits of a layer's MLP and of its experts, see `Mlp.limit`."""
        mlp, experts = self.mlp_limits, self.expert_limits
        return mlp[layer] if mlp else None, experts[layer] if experts else None

    def layer_kv_heads(self, layer: int) -> int:
        """Returns the key heads of a layer in the checkpoint."""
        if self.hybrid is None:
            return self.num_kv_heads
        is_sliding = self.sliding_windows[layer] is not None
        return self.hybrid.sliding_kv_heads if is_sliding else self.hybrid.full_kv_heads

    def layer_has_sinks(self, layer: int) -> bool:
        """Whether a layer has sinks; in hybrid models only sliding layers have."""
        return self.family.has_sinks and (
            self.hybrid is None or self.sliding_windows[layer] is not None
        )

    def has_experts(self, layer: int) -> bool:

        return self.experts is not None and layer in self.experts.layers


def _architecture(config: ConfigFile) -> str:
    names = config.texts("architectures")
    for name in names:
        if name in FAMILIES:
            return name
    nearest = get_close_matches(" ".join(names), FAMILIES, n=1, cutoff=0.0)
    raise CheckpointError(
        f"{config.path}: architectures is {list(names)}, which is not supported; the nearest "
        f"supported: {', '.join(nearest)}; all supported: {', '.join(FAMILIES)}"
    )


def check_supported(config: ConfigFile) -> None:
    """Raises: CheckpointError for an activation or a quantisation that is not supported."""
    activation_of(config)
    scale_block(config)


def text_config(config: ConfigFile) -> ConfigFile:
    """Returns the part that describes the text model; in most configs that is the whole config."""
    if "text_config" not in config:
        return config
    # The dtype, tied embeddings and end-of-sequence tokens are outside of `text_config`.
    outer: dict[str, object] = {
        key: value for key in _OUTER_KEYS if (value := config.text(key, ""))
    }
    if config.flag("tie_word_embeddings", False):
        outer["tie_word_embeddings"] = True
    outer["eos_token_id"] = list(config.integers("eos_token_id"))
    return config.nested("text_config").with_defaults(outer)


def activation_of(config: ConfigFile) -> Activation:
    """Returns the activation of feed-forward blocks.

    Raises:
        CheckpointError: it is not supported.
    """
    # Gemma's `hidden_act` is that of its first publication; `hidden_activation` is the right one.
    key = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    name = config.text(key, Activation.SILU.value)
    try:
        return Activation(name)
    except ValueError as error:
        names = " or ".join(repr(activation.value) for activation in Activation)
        raise CheckpointError(f"{config.path}: {key} is {name!r}; it must be {names}") from error


def _attention_scale(config: ConfigFile, latent: LatentConfig | None) -> float | None:
    if latent is not None:
        return latent_scale(config, latent)
    scalar = _optional_number(config, "query_pre_attn_scalar")
    return None if scalar is None else scalar**-0.5


def _optional_number(config: ConfigFile, key: str) -> float | None:
    return config.number(key) if key in config else None


def _unrotated_layers(config: ConfigFile, family: Family) -> frozenset[int]:
    if not family.skips_rotation:
        return frozenset()
    # Despite its name, `no_rope_layers` has 1 for layers that rotate.
    listed, period = config.integers("no_rope_layers"), config.integer("no_rope_layer_interval", 4)
    count = config.integer("num_hidden_layers")
    rotates = listed or [(layer + 1) % period for layer in range(count)]
    return frozenset(layer for layer, is_rotated in enumerate(rotates) if not is_rotated)


def _max_positions(config: ConfigFile, family: Family) -> int:
    """Returns the longest sequence. Families that attend in chunks are limited to one chunk, and to
    the positions before the temperature of long sequences sets in."""
    limit = config.integer("max_position_embeddings")
    if not family.skips_rotation:
        return limit
    limit = min(limit, config.integer("attention_chunk_size", limit))
    if config.flag("attn_temperature_tuning", True):
        limit = min(limit, config.integer("floor_scale", 8192) - 1)
    return limit


def _sliding_rope(config: ConfigFile, family: Family, max_positions: int) -> RopeConfig | None:
    if family.skips_rotation:
        return RopeConfig(theta=1.0, partial=0.0)
    if family.sliding_rope is None:
        return None
    return read_rope(
        config,
        max_position_embeddings=max_positions,
        layer_type=SLIDING_ATTENTION,
        defaults=family.sliding_rope,
    )


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
    window = config.integer("sliding_window") if "sliding_window" in config else None
    if family.is_hybrid and "sliding_window_size" in config:
        # `sliding_window_size` does not count the row's own position.
        window = config.integer("sliding_window_size") + 1
    if family.window_rule is WindowRule.NEVER or window is None:
        return (None,) * num_layers
    if family.window_rule is WindowRule.EVERY_LAYER:
        return (window,) * num_layers
    is_pattern = family.window_rule is WindowRule.PATTERN
    if not is_pattern and not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    kinds = config.texts("layer_types")
    if not kinds:
        kinds = tuple(
            SLIDING_ATTENTION if is_sliding else FULL_ATTENTION
            for is_sliding in config.integers("hybrid_layer_pattern")
        )
    if not kinds and is_pattern:
        period = config.integer(
            "sliding_window_pattern",
            config.integer("_sliding_window_pattern", family.window_period),
        )
        return tuple(window if (layer + 1) % period else None for layer in range(num_layers))
    if not kinds:
        first = config.integer("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    return tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)


def _eos_token_ids(config: ConfigFile) -> frozenset[int]:
    token_ids = set(config.integers("eos_token_id"))
    path = config.path.parent / GENERATION_CONFIG_FILE
    if path.is_file():
        token_ids.update(ConfigFile.read(path).integers("eos_token_id"))
    return frozenset(token_ids)


def saved_dtype(config: ConfigFile) -> torch.dtype | None:
    """Returns the dtype in which the checkpoint was saved; None if the config does not say."""
    name = config.text("dtype", config.text("torch_dtype", ""))
    if name not in _DTYPES:
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
