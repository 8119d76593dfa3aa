"""The shape of a draft head, read from its folder and checked against its target."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from shared.errors import CheckpointError
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE, ConfigFile

_LAYER_ARCHITECTURE = "LlamaForCausalLM"


class HeadKind(enum.Enum):
    """How a head combines the target's hidden states with the next token.

    EAGLE stands for both EAGLE-1 and EAGLE-2, which differ in their trees only.
    """

    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """Sizes and switches of a one-layer draft head.

    Attributes:
        sizes: sizes of the layer, a Llama layer, with the vocabulary of the target; H below is its
            hidden size.
        draft_vocab_size: number of tokens that the head's lm_head scores; None if it has none and
            uses the target's.
        feature_layers: see `FeatureSpec.layer_indices`.
        fuses_features: features pass through `fc` before they enter the head.
        norm_before_fc: EAGLE3, one norm over the concatenated features.
        feeds_back_norm: EAGLE-3.1, the recurrent state is the output after the final norm.
        norm_before_residual: EAGLE3, the residual is the hidden state after its norm.
    """

    kind: HeadKind
    sizes: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int | None
    feature_layers: tuple[int, ...]
    fuses_features: bool
    norm_before_fc: bool
    feeds_back_norm: bool
    norm_before_residual: bool

    @classmethod
    def from_folder(cls, folder: Path, kind: HeadKind, target: ModelConfig) -> Self:
        """Reads `config.json`.

        Raises:
            CheckpointError: for a missing or mistyped key, another number of layers than 1, or a
                size that does not fit the target; names key and values.
        """
        config = ConfigFile.read(folder / CONFIG_FILE)
        num_layers = config.integer("num_hidden_layers", 1)
        if num_layers != 1:
            raise CheckpointError(
                f"{config.path}: num_hidden_layers is {num_layers}; a draft head has 1 layer"
            )
        values = {"num_hidden_layers": 1, "vocab_size": target.vocab_size}
        sizes = ModelConfig.of(config.with_values(values), _LAYER_ARCHITECTURE)
        if sizes.rope.partial != 1.0:
            raise CheckpointError(
                f"{config.path}: partial_rotary_factor is {sizes.rope.partial:g}; it must be 1 in "
                f"a head"
            )
        is_eagle3, eagle = kind is HeadKind.EAGLE3, config.nested("eagle_config")
        return cls(
            kind=kind,
            sizes=sizes,
            target_hidden_size=_target_hidden_size(config, kind, target),
            draft_vocab_size=_draft_vocab_size(config, kind, target),
            feature_layers=_feature_layers(config, kind, target.num_layers),
            fuses_features=is_eagle3 and _uses_aux_states(config),
            norm_before_fc=is_eagle3 and _either_flag(config, eagle, "norm_before_fc"),
            feeds_back_norm=is_eagle3 and _either_flag(config, eagle, "norm_output"),
            norm_before_residual=is_eagle3 and _either_flag(config, eagle, "norm_before_residual"),
        )

    @property
    def vocab_size(self) -> int:
        """Vocabulary size of the target."""
        return self.sizes.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Longest context the head was trained on."""
        return self.sizes.max_position_embeddings

    @property
    def num_kv_heads(self) -> int:
        return self.sizes.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.sizes.head_dim

    @property
    def dtype(self) -> torch.dtype | None:
        return self.sizes.dtype


def _target_hidden_size(config: ConfigFile, kind: HeadKind, target: ModelConfig) -> int:
    key = "hidden_size"
    if kind is HeadKind.EAGLE3 and "target_hidden_size" in config:
        key = "target_hidden_size"
    size = config.integer(key)
    if size != target.hidden_size:
        raise CheckpointError(
            f"{config.path}: {key} is {size}; the target's hidden_size is {target.hidden_size}"
        )
    return size


def _draft_vocab_size(config: ConfigFile, kind: HeadKind, target: ModelConfig) -> int | None:
    if kind is HeadKind.EAGLE or "draft_vocab_size" not in config:
        return None
    size = config.integer("draft_vocab_size")
    if not 1 <= size <= target.vocab_size:
        raise CheckpointError(
            f"{config.path}: draft_vocab_size is {size}; it must be in [1, {target.vocab_size}], "
            f"the target's vocab_size"
        )
    return size


def _feature_layers(config: ConfigFile, kind: HeadKind, num_layers: int) -> tuple[int, ...]:
    """Returns the layers whose inputs are features, as `FeatureSpec` counts them.

    A list that begins with 1 names layers by their outputs, any other list by their inputs. Both
    conventions are in use, and no head was trained on the input of layer 1.
    """
    if kind is HeadKind.EAGLE or not _uses_aux_states(config):
        return (num_layers + 1,)
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.nested("eagle_config").integers(key) or config.integers(key)
    layers = ids or (2, num_layers // 2, num_layers - 3)
    if ids and ids[0] == 1:
        layers = tuple(index + 1 for index in ids)
    if min(layers) < 0 or max(layers) > num_layers:
        raise CheckpointError(
            f"{config.path}: {key} asks for layers {list(layers)}; the target has [0, {num_layers}]"
        )
    return layers


def _uses_aux_states(config: ConfigFile) -> bool:
    return config.nested("eagle_config").flag("use_aux_hidden_state", True)


def _either_flag(config: ConfigFile, eagle: ConfigFile, key: str) -> bool:
    return config.flag(key, False) or eagle.flag(key, False)
