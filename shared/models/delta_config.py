"""Linear attention of a decoder, read from its config."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import CheckpointError
from shared.kernels.delta_rule import DeltaShape
from shared.models.config_file import ConfigFile
from shared.models.rope_config import FULL_ATTENTION

LINEAR_ATTENTION = "linear_attention"


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Layers with a gated delta rule in place of attention.

    Attributes:
        layers: which ones have it.
        is_fused: the checkpoint has the projections of a layer as two matrices, grouped by key
            heads; else as four.
    """

    shape: DeltaShape
    layers: tuple[int, ...]
    is_fused: bool

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence."""
        return 4 * len(self.layers) * self.shape.value_size * self.shape.key_dim


def read_delta(config: ConfigFile, *, is_fused: bool) -> DeltaConfig:
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
    return DeltaConfig(shape, layers, is_fused)


def read_qwen(config: ConfigFile) -> ConfigFile:
    """Returns a config of Qwen3-Next or Qwen3.5 with the keys that other families have.

    Raises:
        CheckpointError: for a missing or mistyped key, or a kind of layer that is not known.
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
