"""The shape of a DFlash head, read from its folder and held against its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from shared.errors import CheckpointError
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.heads.block_size import read_block_size
from shared.models.heads.feature_spec import output_of

_LAYERS_OF = "Qwen3ForCausalLM"


@dataclass(frozen=True, slots=True)
class DflashConfig:
    """Sizes of a DFlash head.

    Attributes:
        layers: sizes of its layers, which are Qwen3's.
        feature_layers: see `FeatureSpec.layer_indices`.
        block_size: rows of a block, the last committed token included.
        mask_token_id: the token whose embedding stands where a token is to be drafted.
    """

    layers: ModelConfig
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int

    @classmethod
    def from_folder(cls, folder: Path, target: ModelConfig) -> Self:
        """Reads `config.json`.

        Raises:
            CheckpointError: for a missing or mistyped key, or a value that does not fit the
                target; names key and values.
        """
        config = ConfigFile.read(folder / CONFIG_FILE)
        layers = ModelConfig.of(config, _LAYERS_OF)
        _check_target(config, layers, target)
        return cls(
            layers=layers,
            feature_layers=_feature_layers(config, layers.num_layers, target.num_layers),
            block_size=read_block_size(config),
            mask_token_id=_mask_token_id(config, target.vocab_size),
        )


def _check_target(config: ConfigFile, layers: ModelConfig, target: ModelConfig) -> None:
    """Embedding and lm_head are the target's, so the widths must agree."""
    num_layers = config.integer("num_target_layers", target.num_layers)
    for key, own, needed in (
        ("hidden_size", layers.hidden_size, target.hidden_size),
        ("num_target_layers", num_layers, target.num_layers),
    ):
        if own != needed:
            raise CheckpointError(f"{config.path}: {key} is {own}; the target's is {needed}")
    if "sliding_attention" in config.texts("layer_types"):
        raise CheckpointError(
            f"{config.path}: layer_types has sliding_attention; only full_attention is supported "
            f"in a DFlash head"
        )


def _feature_layers(config: ConfigFile, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The config counts layers by their outputs, `FeatureSpec` by their inputs.

    The last layer's output is the one behind the final norm: heads are trained on the
    `hidden_states` of transformers, whose last entry is normed.

    Source: `extract_context_feature` in the DFlash authors' code, github.com/z-lab/dflash.
    """
    key = "target_layer_ids"
    ids = config.nested("dflash_config").integers(key) or _default_ids(
        config, num_layers, num_target_layers
    )
    if min(ids) < 0 or max(ids) >= num_target_layers:
        raise CheckpointError(
            f"{config.path}: {key} is {list(ids)}; the target has layers [0, {num_target_layers})"
        )
    return tuple(output_of(index, num_target_layers) for index in ids)


def _default_ids(config: ConfigFile, count: int, num_target_layers: int) -> tuple[int, ...]:
    """Returns as many layers of the target as the head has, evenly spread.

    Source: Chen et al., DFlash, arXiv 2602.06036, section 4.
    """
    if count == 1:
        return (num_target_layers // 2,)
    if num_target_layers < 4:
        raise CheckpointError(
            f"{config.path} has no dflash_config.target_layer_ids, and a target of "
            f"{num_target_layers} layers has no default; at least 4 are needed"
        )
    span = num_target_layers - 4
    return tuple(round(1 + index * span / (count - 1)) for index in range(count))


def _mask_token_id(config: ConfigFile, vocab_size: int) -> int:
    key = "mask_token_id"
    nested = config.nested("dflash_config")
    if key not in nested and key not in config:
        raise CheckpointError(f"{config.path} has no dflash_config.{key}")
    token = (nested if key in nested else config).integer(key)
    if not 0 <= token < vocab_size:
        raise CheckpointError(
            f"{config.path}: {key} is {token}; it must be in [0, {vocab_size}), the target's "
            f"vocab_size"
        )
    return token
