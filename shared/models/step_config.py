"""Step-3.5's config in the words of other families.

Published files name a model's sizes in their own way and list what differs by layer, next-token
layers included; transformers writes them anew.
"""

from __future__ import annotations

from shared.errors import CheckpointError
from shared.models.config_file import ConfigFile
from shared.models.rope_config import FULL_ATTENTION, SLIDING_ATTENTION

_OTHER_NAMES = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "moe_router_scaling_factor": "routed_scaling_factor",
    "share_expert_dims": "share_expert_dim",
}
_KINDS = "layer_types"


def read_step(config: ConfigFile) -> ConfigFile:
    """Returns the config with the keys that other families have.

    Raises:
        CheckpointError: for a missing or mistyped key.
    """
    num_layers = config.integer("num_hidden_layers")
    kinds = (config.texts(_KINDS) or (FULL_ATTENTION,) * num_layers)[:num_layers]
    # Theta is a list in some files, and the activation named in some is not what is computed.
    values: dict[str, object] = {_KINDS: list(kinds), "rope_theta": None, "hidden_act": "silu"}
    for own, common in _OTHER_NAMES.items():
        if own in config:
            number = own == "moe_router_scaling_factor"
            values[common] = config.number(own) if number else config.integer(own)
    _check_lists(config, num_layers)
    sliding = config.nested("attention_other_setting")
    groups = config.integer("num_attention_groups", 0)
    if sliding.integer("num_attention_groups", groups) != groups:
        raise CheckpointError(
            f"{config.path}: attention_other_setting has other num_attention_groups than the "
            f"config, {groups}, which is not supported"
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
    """Returns the bound of gated channels in each layer; None, or 0 in the file, bounds nothing."""
    limits, num_layers = config.numbers(key), config.integer("num_hidden_layers")
    if len(limits) == 1:
        limits = limits * num_layers
    return tuple(each or None for each in limits)


def _layers_with_experts(config: ConfigFile, num_layers: int) -> set[int]:
    if "moe_layers_enum" not in config:
        return set(range(3, num_layers))
    if not isinstance(config.values["moe_layers_enum"], str):
        return set(config.integers("moe_layers_enum"))
    return {int(each) for each in config.text("moe_layers_enum").split(",") if each.strip()}


def _rotations(config: ConfigFile, kinds: tuple[str, ...]) -> dict[str, object]:
    """Returns the rotary parameters of each kind of layer; only whole attention is stretched."""
    thetas = config.numbers("rope_theta") or (10_000.0,)
    partials = config.numbers("partial_rotary_factors")
    found: dict[str, object] = {}
    for kind in (FULL_ATTENTION, SLIDING_ATTENTION):
        layer = kinds.index(kind) if kind in kinds else 0
        own: dict[str, object] = {"rope_theta": thetas[layer] if len(thetas) > 1 else thetas[0]}
        if partials:
            own["partial_rotary_factor"] = partials[layer if len(partials) > 1 else 0]
        if kind == FULL_ATTENTION:
            scaling = config.nested("rope_scaling")
            own |= scaling.values
        found[kind] = own
    return found
