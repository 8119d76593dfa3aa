"""From a head's folder and its target's tensors to a head on its device."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.layers.attention import Attention, AttentionShape
from shared.layers.linear import Linear
from shared.layers.mlp import Mlp
from shared.layers.norm import RmsNorm
from shared.layers.rotary import Rotary
from shared.model_options import ModelOptions
from shared.models.checkpoint import Checkpoint
from shared.models.decoder_weights import IGNORED_SUFFIXES
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.fusion import FeatureFusion
from shared.models.heads.head import DraftHead
from shared.models.heads.layers import Eagle3Layer, EagleLayer, HeadLayer
from shared.models.heads.target_tensors import TargetTensors
from shared.models.heads.vocabulary import DraftVocabulary
from shared.models.heads.weights import (
    EMBEDDING,
    TOKEN_MAP_KEY,
    HeadKeys,
    has_own_lm_head,
    head_parts,
    ignored_keys,
)
from shared.models.loader import linear_from
from shared.models.weights import read_weights


def load_head(
    folder: Path,
    kind: HeadKind,
    target: TargetTensors,
    *,
    dtype: torch.dtype,
    device: torch.device,
    token_map: Tensor | None = None,
    options: ModelOptions = ModelOptions(),  # noqa: B008 - frozen
) -> DraftHead:
    """Reads config and weights, cast to `dtype`, straight to `device`.

    Args:
        token_map: `[Vd]` int64, tokens an EAGLE head is confined to; EAGLE3 heads bring their own.
        options: quantisation is that of the layer. Embedding and lm_head stay as they are, see
            `load_decoder`, and so does an `fc` that the target applies.

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
    tensors = read_weights(
        checkpoint,
        head_parts(config, keys),
        ignored_prefixes=ignored_keys(config),
        ignored_suffixes=IGNORED_SUFFIXES,
        dtype=dtype,
        device=device,
    )
    own_map = _own_token_map(checkpoint, config, keys, device)
    builder = _HeadBuilder(folder, config, tensors, target, options)
    head = builder.build(own_map if token_map is None else token_map)
    assert not tensors, f"weights were read but not used: {sorted(tensors)}"
    return head


class _HeadBuilder:
    """Takes tensors out of the dict as it goes, so that packed weights are not held twice."""

    def __init__(
        self,
        folder: Path,
        config: HeadConfig,
        tensors: dict[str, Tensor],
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
            rotary=Rotary(self._config.rope, self._config.head_dim, device),
            attention_backend=self._options.attention_backend,
        )

    def _embedding(self) -> Tensor:
        own = self._tensors.pop("embedding", None)
        if own is not None:
            return own
        config = self._config
        if config.hidden_size != config.target_hidden_size:
            raise CheckpointError(
                f"{self._folder}: {EMBEDDING} is missing; the target's is "
                f"{config.target_hidden_size} wide, the head's hidden_size is {config.hidden_size}"
            )
        return self._target.embedding()

    def _vocabulary(self, norm: RmsNorm | None, token_map: Tensor | None) -> DraftVocabulary:
        config = self._config
        weight = self._tensors.pop("lm_head", None)
        if weight is None:
            weight = self._target.lm_head()
            if weight.shape[1] != config.hidden_size:
                raise CheckpointError(
                    f"{self._folder}: lm_head.weight is missing; the target's has shape "
                    f"{list(weight.shape)}, the head's hidden_size is {config.hidden_size}"
                )
            if token_map is not None:
                weight = weight.index_select(0, token_map)
        size = weight.shape[0]
        return DraftVocabulary(norm, Linear.of(weight), token_map, config.vocab_size, size)

    def _features(self, dtype: torch.dtype) -> tuple[FeatureSpec, FeatureFusion | None]:
        """The target applies a bare `fc`, which narrows the rows on the wire; norms in front of
        it, or a bias, keep it on this side."""
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
            return FeatureSpec(layers, dtype, config.hidden_size, weight), None
        fc = Linear.of(weight, bias, self._options.quantisation)
        fusion = FeatureFusion(joint, norms, fc)
        return FeatureSpec(layers, dtype, width), fusion

    def _layer(self, state_norm: RmsNorm | None) -> HeadLayer:
        config = self._config
        attention, mlp_norm = self._attention(), self._norm("mlp_norm")
        mlp = Mlp(self._linear("gate_up"), self._linear("down"))
        if config.kind is HeadKind.EAGLE:
            return EagleLayer(self._linear("fc"), attention, mlp_norm, mlp)
        return Eagle3Layer(
            embedding_norm=self._norm("embedding_norm"),
            hidden_norm=self._norm("hidden_norm"),
            attention=attention,
            mlp_norm=mlp_norm,
            mlp=mlp,
            state_norm=state_norm,
            norm_before_residual=config.norm_before_residual,
        )

    def _attention(self) -> Attention:
        config = self._config
        qk_norm = self._tensors.pop("qk_norm", None)
        if qk_norm is not None:
            qk_norm = qk_norm.view(-1, config.head_dim)
        return Attention(
            shape=AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim),
            qkv=self._linear("qkv"),
            output=self._linear("output"),
            qk_norm=None if qk_norm is None else RmsNorm(qk_norm, config.rms_norm_eps),
            layer=0,
        )

    def _norm(self, name: str) -> RmsNorm:
        return RmsNorm(self._tensors.pop(name), self._config.rms_norm_eps)

    def _linear(self, name: str) -> Linear:
        return linear_from(self._tensors, name, self._options.quantisation)


def _own_token_map(
    checkpoint: Checkpoint, config: HeadConfig, keys: HeadKeys, device: torch.device
) -> Tensor | None:
    """Returns the target's id of each draft id, `[Vd]` int64; None when they are the same.

    Raises:
        CheckpointError: `d2t` has another length, or leads outside the target's vocabulary.
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
    low, high = int(token_ids.min()), int(token_ids.max())
    num_distinct = len(set(token_ids.tolist()))
    if low < 0 or high >= config.vocab_size or num_distinct != size:
        raise CheckpointError(
            f"{path}: {TOKEN_MAP_KEY} maps to {num_distinct} ids in [{low}, {high}]; "
            f"it must map to {size} ids in [0, {config.vocab_size})"
        )
    return token_ids
