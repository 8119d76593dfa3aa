"""Weight updates of a serving decoder: staged in host memory, then applied all together.

For a GPU the host memory is pinned. The process keeps it, so the next update does not pin again.

The decoder does not change before all new weights have been checked. Values are written into the
existing tensors, since CUDA graphs hold their addresses. Each layer gets its layout (packed, in
8 bits) through the loader's own code, one layer at a time. A matrix that is served in a
checkpoint's 8 bits is read in the same 8 bits from the new checkpoint, or rounded to them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.kernels.quantised import StoredMatrix
from shared.layers.linear import Linear, named_parts
from shared.model_options import LoadFormat, ModelOptions
from shared.models.checkpoint import Checkpoint
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder, attention_shape
from shared.models.decoder_weights import (
    IGNORED_SUFFIXES,
    DecoderKeys,
    decoder_parts,
    keys_of_others,
    norm_from,
)
from shared.models.loader import MTP_PREFIXES, build_layer, read_decoder
from shared.models.weights import (
    WeightTensors,
    cut_tensor,
    empty_targets,
    listed,
    places_of,
    scales_of,
)

_EMBEDDING, _LM_HEAD, _NORM = "embedding", "lm_head", "norm"
_CPU = torch.device("cpu")


class WeightStage:
    """The tensors of an update received so far. They have no effect until `apply`.

    Args:
        keys: key prefixes of the served checkpoint; an update has the same names.
        options: the options that the decoder was loaded with.
    """

    def __init__(self, decoder: Decoder, keys: DecoderKeys, options: ModelOptions) -> None:
        self._decoder, self._keys, self._options = decoder, keys, options
        self._is_pinned = decoder.device.type == "cuda"
        config = decoder.config
        self._parts = decoder_parts(config, decoder.shard, keys)
        self._by_key: dict[str, list[int]] = defaultdict(list)
        for index, part in enumerate(self._parts):
            self._by_key[part.key].append(index)
        self._ignored = (*MTP_PREFIXES, *keys.ignored_prefixes)
        if config.tie_word_embeddings:
            self._ignored = (*self._ignored, keys.lm_head)
        self._keys_of_others = keys_of_others(config, decoder.shard, keys)
        self._tensors: dict[str, Tensor] = {}
        self._places: dict[int, Tensor] = {}
        self._received: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no tensor has been received, for this process or others."""
        return not self._received

    @property
    def names(self) -> frozenset[str]:
        """Names of the decoder's tensors that were received, see `decoder_parts`."""
        return self.all_names & self._tensors.keys()

    @property
    def all_names(self) -> frozenset[str]:

        return frozenset(part.target for part in self._parts)

    @property
    def num_bytes(self) -> int:

        return sum(tensor.nbytes for tensor in self._tensors.values())

    def read(self, folder: Path, load_format: LoadFormat) -> None:
        """Reads a whole checkpoint.

        Raises:
            CheckpointError: the folder is incomplete or damaged, or its model has another shape
                than the decoder; then no tensor was received.
        """
        config = ModelConfig.from_folder(folder)
        _check_config(folder, config, self._decoder.config)
        checkpoint = Checkpoint.open(folder, load_format)
        tensors = read_decoder(
            checkpoint,
            self._decoder.config,
            self._decoder.shard,
            dtype=self._decoder.dtype,
            device=_CPU,
            stays=lambda name, layout: self._decoder.layouts.get(name) == layout,
            is_pinned=self._is_pinned,
        )
        self._tensors = dict(tensors)
        self._received = set(self._by_key)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises:
        CheckpointError: the decoder has no such tensor, or one of another shape, or the update
            has sent it before.
        """
        if self._is_ignored(name):
            return
        indices = self._by_key.get(name)
        if not indices:
            raise CheckpointError(f"the update has {name}, which this architecture does not use")
        expected = self._parts[indices[0]].shape
        if shape != expected:
            raise CheckpointError(
                f"{name} of the update has shape {list(shape)}; the model needs {list(expected)}"
            )
        if name in self._received:
            raise CheckpointError(f"{name} came twice in one update")

    def add(self, name: str, tensor: Tensor) -> None:
        """Stages one tensor of a checkpoint, by its name there.

        Raises:
            CheckpointError: see `check`; the tensors received before are not changed.
        """
        self.check(name, tuple(tensor.shape))
        if self._is_ignored(name):
            self._received |= self._keys_of_others & {name}
            return
        for index in self._by_key[name]:
            part = self._parts[index]
            # A copy from a GPU is queued after the GPU's other work; the sender waits for it.
            rows = part.load(partial(cut_tensor, tensor))
            self._destination(index).copy_(rows, non_blocking=self._is_pinned)
        self._received.add(name)

    def check_ready(self) -> None:
        """Raises:
        CheckpointError: a fused tensor was received only in part.
        RuntimeError: the device has no memory for one more layer.
        """
        missing = {
            part.key
            for part in self._parts
            if part.target in self._tensors and part.key not in self._received
        }
        if missing:
            raise CheckpointError(
                f"the update lacks {listed(missing)}, which the server fuses with other tensors of "
                f"the update"
            )
        _check_room(self._layer_bytes(), self._decoder.device)

    @torch.inference_mode()
    def apply(self) -> None:
        """Writes the new weights into the decoder. The caller has called `check_ready`, and no
        forward is running."""
        decoder, config = self._decoder, self._decoder.config
        tensors, self._tensors, self._places = self._tensors, {}, {}
        head = tensors.get(_EMBEDDING if config.tie_word_embeddings else _LM_HEAD)
        if (embedding := tensors.get(_EMBEDDING)) is not None:
            decoder.embedding.copy_(embedding, non_blocking=True)
        if head is not None and not _is_same(decoder.lm_head, decoder.embedding):
            _overwrite(decoder.lm_head, Linear.of(head.to(decoder.device)))
        if _NORM in tensors:
            norm = norm_from(config, {_NORM: tensors[_NORM].to(decoder.device)}, _NORM)
            _overwrite(decoder.norm, norm)
        by_layer = _by_layer(tensors)
        for index in sorted(by_layer):
            self._overwrite_layer(index, by_layer.pop(index))
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)

    def _overwrite_layer(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        decoder, prefix = self._decoder, f"layers.{index}."
        # Tensors that were not received stand on the meta device and are not written.
        parts = [part for part in self._parts if part.target.startswith(prefix)]
        layer_tensors = empty_targets(parts, decoder.dtype, torch.device("meta"), decoder.layouts)
        for name, tensor in tensors.items():
            layer_tensors[name] = tensor.to(decoder.device, non_blocking=True)
        _round_wide(layer_tensors)
        new = build_layer(
            decoder.config,
            layer_tensors,
            attention_shape(decoder.config, index, decoder.shard),
            index,
            self._options.quantisation,
            decoder.group,
        )
        _overwrite(decoder.layers[index - decoder.shard.layers(decoder.config).start], new)

    def _layer_bytes(self) -> int:
        """Device memory for the largest staged layer, in the model's dtype."""
        sizes: dict[str, int] = defaultdict(int)
        for name, tensor in self._tensors.items():
            layer = name.split(".")[1] if name.startswith("layers.") else name
            sizes[layer] += 0 if name == _EMBEDDING else tensor.nbytes
        return max(sizes.values(), default=0)

    def _destination(self, index: int) -> Tensor:
        if index not in self._places:
            target = self._parts[index].target
            indices = [i for i, part in enumerate(self._parts) if part.target == target]
            parts = [self._parts[i] for i in indices]
            allocated = empty_targets(parts, self._decoder.dtype, _CPU, is_pinned=self._is_pinned)
            self._tensors |= allocated
            self._places |= dict(zip(indices, places_of(parts, allocated), strict=True))
        return self._places[index]

    def _is_ignored(self, name: str) -> bool:
        is_known = name.startswith(self._ignored) or name.endswith(IGNORED_SUFFIXES)
        return is_known or name in self._keys_of_others


def checksums(decoder: Decoder) -> dict[str, str]:
    """Returns the SHA-256 of each tensor of this process's part of a decoder, by its path in the
    decoder, in lower-case hexadecimal."""
    return {name: _digest(tensor) for name, tensor in named_tensors(decoder)}


def named_tensors(part: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a model or of a part of one, with their paths."""
    return named_parts(part, Tensor)


def _overwrite(old: object, new: object) -> None:
    """Copies the tensors of `new` into those of `old`, except for tensors on the meta device."""
    old_tensors = dict(named_tensors(old))
    for name, tensor in named_tensors(new):
        if not tensor.is_meta:
            place = old_tensors[name]
            assert place.shape == tensor.shape, f"{list(place.shape)} is not {list(tensor.shape)}"
            assert (place.dtype, place.layout) == (tensor.dtype, tensor.layout)
            place.copy_(tensor)


def _round_wide(tensors: WeightTensors) -> None:
    """Rounds matrices that were received in 16 or 32 bits to the 8 bits that they are served in."""
    for name, layout in tensors.layouts.items():
        if tensors[name].dtype != layout.dtype:
            rows = None if layout.block is None else layout.block.rows
            matrix = StoredMatrix.rounded(tensors[name], layout.dtype, block_rows=rows)
            tensors[name], tensors[scales_of(name)] = matrix.values, matrix.scales


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    by_layer: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            by_layer[int(name.split(".")[1])][name] = tensor
    return by_layer


def _is_same(head: Linear, embedding: Tensor) -> bool:
    """Whether lm_head and embedding are one tensor."""
    values = head.weight.values
    return values.layout == torch.strided and values.data_ptr() == embedding.data_ptr()


def _check_room(num_bytes: int, device: torch.device) -> None:
    """Raises: RuntimeError if the device cannot allocate as much now. torch's allocator keeps the
    freed memory for the update."""
    if device.type == "cuda":
        torch.empty(2 * num_bytes, dtype=torch.uint8, device=device)


def _digest(tensor: Tensor) -> str:
    plain = tensor if tensor.layout == torch.strided else tensor.to_dense()
    flat = plain.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _check_config(folder: Path, given: ModelConfig, served: ModelConfig) -> None:
    """Raises: CheckpointError if a model of the given config would compute something else with
    tensors of the same names."""
    given = dataclasses.replace(given, dtype=served.dtype, eos_token_ids=served.eos_token_ids)
    for field in dataclasses.fields(ModelConfig):
        expected, value = getattr(served, field.name), getattr(given, field.name)
        if value != expected:
            raise CheckpointError(
                f"{folder} has {field.name} {value}; the model that is served has {expected}"
            )


# New weights for a running draft model.
#
# They are copied into the existing tensors, so that CUDA graphs, and other users of a head's
# tensors, keep valid addresses. What the target knows of a head must not change: the projection
# of features, which the target applies, and the tokens that the head can draft.

_FIXED = ("feature_spec.projection", "vocabulary.token_ids", "token_map")
_FINITE_PART = 1 << 22  # elements


class Model(Protocol):
    """A tree of dataclasses and tuples with tensors."""

    @property
    def config(self) -> object: ...


class WeightSwap:
    """New weights for a running draft model, checked against it.

    Args:
        new: a model of the same config on the same device; do not use it afterwards.

    Raises:
        CheckpointError: `new` does not fit, changes what the target knows of the head, or has a
            weight that is not finite; the message names the weight.
    """

    def __init__(self, running: Model, new: Model) -> None:
        if new.config != running.config:
            raise CheckpointError("config.json is not that of the running model")
        places, sources = dict(named_tensors(running)), dict(named_tensors(new))
        for name in sorted(places.keys() ^ sources.keys()):
            where = "the running model" if name in places else "the new weights"
            raise CheckpointError(f"{name} is only in {where}")
        for name, place in places.items():
            _check(name, place, sources[name])
        pairs = ((place, sources[name]) for name, place in places.items())
        self._pairs = [(place, source) for place, source in pairs if place is not source]

    @torch.inference_mode()
    def apply(self) -> None:
        """Copies the weights, after the work that this thread has queued on the device."""
        for place, source in self._pairs:
            place.copy_(source)


def _check(name: str, place: Tensor, source: Tensor) -> None:
    if place is source:
        return
    if source.shape != place.shape or source.dtype != place.dtype:
        raise CheckpointError(
            f"{name} has shape {list(source.shape)} in {source.dtype}; that of the running model "
            f"has {list(place.shape)} in {place.dtype}"
        )
    if name in _FIXED and not torch.equal(place, source):
        raise CheckpointError(f"{name} differs from that of the running model, which a target uses")
    plain = source.to_dense() if source.is_mkldnn else source
    if plain.is_floating_point() and not _is_finite(plain):
        raise CheckpointError(f"{name} holds numbers that are not finite")


def _is_finite(values: Tensor) -> bool:
    """Checks in parts: a serving GPU has little free memory, and freeing some would delay its
    steps."""
    parts = torch.split(values.reshape(-1), _FINITE_PART)
    return bool(torch.stack([part.float().isfinite().all() for part in parts]).all())
