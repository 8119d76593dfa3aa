"""New weights for a decoder that serves: gathered in the host's memory, then put in place at once.

For a GPU that memory is pinned, and stays with the process: the next update has it at once.

Nothing of the decoder changes before everything has been checked. Values go into the tensors that
are there, whose addresses CUDA graphs hold, and come to their layout (packed, in 8 bits) by the
loader's own path, a layer at a time. Matrices that are served in a checkpoint's 8 bits are taken
from another one in the same 8 bits, or rounded to them.
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
from shared.models.scaled_weights import StoredLayout
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
    """The tensors of an update received so far. Not in force until `apply`.

    Args:
        keys: the names that the served checkpoint's tensors have, which an update has too.
        options: those that the decoder was loaded with.
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
        self._arrived: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived, for this process or others."""
        return not self._arrived

    @property
    def names(self) -> frozenset[str]:
        """The decoder's tensors that have arrived, by the names of `decoder_parts`."""
        return self.all_names & self._tensors.keys()

    @property
    def all_names(self) -> frozenset[str]:
        """The decoder's tensors."""
        return frozenset(part.target for part in self._parts)

    @property
    def num_bytes(self) -> int:
        """Host memory of what has arrived."""
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def read(self, folder: Path, load_format: LoadFormat) -> None:
        """Reads a whole checkpoint.

        Raises:
            CheckpointError: the folder is incomplete or damaged, or of another shape than the
                decoder; nothing has arrived then.
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
        self._arrived = set(self._by_key)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raises:
        CheckpointError: the decoder has no such tensor, or of another shape, or it came before.
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
        if name in self._arrived:
            raise CheckpointError(f"{name} came twice in one update")

    def add(self, name: str, tensor: Tensor) -> None:
        """Takes one tensor of a checkpoint, by its name there.

        Raises:
            CheckpointError: see `check`; what arrived before is as it was.
        """
        self.check(name, tuple(tensor.shape))
        if self._is_ignored(name):
            self._arrived |= self._keys_of_others & {name}
            return
        for index in self._by_key[name]:
            part = self._parts[index]
            # From a GPU behind what is queued there; whoever sends from one waits for it.
            taken = part.taken(partial(cut_tensor, tensor))
            self._place(index).copy_(taken, non_blocking=self._is_pinned)
        self._arrived.add(name)

    def check_ready(self) -> None:
        """Raises:
        CheckpointError: parts of a tensor that is made of several are missing.
        RuntimeError: the device has no room for one layer beside the decoder.
        """
        self._check_complete()
        _check_room(self._layer_bytes(), self._decoder.device)

    def _check_complete(self) -> None:
        missing = {
            part.key
            for part in self._parts
            if part.target in self._tensors and part.key not in self._arrived
        }
        if missing:
            raise CheckpointError(
                f"the update lacks {listed(missing)}, which the server keeps in one tensor with "
                f"others that it has"
            )

    @torch.inference_mode()
    def apply(self) -> None:
        """Puts everything in place. `check_ready` has passed, and nothing computes."""
        decoder, config = self._decoder, self._decoder.config
        tensors, self._tensors, self._places = self._tensors, {}, {}
        head = tensors.get(_EMBEDDING if config.tie_word_embeddings else _LM_HEAD)
        if (embedding := tensors.get(_EMBEDDING)) is not None:
            decoder.embedding.copy_(embedding, non_blocking=True)
        if head is not None and not _is_same(decoder.lm_head, decoder.embedding):
            _put(decoder.lm_head, Linear.of(head.to(decoder.device)))
        if _NORM in tensors:
            norm = norm_from(config, {_NORM: tensors[_NORM].to(decoder.device)}, _NORM)
            _put(decoder.norm, norm)
        by_layer = _by_layer(tensors)
        for index in sorted(by_layer):
            self._put_layer(index, by_layer.pop(index))
        if decoder.device.type == "cuda":
            torch.cuda.synchronize(decoder.device)

    def _put_layer(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        decoder, prefix = self._decoder, f"layers.{index}."
        # What has not come is told by its shape alone, and is left as it is.
        own = [part for part in self._parts if part.target.startswith(prefix)]
        given = empty_targets(own, decoder.dtype, torch.device("meta"), decoder.layouts)
        given.update(
            {name: each.to(decoder.device, non_blocking=True) for name, each in tensors.items()}
        )
        _round_wide(given)
        new = build_layer(
            decoder.config,
            given,
            attention_shape(decoder.config, index, decoder.shard),
            index,
            self._options.quantisation,
            decoder.group,
        )
        _put(decoder.layers[index - decoder.shard.layers(decoder.config).start], new)

    def _layer_bytes(self) -> int:
        """The most that one layer takes before it is in its place, in the model's dtype."""
        sizes: dict[str, int] = defaultdict(int)
        for name, tensor in self._tensors.items():
            layer = name.split(".")[1] if name.startswith("layers.") else name
            sizes[layer] += 0 if name == _EMBEDDING else tensor.nbytes
        return max(sizes.values(), default=0)

    def _place(self, index: int) -> Tensor:
        if index not in self._places:
            target = self._parts[index].target
            indices = [i for i, part in enumerate(self._parts) if part.target == target]
            own = [self._parts[i] for i in indices]
            allocated = empty_targets(own, self._decoder.dtype, _CPU, is_pinned=self._is_pinned)
            self._tensors |= allocated
            self._places |= dict(zip(indices, places_of(own, allocated), strict=True))
        return self._places[index]

    def _is_ignored(self, name: str) -> bool:
        is_known = name.startswith(self._ignored) or name.endswith(IGNORED_SUFFIXES)
        return is_known or name in self._keys_of_others


def checksums(decoder: Decoder) -> dict[str, str]:
    """Returns the SHA-256 of each tensor of this process's part of a decoder, by its place there,
    in lower-case hexadecimal."""
    return {name: _digest(tensor) for name, tensor in named_tensors(decoder)}


def named_tensors(part: object) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights of a model or of a part of one, by their places."""
    return named_parts(part, Tensor)


def _put(old: object, new: object) -> None:
    """Copies the tensors of `new`, but those on the meta device, to their counterparts."""
    places = dict(named_tensors(old))
    for name, tensor in named_tensors(new):
        if not tensor.is_meta:
            place = places[name]
            assert place.shape == tensor.shape, f"{list(place.shape)} is not {list(tensor.shape)}"
            assert (place.dtype, place.layout) == (tensor.dtype, tensor.layout)
            place.copy_(tensor)


def _round_wide(tensors: WeightTensors) -> None:
    """Brings matrices that came wide to the 8 bits that they are served in."""
    for name, layout in tensors.layouts.items():
        if tensors[name].dtype != layout.dtype:
            matrix = _rounded(tensors[name], layout)
            tensors[name], tensors[scales_of(name)] = matrix.values, matrix.scales


def _rounded(weight: Tensor, layout: StoredLayout) -> StoredMatrix:
    rows = None if layout.block is None else layout.block.rows
    return StoredMatrix.rounded(weight, layout.dtype, block_rows=rows)


def _by_layer(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            found[int(name.split(".")[1])][name] = tensor
    return found


def _is_same(head: Linear, embedding: Tensor) -> bool:
    """Whether lm_head and embedding are one tensor."""
    values = head.weight.values
    return values.layout == torch.strided and values.data_ptr() == embedding.data_ptr()


def _check_room(num_bytes: int, device: torch.device) -> None:
    """Raises: RuntimeError where so much cannot be had now. What is freed here stays with torch, so
    that it can be had again."""
    if device.type == "cuda":
        torch.empty(2 * num_bytes, dtype=torch.uint8, device=device)


def _digest(tensor: Tensor) -> str:
    plain = tensor if tensor.layout == torch.strided else tensor.to_dense()
    flat = plain.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def _check_config(folder: Path, given: ModelConfig, served: ModelConfig) -> None:
    """Raises: CheckpointError where the two would compute different things with the same names."""
    given = dataclasses.replace(given, dtype=served.dtype, eos_token_ids=served.eos_token_ids)
    for field in dataclasses.fields(ModelConfig):
        mine, theirs = getattr(served, field.name), getattr(given, field.name)
        if mine != theirs:
            raise CheckpointError(
                f"{folder} has {field.name} {theirs}; the model that is served has {mine}"
            )


# Other weights in a draft model that runs.
#
# They are copied into the tensors that are there, so CUDA graphs, and whoever borrowed a head, go
# on with the addresses that they know. What the target was told of a head stays: the projection of
# features that it applies, and the tokens that the head can draft.

_FIXED = ("feature_spec.projection", "vocabulary.token_ids", "token_map")
_FINITE_PART = 1 << 22  # elements


class Model(Protocol):
    """A tree of dataclasses and tuples with tensors."""

    @property
    def config(self) -> object: ...


class WeightSwap:
    """Weights that were read, checked against the model that runs.

    Args:
        new: of the same config, on the same device; it is of no use afterwards.

    Raises:
        CheckpointError: `new` does not fit, changes what the target was told, or has a weight that
            is not finite; the message names the weight.
    """

    def __init__(self, running: Model, new: Model) -> None:
        if new.config != running.config:
            raise CheckpointError("config.json is not that of the model that runs")
        places, sources = dict(named_tensors(running)), dict(named_tensors(new))
        for name in sorted(places.keys() ^ sources.keys()):
            where = "the model that runs" if name in places else "the new weights"
            raise CheckpointError(f"{name} is in {where} alone")
        for name, place in places.items():
            _check(name, place, sources[name])
        pairs = ((place, sources[name]) for name, place in places.items())
        self._pairs = [(place, source) for place, source in pairs if place is not source]

    @torch.inference_mode()
    def apply(self) -> None:
        """Copies the weights, behind the work that this thread has queued on the device."""
        for place, source in self._pairs:
            place.copy_(source)


def _check(name: str, place: Tensor, source: Tensor) -> None:
    if place is source:
        return
    if source.shape != place.shape or source.dtype != place.dtype:
        raise CheckpointError(
            f"{name} has shape {list(source.shape)} in {source.dtype}; that of the model that runs "
            f"has {list(place.shape)} in {place.dtype}"
        )
    if name in _FIXED and not torch.equal(place, source):
        raise CheckpointError(
            f"{name} differs from that of the model that runs, which a target has"
        )
    plain = source.to_dense() if source.is_mkldnn else source
    # Bytes of words that hold e4m3 numbers are none themselves.
    if plain.is_floating_point() and plain.itemsize > 1 and not _is_finite(plain):
        raise CheckpointError(f"{name} holds numbers that are not finite")


def _is_finite(values: Tensor) -> bool:
    """In parts: a GPU that serves has little room, and making room would hold up its steps."""
    parts = torch.split(values.reshape(-1), _FINITE_PART)
    return bool(torch.stack([part.float().isfinite().all() for part in parts]).all())
