"""Wide decoders and heads: which axis of which tensor is copied how; see `widening`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from shared.model_options import ModelOptions
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.config_file import CONFIG_FILE
from shared.models.decoder import Decoder
from shared.models.decoder_weights import LM_HEAD_KEY, decoder_parts
from shared.models.loader import build_decoder
from shared.models.scaled_weights import QUANTIZATION_CONFIG
from shared.models.shard import shard_of
from shared.models.weights import cut_tensor, empty_targets, places_of
from tests.bench.widening import (
    Axis,
    CannotWiden,
    copies,
    head_copies,
    tokens,
    whole_copies,
    widened,
)

EMBEDDING_KEY = "model.embed_tokens.weight"
NORM_KEY = "model.norm.weight"
INDEX_FILE = "model.safetensors.index.json"
# A reserved token of the demo's vocabulary.
SPARE_TOKEN = 3
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class WideShape:
    """Sizes to widen to; head_dim is the small model's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False


# Of Llama 3.1 70B and 8B and Llama 3.2 1B, whose heads are 128, 128 and 64 wide, and of Qwen2.5
# 32B, with the vocabulary of the others.
SHAPE_70B = WideShape(8192, 80, 64, 8, 28672, 128_256)
SHAPE_32B = WideShape(5120, 64, 40, 8, 27648, 128_256)
SHAPE_8B = WideShape(4096, 32, 32, 8, 14336, 128_256)
SHAPE_1B = WideShape(2048, 16, 32, 8, 8192, 128_256, tie_word_embeddings=True)


@dataclass(frozen=True, slots=True)
class LayerAxes:
    """How the tensors of a layer are copied.

    Attributes:
        stream: channels of the residual stream, whole; `stream.shared()` reads it.
    """

    stream: Axis
    queries: Axis
    keys: Axis
    wide: Axis

    def of(self, name: str, num_read_blocks: int = 1) -> tuple[Axis | None, ...]:
        """Returns the axes of a layer's tensor by the end of its key.

        Args:
            num_read_blocks: copies of the stream that queries, keys and values read side by side.
        """
        reads = self.stream.shared()
        if num_read_blocks > 1:
            small = int(self.stream.index.max()) + 1
            reads_qkv = reads.repeated(num_read_blocks, small)
        else:
            reads_qkv = reads
        rules: dict[str, tuple[Axis | None, ...]] = {
            "q_proj.weight": (self.queries, reads_qkv),
            "k_proj.weight": (self.keys, reads_qkv),
            "v_proj.weight": (self.keys, reads_qkv),
            "o_proj.weight": (self.stream, self.queries.shared()),
            "gate_proj.weight": (self.wide, reads),
            "up_proj.weight": (self.wide, reads),
            "down_proj.weight": (self.stream, self.wide.shared()),
            "q_proj.bias": (self.queries,),
            "k_proj.bias": (self.keys,),
            "v_proj.bias": (self.keys,),
            "o_proj.bias": (self.stream,),
            "gate_proj.bias": (self.wide,),
            "up_proj.bias": (self.wide,),
            "down_proj.bias": (self.stream,),
            "q_norm.weight": (None,),
            "k_norm.weight": (None,),
        }
        for suffix, axes in rules.items():
            if name.endswith(suffix):
                return axes
        if name.endswith("norm.weight"):
            return (self.stream,)
        raise CannotWiden(f"no rule says how {name} is widened")


def layer_axes(small: WideShape, wide: WideShape, head_dim: int) -> LayerAxes:
    """Raises: CannotWiden if the sizes do not fit."""
    query_heads, key_heads = head_copies(
        (small.num_heads, small.num_kv_heads), (wide.num_heads, wide.num_kv_heads)
    )
    return LayerAxes(
        stream=whole_copies(small.hidden_size, wide.hidden_size, "hidden_size"),
        # Shares are per head: a head's channels meet their own columns.
        queries=query_heads.expanded(head_dim),
        keys=key_heads.expanded(head_dim),
        wide=copies(small.intermediate_size, wide.intermediate_size, "intermediate_size"),
    )


class WideModel:
    """The tensors of a decoder, widened one at a time as they are asked for.

    Args:
        folder: of the small model.
        spare_token: a token that the small model never writes.
        device: where tensors are widened.
    """

    def __init__(
        self, folder: Path, shape: WideShape, *, spare_token: int, device: torch.device
    ) -> None:
        """Raises: CannotWiden if the sizes do not fit, CheckpointError for a bad folder."""
        self.folder = folder
        self.shape = shape
        self.small = ModelConfig.from_folder(folder)
        small = _shape_of(self.small)
        if shape.num_layers < small.num_layers:
            raise CannotWiden(
                f"num_hidden_layers is {small.num_layers}; {shape.num_layers} is no widening of it"
            )
        if shape.tie_word_embeddings and not self.small.tie_word_embeddings:
            raise CannotWiden("the small model has an lm_head of its own; so must the wide one")
        self.config = replace(
            self.small,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            intermediate_size=shape.intermediate_size,
            vocab_size=shape.vocab_size,
            tie_word_embeddings=shape.tie_word_embeddings,
            sliding_windows=_tiled(self.small.sliding_windows, shape.num_layers),
        )
        self.axes = layer_axes(small, shape, self.small.head_dim)
        self.tokens = tokens(small.vocab_size, shape.vocab_size, spare_token)
        self._checkpoint = Checkpoint.open(folder)
        self._device = device

    @property
    def small_tokens(self) -> range:
        return range(self.small.vocab_size)

    def read(self, key: str) -> Tensor:
        """Returns the wide tensor of a key of `decoder_parts(config)`."""
        stream, shares = self.axes.stream, self.axes.stream.shared()
        if key == EMBEDDING_KEY:
            return widened(self._small(key), (self.tokens, stream))
        if key == LM_HEAD_KEY:
            source = EMBEDDING_KEY if self.small.tie_word_embeddings else key
            return widened(self._small(source), (self.tokens, shares))
        if key == NORM_KEY:
            # One matrix cannot be whole for the embedding and in shares for the head.
            return widened(
                self._small(key), (shares if self.shape.tie_word_embeddings else stream,)
            )
        match = _LAYER.match(key)
        assert match is not None, key
        layer, num_layers = int(match[1]), self.small.num_layers
        source = key.replace(f".{layer}.", f".{layer % num_layers}.", 1)
        tensor = widened(self._small(source), self.axes.of(key))
        adds_nothing = layer >= num_layers and ("o_proj" in key or "down_proj" in key)
        return torch.zeros_like(tensor) if adds_nothing else tensor

    def decoder(
        self,
        *,
        dtype: torch.dtype,
        options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
        group: TensorGroup | None = None,
    ) -> Decoder:
        """Returns the decoder on the device, without a file in between; of a group this process's
        part."""
        parts = decoder_parts(self.config, shard_of(group))
        tensors = empty_targets(parts, dtype, self._device)
        for part, place in zip(parts, places_of(parts, tensors), strict=True):
            tensor = self.read(part.key)
            assert tuple(tensor.shape) == part.shape, f"{part.key} has shape {list(tensor.shape)}"
            place.copy_(part.load(partial(cut_tensor, tensor)))
        return build_decoder(self.config, tensors, self._device, options, group)

    def write(self, folder: Path, *, dtype: torch.dtype, shard_size_bytes: int) -> None:
        """Writes a checkpoint in shards of about that size; no more than one is in memory."""
        self.write_without_weights(folder, dtype=dtype)
        keys = [part.key for part in decoder_parts(self.config)]
        write_shards(folder, ((key, self.read(key).to(dtype)) for key in keys), shard_size_bytes)

    def write_without_weights(self, folder: Path, *, dtype: torch.dtype) -> None:
        """Writes the files of a checkpoint that say what it is."""
        folder.mkdir(parents=True, exist_ok=True)
        write_config(self.folder, folder, _config_keys(self.shape, dtype))
        for name in _TOKENIZER_FILES:
            if (self.folder / name).is_file():
                (folder / name).write_bytes((self.folder / name).read_bytes())

    def _small(self, key: str) -> Tensor:
        return self._checkpoint.read(key).to(self._device)


def write_config(source: Path, target: Path, changes: Mapping[str, Any]) -> None:
    """Writes the config of `source` to the folder `target`, with other values of some keys.

    Weights are written as the numbers that they stand for, so a quantisation is left out.
    """
    config = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    config.pop(QUANTIZATION_CONFIG, None)
    (target / CONFIG_FILE).write_text(json.dumps(config | dict(changes), indent=2))


def write_shards(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], shard_size_bytes: int
) -> None:
    """Writes `model-*.safetensors`, and their index last."""
    (folder / INDEX_FILE).unlink(missing_ok=True)
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}
    for key, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_size_bytes:
            _write_shard(folder, shard, weight_map)
            shard = {}
        shard[key] = tensor.cpu().contiguous()
    _write_shard(folder, shard, weight_map)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=1))


def _write_shard(folder: Path, shard: dict[str, Tensor], weight_map: dict[str, str]) -> None:
    name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(shard, name))


def _shape_of(config: ModelConfig) -> WideShape:
    return WideShape(
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.intermediate_size,
        config.vocab_size,
    )


def _config_keys(shape: WideShape, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _tiled(windows: tuple[int | None, ...], count: int) -> tuple[int | None, ...]:
    return tuple(windows[layer % len(windows)] for layer in range(count))
