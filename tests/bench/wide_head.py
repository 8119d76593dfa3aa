"""Wide draft heads, for a target that is widened by `wide_model`.

A head reads and writes the same residual stream as its target, so the same copies fit. Wherever it
reads several streams side by side (a token's embedding and a hidden state, the states of several
layers) each of them is a block of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.draft.training.heads import SHAPE_FILE
from shared.models.checkpoint import Checkpoint
from shared.models.config_file import CONFIG_FILE, ConfigFile
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.dflash import DflashConfig
from tests.bench.wide_model import (
    WideModel,
    WideShape,
    layer_axes,
    write_config,
    write_shards,
)
from tests.bench.widening import Axis, CannotWiden, tokens, widened

_TOKEN_MAP, _TOKEN_MASK = "d2t", "t2d"
_READS_STREAMS = ("fc.weight", "eh_proj.weight", "input_proj.weight")
_SHARD_SIZE_BYTES = 4 * 2**30


@dataclass(frozen=True, slots=True)
class WideHeadShape:
    """Sizes of the head beside the stream's, which is the target's.

    Attributes:
        draft_vocab_size: of heads that have a vocabulary of their own.
    """

    intermediate_size: int
    draft_vocab_size: int


class WideHead:
    """The tensors of a head, widened one at a time.

    Args:
        folder: of the small head.
        target: the wide target.
        algorithm: EAGLE, EAGLE3, MTP or DFLASH.
    """

    def __init__(
        self, folder: Path, target: WideModel, shape: WideHeadShape, *, algorithm: str
    ) -> None:
        """Raises: CannotWiden if the sizes do not fit, CheckpointError for a bad folder."""
        self.folder = folder
        self._target = target
        self._shape = shape
        self._algorithm = algorithm
        self._config = ConfigFile.read(folder / CONFIG_FILE)
        self._checkpoint = Checkpoint.open(folder)
        self._small = self._small_shape()
        self._wide = self._wide_shape()
        self._axes = layer_axes(self._small, self._wide, self._head_dim)
        self._draft_tokens = self._draft_token_axis()

    def write(self, folder: Path, *, dtype: torch.dtype) -> Path:
        """Writes config and weights; returns `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        changes = self._config_changes(dtype)
        write_config(self.folder, folder, changes)
        if (self.folder / SHAPE_FILE).is_file():  # of our own trainer, which can train it further
            (folder / SHAPE_FILE).write_text(json.dumps(self._training_shape(changes)))
        write_shards(folder, self._tensors(dtype), _SHARD_SIZE_BYTES)
        return folder

    def _training_shape(self, changes: dict[str, Any]) -> dict[str, Any]:
        """Returns the sizes by the trainer's names."""
        small = json.loads((self.folder / SHAPE_FILE).read_text())
        named = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
        sizes = {name: changes.get(named.get(name, name), value) for name, value in small.items()}
        return sizes | {"num_target_layers": self._target.config.num_layers}

    def _tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if self._algorithm == "EAGLE3" and _TOKEN_MAP not in self._checkpoint.files:
            yield from self._own_vocabulary(dtype)
        for key in self._checkpoint.files:
            if key == _TOKEN_MAP:
                yield key, self._token_map()
            elif key != _TOKEN_MASK:
                yield key, widened(self._read(key), self._axes_of(key)).to(dtype)

    def _own_vocabulary(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Gives a head without a vocabulary of its own the target's first tokens, as published
        heads of this kind have one: a wide target's whole lm_head is as large as the rest."""
        size = self._shape.draft_vocab_size
        yield "lm_head.weight", self._target.read("lm_head.weight")[:size].to(dtype)
        yield _TOKEN_MAP, torch.zeros(size, dtype=torch.int64)
        yield _TOKEN_MASK, torch.arange(self._target.config.vocab_size) < size

    def _axes_of(self, key: str) -> tuple[Axis | None, ...]:
        stream = self._axes.stream
        if key.endswith("embed_tokens.weight"):
            return (self._target.tokens, stream)
        if key.endswith(("lm_head.weight", "shared_head.head.weight")):
            is_own = self._draft_tokens is not None
            return (self._draft_tokens if is_own else self._target.tokens, stream.shared())
        if key.endswith("input_norm.weight"):
            return (stream.repeated(self._num_streams(key, dim=0), self._small.hidden_size),)
        if key.endswith(_READS_STREAMS):
            return (stream, self._reads(self._num_streams(key, dim=1)))
        if key.endswith("fc.bias") or ".fc_norm." in f".{key}":
            return (stream,)
        if key.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            return self._axes.of(key, self._num_streams(key, dim=1))
        return self._axes.of(key)

    def _reads(self, num_streams: int) -> Axis:
        return self._axes.stream.shared().repeated(num_streams, self._small.hidden_size)

    def _num_streams(self, key: str, dim: int) -> int:
        width = self._checkpoint.shape(key)[dim]
        return width // self._small.hidden_size

    def _token_map(self) -> Tensor:
        """Further draft tokens stand for the target's further tokens."""
        small_map = self._read(_TOKEN_MAP)
        num_small, num_wide = len(small_map), self._shape.draft_vocab_size
        first_spare = self._target.small.vocab_size
        spare = torch.arange(first_spare, first_spare + num_wide - num_small) - torch.arange(
            num_small, num_wide
        )
        return torch.cat((small_map.cpu(), spare))

    def _draft_token_axis(self) -> Axis | None:
        if _TOKEN_MAP not in self._checkpoint.files:
            if self._algorithm == "EAGLE3" and self._shape.draft_vocab_size < len(
                self._target.small_tokens
            ):
                raise CannotWiden(
                    f"draft_vocab_size {self._shape.draft_vocab_size} leaves out tokens of the "
                    f"small target, which has {len(self._target.small_tokens)}"
                )
            return None
        small = len(self._read(_TOKEN_MAP))
        wide = self._shape.draft_vocab_size
        num_spare = self._target.config.vocab_size - self._target.small.vocab_size
        if wide - small > num_spare:
            raise CannotWiden(
                f"draft_vocab_size is {small}; {wide} needs {wide - small} tokens more than the "
                f"small target has, and there are {num_spare}"
            )
        # The last row is the least frequent of a map that is sorted by frequency, and no worse
        # than any other of one that is not: drafts only lose by it.
        return tokens(small, wide, small - 1)

    @property
    def _head_dim(self) -> int:
        heads = self._config.integer("num_attention_heads")
        return self._config.integer("head_dim", self._config.integer("hidden_size") // heads)

    def _small_shape(self) -> WideShape:
        config, target = self._config, self._target.small
        heads = config.integer("num_attention_heads")
        hidden = config.integer("hidden_size")
        if hidden != target.hidden_size:
            raise CannotWiden(
                f"the head's hidden_size is {hidden}; the target's is {target.hidden_size}"
            )
        return WideShape(
            hidden_size=hidden,
            num_layers=1,
            num_heads=heads,
            num_kv_heads=config.integer("num_key_value_heads", heads),
            intermediate_size=config.integer("intermediate_size"),
            vocab_size=target.vocab_size,
        )

    def _wide_shape(self) -> WideShape:
        """As many heads as fill the stream, in groups of the small head's size."""
        small, stream = self._small, self._target.config.hidden_size
        num_heads = stream // self._head_dim
        return replace(
            small,
            hidden_size=stream,
            num_heads=num_heads,
            num_kv_heads=num_heads * small.num_kv_heads // small.num_heads,
            intermediate_size=self._shape.intermediate_size,
        )

    def _config_changes(self, dtype: torch.dtype) -> dict[str, Any]:
        wide, target = self._wide, self._target.config
        changes: dict[str, Any] = {
            "hidden_size": wide.hidden_size,
            "target_hidden_size": wide.hidden_size,
            "num_attention_heads": wide.num_heads,
            "num_key_value_heads": wide.num_kv_heads,
            "head_dim": self._head_dim,
            "intermediate_size": wide.intermediate_size,
            "vocab_size": target.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if self._draft_tokens is not None or self._algorithm == "EAGLE3":
            changes["draft_vocab_size"] = self._shape.draft_vocab_size
        if "num_target_layers" in self._config:
            changes["num_target_layers"] = target.num_layers
        return changes | self._feature_layers()

    def _feature_layers(self) -> dict[str, Any]:
        """The layers whose states are read, which defaults would take from the wide target."""
        small = self._target.small
        if self._algorithm == "EAGLE3":
            layers = HeadConfig.from_folder(self.folder, HeadKind.EAGLE3, small).feature_layers
            if layers == (small.num_layers + 1,):
                return {}
            if layers[0] == 1:
                raise CannotWiden("a list of feature layers that begins with 1 means others")
            nested = self._nested("eagle_config")
            return {"eagle_config": nested | {"eagle_aux_hidden_state_layer_ids": list(layers)}}
        if self._algorithm == "DFLASH":
            config = DflashConfig.from_folder(self.folder, small)
            ids = [layer - 1 for layer in config.feature_layers]
            return {"dflash_config": self._nested("dflash_config") | {"target_layer_ids": ids}}
        return {}

    def _nested(self, key: str) -> dict[str, Any]:
        config = json.loads((self.folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return dict(config.get(key) or {})

    def _read(self, key: str) -> Tensor:
        return self._checkpoint.read(key)
