"""The heads of all algorithms as modules, and how they are built, saved and loaded. Recurrent heads
(EAGLE, EAGLE-3, MTP) draft one token at a time, block heads (DFlash) a block.

Row p of a recurrent head reads the embedding of token p + 1 and the hidden state of position p. Its
state scores token p + 2, and replaces the target's hidden state in the next step.

Source of block heads: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm, HeadShape, head_config
from services.draft.training.modules import (
    KeysValues,
    Mlp,
    Projections,
    RmsNorm,
    block,
    init_as_identity,
    linear,
    rotation_at,
    unrolled,
)
from shared.errors import CheckpointError
from shared.models.checkpoint import Checkpoint

Attention = Callable[[Tensor, list[KeysValues]], Tensor]


class Unrolling:
    """Keys and values of the steps so far; the rows of each step are one position further right.

    Args:
        attention: `unrolled`, or a compiled form of it.
    """

    def __init__(self, shape: HeadShape, attention: Attention = unrolled) -> None:
        self._shape, self._attention = shape, attention
        self._steps: list[KeysValues] = []

    def without_first(self, embedded: Tensor) -> Tensor:
        """Returns `embedded` `[B, R, H]` with zeros at position 0, where MiMo reads no token."""
        if self._steps:
            return embedded
        return torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)

    def attend(self, attention: Projections, rows: Tensor) -> Tensor:
        """Attention of the rows `[B, R, W]` of the next step; returns `[B, R, H]`."""
        shape = self._shape
        positions = torch.arange(rows.shape[1], device=rows.device) + len(self._steps)
        rotation = rotation_at(positions, head_dim=shape.head_dim, theta=shape.rope_theta)
        self._steps.append(attention.keys_values(rows, rotation))
        return attention.output(self._attention(attention.queries(rows, rotation), self._steps))


class RecurrentHead(nn.Module, ABC):
    """A head of one layer, which continues the target's hidden states.

    Attributes:
        prefix: of the parameters' names in the checkpoint.
    """

    prefix = ""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape

    def fuse(self, features: Tensor) -> Tensor:
        """Returns hidden states `[B, R, H]` of feature rows `[B, R, W]`."""
        return features

    @abstractmethod
    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        """Returns the states `[B, R, H]` of the next step.

        Args:
            embedded: `[B, R, H]`, embeddings of the tokens after the rows' positions.
            hidden: `[B, R, H]`, fused features at step 0, later the states of the previous step.
        """

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        """Returns logits `[B, R, Vd]`; `lm_head` `[V, H]` is the target's."""
        return F.linear(states, lm_head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids

    def select(self, lm_head: Tensor) -> Tensor:
        """Returns the rows `[Vd, H]` of the target's `lm_head` `[V, H]` for the draft ids."""
        return lm_head


class EagleHead(RecurrentHead):
    """EAGLE-2's head: no norm before the attention or at the end, and the target's lm_head.

    Source: Li et al., arXiv 2401.15077, section 4.1.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = linear(2 * shape.hidden_size, shape.hidden_size)
        init_as_identity(self.fc, shape.hidden_size)
        self.layers = nn.ModuleList([Layer(shape, shape.hidden_size)])

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        mixed = self.fc(torch.cat((embedded.to(hidden.dtype), hidden), dim=-1))
        return cast("Tensor", self.layers[0](mixed, mixed, unrolling))


class Layer(nn.Module):
    """An attention and a feed-forward, each added to the residual stream.

    Args:
        width: of the rows that the attention reads.
    """

    def __init__(self, shape: HeadShape, width: int, **options: bool) -> None:
        super().__init__()
        self.self_attn = Projections(shape, width, **options)
        self.mlp = Mlp(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, stream: Tensor, rows: Tensor, unrolling: Unrolling) -> Tensor:
        """Returns the stream `[B, R, H]` after the layer, whose attention reads `rows`."""
        return self.add_mlp(stream + unrolling.attend(self.self_attn, rows))

    def add_mlp(self, stream: Tensor) -> Tensor:
        return stream + cast("Tensor", self.mlp(self.post_attention_layernorm(stream)))


class Eagle3Head(RecurrentHead):
    """EAGLE-3's head with the whole vocabulary: it fuses several layers of the target, and has its
    own norm before the target's lm_head.

    Source: Li et al., arXiv 2503.01840, section 3.1.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        hidden = shape.hidden_size
        self.fc = linear(shape.feature_width, hidden)
        init_as_identity(self.fc, hidden)
        self.midlayer = Eagle3Layer(shape, 2 * hidden)
        self.norm = RmsNorm(hidden, shape.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        return cast("Tensor", self.fc(features))

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        return cast("Tensor", self.midlayer(embedded, hidden, unrolling))

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        return F.linear(self.norm(states), lm_head)


class Eagle3SmallVocabHead(Eagle3Head):
    """EAGLE-3's head with a reduced vocabulary and its own lm_head.

    Args:
        token_ids: `[Vd]` int64, ascending, the target's id of each draft id.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape, token_ids: Tensor) -> None:
        super().__init__(shape)
        self.lm_head = linear(shape.hidden_size, len(token_ids))
        is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool)
        is_drafted[token_ids] = True
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        self.register_buffer("t2d", is_drafted)

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        del lm_head  # the head has its own
        return cast("Tensor", self.lm_head(self.norm(states)))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def select(self, lm_head: Tensor) -> Tensor:
        return lm_head[self.target_ids(torch.arange(len(self.d2t), device=self.d2t.device))]


class Eagle3Layer(Layer):
    """A layer whose attention reads embedding and hidden state, concatenated."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__(shape, width)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        parts = self.input_layernorm(embedded.to(hidden.dtype)), self.hidden_norm(hidden)
        return super().forward(hidden, torch.cat(parts, dim=-1), unrolling)


class MtpHead(RecurrentHead):
    """A next-token layer in MiMo's form: it reads `cat(hidden, embedding)`, both normed, and its
    state has passed the final norm, as the target's hidden state has.

    Source: Xiaomi, MiMo, arXiv 2505.07608, section 2.3; DeepSeek-AI, arXiv 2412.19437, section 2.2.
    """

    prefix = "model."

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.mtp_layers = nn.ModuleList([MtpLayer(shape)])

    @property
    def final_norm(self) -> RmsNorm:
        """The norm before the lm_head."""
        return cast("MtpLayer", self.mtp_layers[0]).final_layernorm

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        return cast("Tensor", self.mtp_layers[0](embedded, hidden, unrolling))


class MtpLayer(Layer):
    """A Qwen2 layer between two input norms and a final norm."""

    def __init__(self, shape: HeadShape) -> None:
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        super().__init__(shape, hidden, has_bias=True)
        self.token_layernorm = RmsNorm(hidden, eps)
        self.hidden_layernorm = RmsNorm(hidden, eps)
        self.input_proj = linear(2 * hidden, hidden)
        with torch.no_grad():
            self.input_proj.weight[:, :hidden] += torch.eye(hidden)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.final_layernorm = RmsNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        embedded = unrolling.without_first(embedded)
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embedded.to(hidden.dtype))
        mixed = self.input_proj(torch.cat(parts, dim=-1))
        out = super().forward(mixed, self.input_layernorm(mixed), unrolling)
        return cast("Tensor", self.final_layernorm(out))


class TargetTables(Protocol):
    """Embedding and lm_head of a target, `[V, H]` each."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def lm_head(self) -> Tensor: ...


def recurrent_chains(
    head: RecurrentHead, target: TargetTables, last_tokens: Tensor, hidden: Tensor, num_steps: int
) -> Tensor:
    """Returns `[B, R, K]` int64, the greedy draft after each of the last tokens.

    Args:
        last_tokens: `[B, R]` int64, the tokens after the rows' positions.
        hidden: `[B, R, H]`, fused features.
    """
    # Under autocast the lm_head stays as it is: a float32 copy of an 8B's takes gigabytes.
    casts = torch.is_autocast_enabled(hidden.device.type)
    lm_head = target.lm_head if casts else target.lm_head.float()
    tokens = last_tokens
    unrolling, drafted = Unrolling(head.shape), []
    for _ in range(num_steps):
        embedded = F.embedding(tokens, target.embedding).float()
        hidden = head.advance(embedded, hidden, unrolling)
        tokens = head.target_ids(head.scores(hidden, lm_head).argmax(-1))
        drafted.append(tokens)
    return torch.stack(drafted, dim=-1)


class BlockHead(nn.Module):
    """DFlash's head: layers over the rows of a block, which attend to keys and values computed from
    the target's features of earlier positions.

    Attributes:
        prefix: of the parameters' names in the checkpoint.
    """

    prefix = ""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(shape.feature_width, shape.hidden_size)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(shape) for _ in range(shape.num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(
        self, embedding: Tensor, token_ids: Tensor, features: Tensor, anchors: Tensor
    ) -> Tensor:
        """Returns the states `[B, A, block_size - 1, H]` that score the drafted positions.

        Args:
            embedding: `[V, H]`, the target's.
            token_ids: `[B, N]` int64.
            features: `[B, N, W]`.
            anchors: `[B, A]` int64, positions of the known token at the beginning of each block.
        """
        size = self.shape.block_size
        context = self.hidden_norm(self.fc(features))
        blocks = self._masked_blocks(token_ids.gather(1, anchors))
        rows = F.embedding(blocks, embedding).to(context.dtype).flatten(1, 2)
        inner = torch.arange(size, device=anchors.device)
        positions = (anchors.unsqueeze(-1) + inner).flatten(1)
        past = torch.arange(token_ids.shape[1], device=anchors.device)
        rotations = self._rotation(past), self._rotation(positions.unsqueeze(1))
        for layer in self.layers:
            rows = layer(rows, context, rotations, anchors)
        states: Tensor = torch.unflatten(self.norm(rows), 1, (-1, size))
        return states[:, :, 1:]

    def _masked_blocks(self, first_tokens: Tensor) -> Tensor:
        """Returns blocks `[B, A, block_size]`: the first tokens `[B, A]`, then mask tokens."""
        size = (*first_tokens.shape, self.shape.block_size - 1)
        masks = first_tokens.new_full(size, self.shape.mask_token_id)
        return torch.cat((first_tokens.unsqueeze(-1), masks), dim=-1)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        return rotation_at(positions, head_dim=shape.head_dim, theta=shape.rope_theta)


class BlockLayer(Layer):
    """A Qwen3 layer that also attends to the context's keys and values."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, shape.hidden_size, has_norms=True)
        self.block_size = shape.block_size
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(  # type: ignore[override]
        self,
        rows: Tensor,
        context: Tensor,
        rotations: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]],
        anchors: Tensor,
    ) -> Tensor:
        attention, (past, own) = self.self_attn, rotations
        normed = self.input_layernorm(rows)
        mixed = block(
            attention.queries(normed, own),
            attention.keys_values(context, past),
            attention.keys_values(normed, own),
            anchors,
            self.block_size,
        )
        return self.add_mlp(rows + attention.output(mixed))


SHAPE_FILE = "training_shape.json"
WEIGHTS_FILE = "model.safetensors"

Head = RecurrentHead | BlockHead


def build_head(shape: HeadShape, token_ids: Sequence[int] | None = None) -> Head:
    """Returns a freshly initialised head.

    Args:
        token_ids: EAGLE3, the target's id of each draft id; None takes the target's lm_head.
    """
    match shape.algorithm:
        case Algorithm.EAGLE:
            return EagleHead(shape)
        case Algorithm.MTP:
            return MtpHead(shape)
        case Algorithm.EAGLE3:
            if token_ids is None:
                return Eagle3Head(shape)
            return Eagle3SmallVocabHead(shape, torch.tensor(sorted(token_ids)))
        case Algorithm.DFLASH:
            return BlockHead(shape)


def init_from_target(head: Head, target: FrozenTarget) -> None:
    """Copies the target's weights into the last norm of a head, and into an lm_head of its own."""
    with torch.no_grad():
        match head:
            case Eagle3Head():
                head.norm.weight.copy_(target.final_norm)
            case MtpHead():
                head.final_norm.weight.copy_(target.final_norm)
            case BlockHead():
                head.norm.weight.copy_(target.final_norm)
        if isinstance(head, Eagle3SmallVocabHead):
            head.lm_head.weight.copy_(head.select(target.lm_head.to(head.d2t.device)))


def save_head(head: Head, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors` in the format of published heads."""
    folder.mkdir(parents=True, exist_ok=True)
    save_weights(head, head.state_dict(), folder, dtype)
    config = head_config(head.shape) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / SHAPE_FILE).write_text(json.dumps(head.shape.as_json(), indent=2) + "\n")


def save_weights(
    head: Head,
    weights: Mapping[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    kept: Collection[str] = (),
) -> None:
    """Writes `model.safetensors`.

    Args:
        weights: by the names of the head's parameters and buffers.
        kept: names of weights that keep every bit.
    """
    tensors = {}
    for key, value in weights.items():
        plain = value.detach().cpu().contiguous()
        if plain.is_floating_point():
            tensors[f"{head.prefix}{key}"] = plain if key in kept else plain.to(dtype)
        else:
            tensors[key] = plain
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def load_head(folder: Path) -> Head:
    """Reads a head that `save_head` wrote, in float32 on the CPU.

    Raises:
        CheckpointError: a file is missing, or does not fit the shape.
    """
    try:
        shape = HeadShape.from_json(json.loads((folder / SHAPE_FILE).read_text()))
        checkpoint = Checkpoint.open(folder)
        tensors = {key: checkpoint.read(key) for key in checkpoint.files}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} holds no trained head: {error}") from error
    offsets = tensors.get("d2t")
    token_ids = None if offsets is None else (offsets + torch.arange(len(offsets))).tolist()
    head = build_head(shape, token_ids)
    named = {key.removeprefix(head.prefix): tensor for key, tensor in tensors.items()}
    try:
        head.load_state_dict(named)
    except RuntimeError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {error}") from error
    return head.eval()
