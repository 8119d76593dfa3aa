"""The name maps of EAGLE-2 and EAGLE-3 checkpoints.

What the files may hold or leave out, biases, norms of queries and keys, an embedding of their
own, is read from the keys that are there: the configs of published heads do not say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.weights import WeightPart

EMBEDDING = "embed_tokens.weight"
LM_HEAD_KEY = "lm_head.weight"
TOKEN_MAP_KEY = "d2t"
TOKEN_MASK_KEY = "t2d"


@dataclass(frozen=True, slots=True)
class HeadKeys:
    """Keys of the tensors in one checkpoint.

    Attributes:
        folder: of the checkpoint, for messages.
        keys: every key of the checkpoint.
        root: `model.` where the whole head is nested, else empty.
        layer: prefix of the layer.
    """

    folder: Path
    keys: Collection[str]
    root: str
    layer: str

    @classmethod
    def of(cls, checkpoint: Checkpoint, kind: HeadKind) -> HeadKeys:
        """Finds the spelling: most EAGLE-3 heads say `midlayer.`, some `layers.0.`."""
        keys = checkpoint.files.keys()
        root = "model." if any(key.startswith("model.") for key in keys) else ""
        layer = f"{root}layers.0."
        if kind is HeadKind.EAGLE3 and not any(key.startswith(layer) for key in keys):
            layer = f"{root}midlayer."
        return cls(checkpoint.folder, keys, root, layer)

    def has(self, key: str) -> bool:
        """Whether the head holds `key`, named without the root."""
        return f"{self.root}{key}" in self.keys

    @property
    def num_fc_norms(self) -> int:
        """Norms of single feature layers; 0 in heads without them."""
        return sum(key.startswith(f"{self.root}fc_norm.") for key in self.keys)


def head_parts(config: HeadConfig, keys: HeadKeys) -> tuple[WeightPart, ...]:
    """Lists every tensor of the head, in the order in which fused ones are stacked."""
    hidden, root = config.hidden_size, keys.root
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
    """Whether the head scores tokens with a matrix of its own; else it borrows the target's.

    Raises:
        CheckpointError: it must have one, because its vocabulary is smaller, and has none.
    """
    if config.kind is HeadKind.EAGLE:
        return False
    is_smaller = (config.draft_vocab_size or config.vocab_size) < config.vocab_size
    for key in (LM_HEAD_KEY, TOKEN_MAP_KEY):
        if is_smaller and key not in keys.keys:
            raise CheckpointError(
                f"{keys.folder}: {key} is missing; draft_vocab_size {config.draft_vocab_size} is "
                f"smaller than the target's vocab_size {config.vocab_size}, so the head must "
                f"bring it"
            )
    return LM_HEAD_KEY in keys.keys


def ignored_keys(config: HeadConfig) -> tuple[str, ...]:
    """Returns the keys beside the head's weights: maps read apart, and copies of the target's."""
    if config.kind is HeadKind.EAGLE:
        return (LM_HEAD_KEY,)
    return (TOKEN_MAP_KEY, TOKEN_MASK_KEY)


def _fc_parts(config: HeadConfig, keys: HeadKeys) -> Iterator[WeightPart]:
    """Yields `fc` and the norms in front of it."""
    root, hidden, wide = keys.root, config.hidden_size, 2 * config.hidden_size
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
    layer, hidden = keys.layer, (config.hidden_size,)
    norms = {"post_attention_layernorm": "mlp_norm"}
    if config.kind is HeadKind.EAGLE3:
        norms |= {"input_layernorm": "embedding_norm", "hidden_norm": "hidden_norm"}
    for key, name in norms.items():
        yield WeightPart(f"{layer}{key}.weight", hidden, name)
    for key, shape, name in _products(config):
        yield WeightPart(f"{layer}{key}.weight", shape, f"{name}.weight")
        # A bias of one of the fused matrices without the others is reported as missing.
        if any(f"{layer}{other}.bias" in keys.keys for other in _fused_with(config, name)):
            yield WeightPart(f"{layer}{key}.bias", shape[:1], f"{name}.bias")
    for key, repeats in (("q_norm", config.num_heads), ("k_norm", config.num_kv_heads)):
        name = f"{layer}self_attn.{key}.weight"
        if name in keys.keys:
            yield WeightPart(name, (config.head_dim,), "qk_norm", repeats)


def _fused_with(config: HeadConfig, name: str) -> tuple[str, ...]:
    return tuple(key for key, _, fused in _products(config) if fused == name)


def _products(config: HeadConfig) -> tuple[tuple[str, tuple[int, ...], str], ...]:
    """Returns key, shape and fused name of each matrix of the layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    read = 2 * hidden if config.kind is HeadKind.EAGLE3 else hidden
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    return (
        ("self_attn.q_proj", (queries, read), "qkv"),
        ("self_attn.k_proj", (keys, read), "qkv"),
        ("self_attn.v_proj", (keys, read), "qkv"),
        ("self_attn.o_proj", (hidden, queries), "output"),
        ("mlp.gate_proj", (wide, hidden), "gate_up"),
        ("mlp.up_proj", (wide, hidden), "gate_up"),
        ("mlp.down_proj", (hidden, wide), "down"),
    )
