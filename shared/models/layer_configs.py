"""Parts of a decoder's shape, read from its config: rotary parameters, experts and linear
attention. Configs of Qwen and Step-3.5 are converted to the keys of other families."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shared.errors import CheckpointError
from shared.kernels.delta_rule import DeltaShape
from shared.kernels.pointwise import SWIGLU_ALPHA, SWIGLU_LIMIT
from shared.kernels.routing import RouterScores, Routing
from shared.layers.rotary import RopeConfig, RopeScaling
from shared.models.config_file import ConfigFile

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_SCALING_ALIASES = {"su": RopeScaling.LONGROPE.value}


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """Defaults for keys that a config leaves out.

    Attributes:
        theta_key: key of theta in older configs.
        is_interleaved: see `RopeConfig`; few configs have the key.
    """

    theta: float = 10_000.0
    theta_key: str = "rope_theta"
    partial: float = 1.0
    is_interleaved: bool = False


def read_rope(
    config: ConfigFile,
    *,
    max_position_embeddings: int,
    layer_type: str = FULL_ATTENTION,
    defaults: RopeDefaults = RopeDefaults(),
) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling`.

    Args:
        layer_type: the type of layer, where the config has parameters for each type.

    Raises:
        CheckpointError: for a scaling scheme or a partial rotation that is not supported.
    """
    spelling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rope = config.nested(spelling)
    if layer_type in rope:
        rope = rope.nested(layer_type)
    elif layer_type != FULL_ATTENTION:
        # Older configs scale only the layers with full attention.
        rope = ConfigFile(config.path, {})
    theta = rope.number("rope_theta", config.number(defaults.theta_key, defaults.theta))
    scaling = _scaling(config, rope)
    partial = rope.number(
        "partial_rotary_factor", config.number("partial_rotary_factor", defaults.partial)
    )
    if not 0.0 < partial <= 1.0:
        raise CheckpointError(
            f"{config.path}: partial_rotary_factor is {partial:g}; it must be in (0, 1]"
        )
    is_interleaved = config.flag("rope_interleave", defaults.is_interleaved)
    plain = RopeConfig(theta, partial=partial, is_interleaved=is_interleaved)
    if scaling is RopeScaling.NONE:
        return plain
    original_length = max_position_embeddings
    if scaling is not RopeScaling.DYNAMIC:
        original_length = rope.integer("original_max_position_embeddings", original_length)
        original_length = config.integer("original_max_position_embeddings", original_length)
    if scaling is RopeScaling.YARN:
        return _yarn(rope, plain, original_length, max_position_embeddings)
    if scaling is RopeScaling.LONGROPE:
        return _longrope(rope, plain, original_length, max_position_embeddings)
    return replace(
        plain,
        scaling=scaling,
        factor=rope.number("factor"),
        original_length=original_length,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
    )


def _scaling(config: ConfigFile, rope: ConfigFile) -> RopeScaling:
    name = rope.text("rope_type", rope.text("type", RopeScaling.NONE.value))
    try:
        return RopeScaling(_SCALING_ALIASES.get(name, name))
    except ValueError as error:
        names = ", ".join(scaling.value for scaling in RopeScaling)
        raise CheckpointError(
            f"{config.path}: rope scaling is {name!r}; it must be one of {names}"
        ) from error


def _yarn(
    rope: ConfigFile, plain: RopeConfig, original_length: int, max_position_embeddings: int
) -> RopeConfig:
    factor = rope.number("factor", max_position_embeddings / original_length)
    return replace(
        plain,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_length=original_length,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", _yarn_attention(rope, factor)),
        truncate=rope.flag("truncate", True),
    )


def _yarn_attention(rope: ConfigFile, factor: float) -> float:
    """Source: Peng et al., arXiv 2309.00071, equation 22, with DeepSeek's two multipliers."""
    mscale, mscale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    if mscale and mscale_all:
        return _temperature(factor, mscale) / _temperature(factor, mscale_all)
    return _temperature(factor, 1.0)


def _temperature(factor: float, multiplier: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def _longrope(
    rope: ConfigFile, plain: RopeConfig, original_length: int, max_position_embeddings: int
) -> RopeConfig:
    """Source: Ding et al., LongRoPE, arXiv 2402.13753, and the code of Phi-3."""
    factor = rope.number("factor", max_position_embeddings / original_length)
    attention = 1.0
    if factor > 1.0:
        attention = math.sqrt(1.0 + math.log(factor) / math.log(original_length))
    return replace(
        plain,
        scaling=RopeScaling.LONGROPE,
        factor=factor,
        original_length=original_length,
        attention_factor=rope.number("attention_factor", attention),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )


# Linear attention of a decoder, read from its config.

LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Layers with a gated delta rule in place of attention.

    Attributes:
        layers: indices of these layers.
    """

    shape: DeltaShape
    layers: tuple[int, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return 4 * len(self.layers) * self.shape.value_size * self.shape.key_dim


def read_delta(config: ConfigFile) -> DeltaConfig:
    """Raises: CheckpointError for a missing or mistyped key, or counts that do not fit."""
    shape = DeltaShape(
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        window=config.integer("linear_conv_kernel_dim"),
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise CheckpointError(
            f"{config.path}: linear_num_value_heads is {shape.num_value_heads}; it must be a "
            f"multiple of linear_num_key_heads, {shape.num_key_heads}"
        )
    kinds = config.texts("layer_types")
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)
    if not layers or len(layers) == len(kinds):
        raise CheckpointError(
            f"{config.path}: layer_types has {len(layers)} layers of {LINEAR_ATTENTION} among "
            f"{len(kinds)}; both kinds are needed"
        )
    return DeltaConfig(shape, layers)


def read_qwen(config: ConfigFile) -> ConfigFile:
    """Returns a config of Qwen3-Next or Qwen3.5 with the keys that other families have.

    Raises:
        CheckpointError: for a missing or mistyped key, or an unknown kind of layer.
    """
    num_layers = config.integer("num_hidden_layers")
    period = config.integer("full_attention_interval", 4)
    kinds = config.texts("layer_types") or tuple(
        LINEAR_ATTENTION if (layer + 1) % period else FULL_ATTENTION for layer in range(num_layers)
    )
    unknown = sorted({*kinds} - {LINEAR_ATTENTION, FULL_ATTENTION})
    if unknown or len(kinds) != num_layers:
        raise CheckpointError(
            f"{config.path}: layer_types has {len(kinds)} entries for {num_layers} layers"
            + (f", among them {', '.join(unknown)}" if unknown else "")
        )
    values: dict[str, object] = {"layer_types": list(kinds)}
    if "shared_expert_intermediate_size" in config:
        values["share_expert_dim"] = config.integer("shared_expert_intermediate_size")
    if "intermediate_size" not in config and "moe_intermediate_size" in config:
        values["intermediate_size"] = config.integer("moe_intermediate_size")
    return config.with_values(values)


# The experts of a decoder, read from its config.

_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")
# DeepSeek-V2 configs choose between routing with and without groups; this value is without.
_GROUPLESS = "greedy"


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Names of the parts of a block of experts in a family's checkpoints.

    Attributes:
        block: prefix of all keys of the block, within the layer.
        router: key of the router's matrix.
        gate, up, down: keys of an expert's matrices.
        shared: prefix of the shared expert's keys.
        correction: key of the bias that corrects the choice of experts.
        has_shared_apart: the shared expert's keys begin with the layer's prefix, not the block's.
        shared_gate: key of the shared expert's gate; None where it has none.
    """

    block: str = "mlp."
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts."
    correction: str = "gate.e_score_correction_bias"
    has_shared_apart: bool = False
    shared_gate: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertFamily:
    """Properties in which the experts of model families differ.

    Attributes:
        scores: function of the router's logits.
        normalises: whether the weights of the chosen experts are divided by their sum; None reads
            it from the config.
        has_correction: each expert has a bias that counts for the choice but not for the weights.
        is_wide: the router computes in float32.
        is_stacked: checkpoints have all experts' matrices as one tensor, transposed.
        may_be_stacked: some checkpoints have them as one tensor, not transposed.
        is_stacked_apart: checkpoints have one tensor each for all experts' gate, up and down.
        has_biases: experts and router have biases, and gate and up of a stack are interleaved.
        scales_inputs: see `Experts`.
    """

    scores: RouterScores
    keys: ExpertKeys = ExpertKeys()
    normalises: bool | None = None
    has_correction: bool = False
    is_wide: bool = False
    is_stacked: bool = False
    may_be_stacked: bool = False
    is_stacked_apart: bool = False
    has_biases: bool = False
    scales_inputs: bool = False


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """Sizes and switches of a decoder's experts.

    Attributes:
        layers: layers whose feed-forward block has experts.
        intermediate_size: channels of an expert.
        shared_size: channels of the shared expert; 0 where there is none.
    """

    family: ExpertFamily
    routing: Routing
    layers: frozenset[int]
    intermediate_size: int
    shared_size: int


def read_experts(config: ConfigFile, family: ExpertFamily | None) -> ExpertConfig | None:
    """Returns the experts of a model; None where the family has none.

    Raises:
        CheckpointError: for a missing or mistyped key, or counts that do not fit.
    """
    if family is None:
        return None
    _check_activation(config)
    width = config.integer("moe_intermediate_size", config.integer("intermediate_size"))
    return ExpertConfig(
        family=family,
        routing=_routing(config, family),
        layers=_layers(config),
        intermediate_size=width,
        shared_size=config.integer(
            "share_expert_dim", width * config.integer("n_shared_experts", 0)
        ),
    )


def _check_activation(config: ConfigFile) -> None:
    for key, expected in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        value = config.number(key, expected)
        if value != expected:
            raise CheckpointError(f"{config.path}: {key} is {value:g}; it must be {expected:g}")


def _routing(config: ConfigFile, family: ExpertFamily) -> Routing:
    num_experts = next(
        (config.integer(key) for key in _COUNT_KEYS if key in config), None
    ) or config.integer(_COUNT_KEYS[0])
    num_chosen = config.integer("num_experts_per_tok")
    num_groups = config.integer("n_group", 1)
    if config.text("topk_method", "") == _GROUPLESS:
        num_groups = 1
    num_chosen_groups = config.integer("topk_group", 1) if num_groups > 1 else 1
    limit = num_experts // num_groups * num_chosen_groups
    if num_experts % num_groups or not 1 <= num_chosen <= limit:
        raise CheckpointError(
            f"{config.path}: num_experts_per_tok is {num_chosen} of {num_experts} experts in "
            f"{num_groups} groups, of which {num_chosen_groups} stay; it must be in [1, {limit}], "
            f"and groups of equal size"
        )
    normalises = family.normalises
    return Routing(
        num_experts=num_experts,
        num_chosen=num_chosen,
        scores=family.scores,
        normalises=config.flag("norm_topk_prob", False) if normalises is None else normalises,
        scale=config.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
    )


def _layers(config: ConfigFile) -> frozenset[int]:
    """Returns the layers with experts, which configs list or describe in one of several ways."""
    if config.integers("moe_layers"):
        return frozenset(config.integers("moe_layers"))
    kinds, num_layers = config.texts("mlp_layer_types"), config.integer("num_hidden_layers")
    if kinds:
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    listed = config.integers("moe_layer_freq")
    if len(listed) > 1:
        return frozenset(index for index, has_experts in enumerate(listed) if has_experts)
    first = config.integer("first_k_dense_replace", 0)
    step = config.integer("interleave_moe_layer_step", config.integer("decoder_sparse_step", 1))
    frequency = listed[0] if listed else 1
    dense = config.integers("mlp_only_layers")
    return frozenset(
        layer
        for layer in range(first, num_layers)
        if layer not in dense and (layer + 1) % step == 0 and layer % frequency == 0
    )


# Step-3.5's config, converted to the keys of other families.
#
# Published files have their own names for sizes, and lists of what differs by layer, next-token
# layers included; transformers saves another form.

_STEP_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "share_expert_dims": "share_expert_dim",
}
_LAYER_TYPES = "layer_types"


def read_step(config: ConfigFile) -> ConfigFile:
    """Returns the config with the keys that other families have.

    Raises:
        CheckpointError: for a missing or mistyped key.
    """
    num_layers = config.integer("num_hidden_layers")
    kinds = (config.texts(_LAYER_TYPES) or (FULL_ATTENTION,) * num_layers)[:num_layers]
    # Theta is a list in some files, and some name another activation than the model computes.
    values: dict[str, object] = {
        _LAYER_TYPES: list(kinds),
        "rope_theta": None,
        "hidden_act": "silu",
    }
    for key, common in _STEP_KEYS.items():
        if key in config:
            is_float = key == "moe_router_scaling_factor"
            values[common] = config.number(key) if is_float else config.integer(key)
    _check_lists(config, num_layers)
    sliding = config.nested("attention_other_setting")
    groups = config.integer("num_attention_groups", 0)
    if sliding.integer("num_attention_groups", groups) != groups:
        raise CheckpointError(
            f"{config.path}: num_attention_groups of attention_other_setting differs from the "
            f"config's {groups}, which is not supported"
        )
    if "num_attention_heads" in sliding:
        values["num_sliding_attention_heads"] = sliding.integer("num_attention_heads")
    if "mlp_layer_types" in config:
        values["mlp_layer_types"] = list(config.texts("mlp_layer_types")[:num_layers])
    else:
        chosen = _layers_with_experts(config, num_layers)
        values["mlp_layer_types"] = [
            "sparse" if layer in chosen else "dense" for layer in range(num_layers)
        ]
    if not {FULL_ATTENTION, SLIDING_ATTENTION} & {*config.nested("rope_parameters")}:
        values["rope_parameters"] = _rotations(config, kinds)
    return config.with_values(values)


def _check_lists(config: ConfigFile, num_layers: int) -> None:
    """Raises: CheckpointError where a list has too few entries."""
    for key in ("rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared"):
        count = len(config.numbers(key))
        if count not in (0, 1) and count < num_layers:
            raise CheckpointError(
                f"{config.path}: {key} has {count} entries for {num_layers} layers"
            )


def layer_limits(config: ConfigFile, key: str) -> tuple[float | None, ...]:
    """Returns the limit of gated channels in each layer; None, which is 0 in the file, is no
    limit."""
    limits, num_layers = config.numbers(key), config.integer("num_hidden_layers")
    if len(limits) == 1:
        limits = limits * num_layers
    return tuple(limit or None for limit in limits)


def _layers_with_experts(config: ConfigFile, num_layers: int) -> set[int]:
    if "moe_layers_enum" not in config:
        return set(range(3, num_layers))
    if not isinstance(config.values["moe_layers_enum"], str):
        return set(config.integers("moe_layers_enum"))
    return {int(layer) for layer in config.text("moe_layers_enum").split(",") if layer.strip()}


def _rotations(config: ConfigFile, kinds: tuple[str, ...]) -> dict[str, object]:
    """Returns the rotary parameters of each kind of layer; only full attention has scaling."""
    thetas = config.numbers("rope_theta") or (10_000.0,)
    partials = config.numbers("partial_rotary_factors")
    parameters: dict[str, object] = {}
    for kind in (FULL_ATTENTION, SLIDING_ATTENTION):
        layer = kinds.index(kind) if kind in kinds else 0
        values: dict[str, object] = {"rope_theta": thetas[layer] if len(thetas) > 1 else thetas[0]}
        if partials:
            values["partial_rotary_factor"] = partials[layer if len(partials) > 1 else 0]
        if kind == FULL_ATTENTION:
            values |= config.nested("rope_scaling").values
        parameters[kind] = values
    return parameters
