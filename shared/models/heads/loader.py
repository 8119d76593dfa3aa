"""Loads an EAGLE head from its folder and its target's tensors, with the checkpoints' name maps.

Checkpoints of EAGLE-2 and EAGLE-3 may have biases, norms of queries and keys, and an embedding of
their own. Whether they do is read from their keys: the configs of published heads do not say.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.layers.attention import AttentionShape
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import ModelOptions, Quantisation
from shared.models.checkpoint import Checkpoint, open_weights
from shared.models.config import ModelConfig
from shared.models.decoder_weights import (
    IGNORED_SUFFIXES,
    LayerTensors,
    layer_parts,
    linear_from,
)
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import (
    DraftHead,
    DraftVocabulary,
    Eagle3Layer,
    EagleLayer,
    FeatureFusion,
    HeadLayer,
)
from shared.models.heads.target_tensors import TargetTensors
from shared.models.loader import build_attention
from shared.models.weights import FULL_PACE, CopyPace, WeightPart, WeightTensors, read_weights

EMBEDDING = "embed_tokens.weight"
LM_HEAD_KEY = "lm_head.weight"
TOKEN_MAP_KEY = "d2t"
TOKEN_MASK_KEY = "t2d"
# Prefix of the names of the layer's tensors.
_LAYER = "layers.0."


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """Keys of the tensors in one checkpoint.

    Attributes:
        folder: folder of the checkpoint, for messages.
        root: `model.` where the whole head is nested under it, else empty.
    """

    folder: Path
    keys: Collection[str]
    root: str
    layer: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, kind: HeadKind) -> HeadKeys:
        """Finds the prefixes: most EAGLE-3 heads have `midlayer.`, some `layers.0.`."""
        keys = checkpoint.files.keys()
        root = "model." if any(key.startswith("model.") for key in keys) else ""
        layer = f"{root}layers.0."
        if kind is HeadKind.EAGLE3 and not any(key.startswith(layer) for key in keys):
            layer = f"{root}midlayer."
        return cls(checkpoint.folder, keys, root, layer)

    def has(self, key: str) -> bool:
        """Whether the head has `key`, which is given without the root."""
        return f"{self.root}{key}" in self.keys

    @property
    def num_fc_norms(self) -> int:
        """Number of norms of single feature layers; 0 in heads without them."""
        return sum(key.startswith(f"{self.root}fc_norm.") for key in self.keys)

    def sizes(self, config: ModelConfig) -> ModelConfig:
        """Returns the sizes of the layer with the biases and norms that its keys show. If one of
        several matrices that are fused here has a bias, all are expected to have one."""

        def has(*names: str) -> bool:
            return any(f"{self.layer}{name}" in self.keys for name in names)

        return replace(
            config,
            has_qkv_bias=has(*(f"self_attn.{name}_proj.bias" for name in "qkv")),
            has_output_bias=has("self_attn.o_proj.bias"),
            has_mlp_bias=has(*(f"mlp.{name}_proj.bias" for name in ("gate", "up", "down"))),
            has_qk_norm=has("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
        )


def head_parts(config: HeadConfig, keys: HeadKeys) -> tuple[WeightPart, ...]:
    """Lists every tensor of the head, in the order in which fused ones are stacked."""
    hidden, root = config.sizes.hidden_size, keys.root
    parts = [*_fc_parts(config, keys), *_layer_parts(config, keys)]
    if keys.has(EMBEDDING):
        parts.append(WeightPart(f"{root}{EMBEDDING}", (config.vocab_size, hidden), "embedding"))
    if config.kind is HeadKind.EAGLE3:
        parts.append(WeightPart(f"{root}norm.weight", (hidden,), "norm"))
        if has_own_lm_head(config, keys):
            size = config.draft_vocab_size or config.vocab_size
            parts.append(WeightPart(LM_HEAD_KEY, (size, hidden), "lm_head"))
    return tuple(parts)


def has_own_lm_head(config: HeadConfig, keys: HeadKeys) -> bool:
    """Whether the head has an lm_head of its own; else it uses the target's.

    Raises:
        CheckpointError: it has none, but its vocabulary is smaller than the target's.
    """
    if config.kind is HeadKind.EAGLE:
        return False
    is_smaller = (config.draft_vocab_size or config.vocab_size) < config.vocab_size
    for key in (LM_HEAD_KEY, TOKEN_MAP_KEY):
        if is_smaller and key not in keys.keys:
            raise CheckpointError(
                f"{keys.folder}: {key} is missing; draft_vocab_size {config.draft_vocab_size} is "
                f"smaller than the target's vocab_size {config.vocab_size}, so the head must "
                f"have it"
            )
    return LM_HEAD_KEY in keys.keys


def ignored_keys(config: HeadConfig) -> tuple[str, ...]:
    """Returns the keys that are not read as weights: token maps, which are read separately, and
    copies of the target's lm_head."""
    if config.kind is HeadKind.EAGLE:
        return (LM_HEAD_KEY,)
    return (TOKEN_MAP_KEY, TOKEN_MASK_KEY)


def _fc_parts(config: HeadConfig, keys: HeadKeys) -> Iterator[WeightPart]:
    """Yields `fc` and the norms in front of it."""
    root, hidden, wide = keys.root, config.sizes.hidden_size, 2 * config.sizes.hidden_size
    if config.kind is HeadKind.EAGLE3:
        if not config.fuses_features:
            return
        width = config.target_hidden_size
        wide = len(config.feature_layers) * width
        for index in range(keys.num_fc_norms):
            yield WeightPart(f"{root}fc_norm.{index}.weight", (width,), f"fc_norm.{index}")
        if config.norm_before_fc:
            yield WeightPart(f"{root}input_norm.weight", (wide,), "input_norm")
    yield WeightPart(f"{root}fc.weight", (hidden, wide), "fc.weight")
    if keys.has("fc.bias"):
        yield WeightPart(f"{root}fc.bias", (hidden,), "fc.bias")


def _layer_parts(config: HeadConfig, keys: HeadKeys) -> Iterator[WeightPart]:
    """Yields the parts of a Llama layer. EAGLE's has no norm before the attention. EAGLE3's reads
    embedding and hidden state; the norm is the embedding's, and the hidden state has its own."""
    hidden, is_eagle3 = config.sizes.hidden_size, config.kind is HeadKind.EAGLE3
    for part in layer_parts(config.sizes, keys.layer, _LAYER, layer=0):
        if part.target == f"{_LAYER}qkv.weight" and is_eagle3:
            yield replace(part, shape=(part.shape[0], 2 * hidden))
        elif part.target != f"{_LAYER}attention_norm" or is_eagle3:
            yield part
    if is_eagle3:
        yield WeightPart(f"{keys.layer}hidden_norm.weight", (hidden,), f"{_LAYER}hidden_norm")


def load_head(
    folder: Path,
    kind: HeadKind,
    target: TargetTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_map: Tensor | None = None,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
    pace: CopyPace = FULL_PACE,
) -> DraftHead:
    """Reads config and weights, cast to `dtype`, straight to `device`.

    Args:
        token_map: `[Vd]` int64, the only tokens that an EAGLE head may propose; EAGLE3 heads have
            their own map.
        options: quantisation does not apply to the embedding, to an lm_head that is the target's
            own tensor, or to an `fc` that the target applies.

    Raises:
        CheckpointError: if the folder is incomplete, damaged or made for another target; the
            message names the file, the key and, for a wrong shape, both shapes.
    """
    assert token_map is None or kind is HeadKind.EAGLE, (
        "EAGLE3 heads have a vocabulary of their own"
    )
    config = HeadConfig.from_folder(folder, kind, target.config)
    checkpoint = Checkpoint.open(folder, options.load_format)
    keys = HeadKeys.of(checkpoint, kind)
    config = replace(config, sizes=keys.sizes(config.sizes))
    tensors = read_weights(
        checkpoint,
        head_parts(config, keys),
        ignored_prefixes=ignored_keys(config),
        ignored_suffixes=IGNORED_SUFFIXES,
        dtype=dtype,
        device=device,
        pace=pace,
    )
    own_map = _own_token_map(checkpoint, config, keys, device)
    builder = _HeadBuilder(folder, config, tensors, target, options)
    head = builder.build(own_map if token_map is None else token_map)
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return head


class _HeadBuilder:
    """Builds a head. Each tensor is removed from the dict when it is used, so that packed weights
    are not held twice."""

    def __init__(
        self,
        folder: Path,
        config: HeadConfig,
        tensors: WeightTensors,
        target: TargetTensors,
        options: ModelOptions,
    ) -> None:
        self._folder = folder
        self._config = config
        self._tensors = tensors
        self._target = target
        self._options = options

    def build(self, token_map: Tensor | None) -> DraftHead:
        embedding = self._embedding()
        device, dtype = embedding.device, embedding.dtype
        if token_map is not None:
            token_map = token_map.to(device)
        norm = self._norm("norm") if self._config.kind is HeadKind.EAGLE3 else None
        vocabulary = self._vocabulary(None if self._config.feeds_back_norm else norm, token_map)
        spec, fusion = self._features(dtype)
        return DraftHead(
            config=self._config,
            feature_spec=spec,
            fusion=fusion,
            embedding=embedding,
            layers=(self._layer(norm if self._config.feeds_back_norm else None),),
            vocabulary=vocabulary,
            rotary=Rotary(self._config.sizes.rope, self._config.head_dim, device),
            attention_backend=self._options.attention_backend,
        )

    def _embedding(self) -> Tensor:
        embedding = self._tensors.pop("embedding", None)
        if embedding is not None:
            return embedding
        config = self._config
        if config.sizes.hidden_size != config.target_hidden_size:
            raise CheckpointError(
                f"{self._folder}: {EMBEDDING} is missing; the target's is "
                f"{config.target_hidden_size} wide, the head's hidden_size is "
                f"{config.sizes.hidden_size}"
            )
        return self._target.embedding()

    def _vocabulary(self, norm: RmsNorm | None, token_map: Tensor | None) -> DraftVocabulary:
        config = self._config
        weight = self._tensors.pop("lm_head", None)
        quantisation = self._options.lm_head_quantisation
        if weight is None:
            weight = self._target.lm_head()
            if weight.shape[1] != config.sizes.hidden_size:
                raise CheckpointError(
                    f"{self._folder}: lm_head.weight is missing; the target's has shape "
                    f"{list(weight.shape)}, the head's hidden_size is {config.sizes.hidden_size}"
                )
            if token_map is None:
                quantisation = Quantisation.UNQUANT
            else:
                weight = weight.index_select(0, token_map)
        size = weight.shape[0]
        norms = () if norm is None else (norm,)
        lm_head = Linear.of(weight, None, quantisation)
        return DraftVocabulary(norms, lm_head, token_map, config.vocab_size, size)

    def _features(self, dtype: torch.dtype) -> tuple[FeatureSpec, FeatureFusion | None]:
        """Returns the features, and the fusion on the draft's side. The target applies an `fc`
        without norms or bias, which narrows the rows on the wire; else the draft applies it."""
        config, tensors = self._config, self._tensors
        layers = config.feature_layers
        width = len(layers) * config.target_hidden_size
        if not config.fuses_features:
            return FeatureSpec(layers, dtype, width), None
        num_norms = sum(name.startswith("fc_norm.") for name in tensors)
        norms = tuple(self._norm(f"fc_norm.{index}") for index in range(num_norms))
        joint = self._norm("input_norm") if config.norm_before_fc else None
        weight, bias = tensors.pop("fc.weight"), tensors.pop("fc.bias", None)
        if joint is None and not norms and bias is None:
            return FeatureSpec(layers, dtype, config.sizes.hidden_size, weight), None
        fc = Linear.of(weight, bias, self._options.quantisation)
        fusion = FeatureFusion(joint, norms, fc)
        return FeatureSpec(layers, dtype, width), fusion

    def _layer(self, state_norm: RmsNorm | None) -> HeadLayer:
        sizes = self._config.sizes
        weights = LayerTensors(sizes, self._tensors, 0, self._options.quantisation, None)
        shape = AttentionShape(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim)
        attention, mlp_norm = build_attention(weights, shape), weights.norm("mlp_norm")
        mlp = Mlp(weights.linear("gate_up"), weights.linear("down"))
        if self._config.kind is HeadKind.EAGLE:
            fc = linear_from(self._tensors, "fc", self._options.quantisation)
            return EagleLayer(fc, attention, mlp_norm, mlp)
        return Eagle3Layer(
            embedding_norm=weights.norm("attention_norm"),
            hidden_norm=weights.norm("hidden_norm"),
            attention=attention,
            mlp_norm=mlp_norm,
            mlp=mlp,
            state_norm=state_norm,
            norm_before_residual=self._config.norm_before_residual,
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._tensors.pop(name), self._config.sizes.rms_norm_eps)


def _own_token_map(
    checkpoint: Checkpoint, config: HeadConfig, keys: HeadKeys, device: torch.device
) -> Tensor | None:
    """Returns the target's id of each draft id, `[Vd]` int64; None when they are the same.

    Raises:
        CheckpointError: `d2t` has the wrong length, or does not map to distinct ids of the target.
    """
    if not has_own_lm_head(config, keys) or TOKEN_MAP_KEY not in keys.keys:
        return None
    path = checkpoint.files[TOKEN_MAP_KEY]
    offsets = checkpoint.read(TOKEN_MAP_KEY).to(device, torch.int64)
    size = config.draft_vocab_size or config.vocab_size
    if tuple(offsets.shape) != (size,):
        raise CheckpointError(
            f"{path}: {TOKEN_MAP_KEY} has shape {list(offsets.shape)}; the config needs [{size}]"
        )
    token_ids = offsets + torch.arange(size, device=device)
    low, high, num_distinct = _extent(token_ids)
    if low < 0 or high >= config.vocab_size or num_distinct != size:
        raise CheckpointError(
            f"{path}: {TOKEN_MAP_KEY} maps to {num_distinct} ids in [{low}, {high}]; "
            f"it must map to {size} ids in [0, {config.vocab_size})"
        )
    return token_ids


def read_token_map(path: Path, vocab_size: int) -> Tensor:
    """Returns `[Vd]` int64: the target's id of each draft id.

    Args:
        path: `.json` with a list, `.safetensors` with one tensor, or a file that `torch.save`
            wrote from a list or a tensor.
        vocab_size: vocabulary size of the target.

    Raises:
        CheckpointError: the file cannot be read, or its ids are not distinct and in
            `[0, vocab_size)`.
    """
    token_ids = _as_tensor(path, _read(path))
    if token_ids.ndim != 1 or token_ids.numel() == 0:
        raise CheckpointError(f"{path} has shape {list(token_ids.shape)}; it must be a list of ids")
    low, high, num_distinct = _extent(token_ids)
    if low < 0 or high >= vocab_size:
        token = low if low < 0 else high
        raise CheckpointError(f"{path} holds id {token}; ids must be in [0, {vocab_size})")
    if num_distinct != len(token_ids):
        raise CheckpointError(
            f"{path} has {len(token_ids)} ids, of which {num_distinct} are distinct; all must be"
        )
    return token_ids


def _extent(token_ids: Tensor) -> tuple[int, int, int]:
    """Returns the lowest and the highest id, and how many are distinct."""
    distinct = set(token_ids.tolist())
    return min(distinct), max(distinct), len(distinct)


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        weights = open_weights(path)
        keys = sorted(weights.keys())
        if len(keys) != 1:
            raise CheckpointError(f"{path} holds {len(keys)} tensors; a token map is 1")
        return weights.read(keys[0])
    try:
        if path.suffix == ".json":
            return json.loads(path.read_text(encoding="utf-8"))
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _as_tensor(path: Path, content: object) -> Tensor:
    if isinstance(content, Tensor) and not content.is_floating_point():
        return content.to(torch.int64)
    if isinstance(content, list) and all(type(item) is int for item in content):
        return torch.tensor(content, dtype=torch.int64)
    raise CheckpointError(f"{path} holds {type(content).__name__}; it must be a list of token ids")
