"""Heads that draft a token at a time: EAGLE, EAGLE-3 and MTP.

Row p reads the embedding of token p + 1 and the hidden state of position p; its state scores token
p + 2 and is what the next row reads in place of the target's hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.head_shape import Algorithm, HeadShape
from services.draft.training.modules import (
    KeysValues,
    Mlp,
    Projections,
    RmsNorm,
    begin_as_identity,
    linear,
    rotation_at,
    unrolled,
)

Attention = Callable[[Tensor, list[KeysValues]], Tensor]


class Unrolling:
    """Keys and values of the steps taken so far; each step stands one position further right.

    Args:
        attention: `unrolled`, or a compiled form of it.
    """

    def __init__(self, shape: HeadShape, attention: Attention = unrolled) -> None:
        self._shape, self._attention = shape, attention
        self._steps: list[KeysValues] = []

    def without_first(self, embedded: Tensor) -> Tensor:
        """Returns `embedded` `[B, R, H]` with zeros at position 0, where MiMo sees no token."""
        if self._steps:
            return embedded
        return torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)

    def attend(self, attention: Projections, rows: Tensor) -> Tensor:
        """`[B, R, W]` of the next step to `[B, R, H]`; counts as a step."""
        shape = self._shape
        positions = torch.arange(rows.shape[1], device=rows.device) + len(self._steps)
        rotation = rotation_at(positions, head_dim=shape.head_dim, theta=shape.rope_theta)
        self._steps.append(attention.keys_values(rows, rotation))
        return attention.output(self._attention(attention.queries(rows, rotation), self._steps))


class RecurrentHead(nn.Module, ABC):
    """One layer that continues the target's hidden states.

    Attributes:
        prefix: in front of the names of the parameters in the checkpoint.
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
            embedded: `[B, R, H]`, of the tokens behind the rows' positions.
            hidden: `[B, R, H]`, fused features at step 0, later the states of the step before.
        """

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        """Returns logits `[B, R, Vd]`; `lm_head` `[V, H]` is the target's."""
        return F.linear(states, lm_head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Returns the target's ids of draft ids."""
        return draft_ids

    def select(self, lm_head: Tensor) -> Tensor:
        """Returns the rows `[Vd, H]` of the target's `lm_head` `[V, H]` that the head has."""
        return lm_head


class EagleHead(RecurrentHead):
    """EAGLE-2's: no norm in front of the attention, none at the end, the target's lm_head.

    Source: Li et al., arXiv 2401.15077, section 4.1.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.fc = linear(2 * shape.hidden_size, shape.hidden_size)
        begin_as_identity(self.fc, shape.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(shape)])

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        mixed = self.fc(torch.cat((embedded.to(hidden.dtype), hidden), dim=-1))
        state: Tensor = self.layers[0](mixed, unrolling)
        return state


class EagleLayer(nn.Module):
    """A block without `input_layernorm`."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.self_attn = Projections(shape, shape.hidden_size)
        self.mlp = Mlp(shape)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, mixed: Tensor, unrolling: Unrolling) -> Tensor:
        mixed = mixed + unrolling.attend(self.self_attn, mixed)
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return out


class Eagle3Head(RecurrentHead):
    """EAGLE-3's with the whole vocabulary: several layers of the target fused, a norm of its own
    in front of the target's lm_head.

    Source: Li et al., arXiv 2503.01840, section 3.1.
    """

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        hidden = shape.hidden_size
        self.fc = linear(shape.feature_width, hidden)
        begin_as_identity(self.fc, hidden)
        self.midlayer = Eagle3Layer(shape)
        self.norm = RmsNorm(hidden, shape.rms_norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        fused: Tensor = self.fc(features)
        return fused

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        state: Tensor = self.midlayer(embedded, hidden, unrolling)
        return state

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        return F.linear(self.norm(states), lm_head)


class Eagle3CutHead(Eagle3Head):
    """EAGLE-3's with a vocabulary and an lm_head of its own.

    Args:
        token_ids: `[Vd]` int64, ascending, the target's id of each draft id.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: HeadShape, token_ids: Tensor) -> None:
        super().__init__(shape)
        self.lm_head = linear(shape.hidden_size, len(token_ids))
        known = torch.zeros(shape.vocab_size, dtype=torch.bool)
        known[token_ids] = True
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        self.register_buffer("t2d", known)

    def scores(self, states: Tensor, lm_head: Tensor) -> Tensor:
        del lm_head  # it has its own
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.d2t[draft_ids]

    def select(self, lm_head: Tensor) -> Tensor:
        return lm_head[self.target_ids(torch.arange(len(self.d2t), device=self.d2t.device))]


class Eagle3Layer(nn.Module):
    """A block whose attention reads embedding and hidden state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn = Projections(shape, 2 * hidden)
        self.mlp = Mlp(shape)
        self.hidden_norm = RmsNorm(hidden, eps)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.post_attention_layernorm = RmsNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        parts = self.input_layernorm(embedded.to(hidden.dtype)), self.hidden_norm(hidden)
        mixed = hidden + unrolling.attend(self.self_attn, torch.cat(parts, dim=-1))
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        return out


class MtpHead(RecurrentHead):
    """A next-token layer in MiMo's form: `cat(hidden, embedding)`, each behind its norm; the state
    that is fed back has passed the final norm, as the target's has.

    Source: Xiaomi, MiMo, arXiv 2505.07608, section 2.3; DeepSeek-AI, arXiv 2412.19437, section 2.2.
    """

    prefix = "model."

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape)
        self.mtp_layers = nn.ModuleList([MtpLayer(shape)])

    @property
    def final_norm(self) -> RmsNorm:
        """The norm in front of the lm_head."""
        layer = self.mtp_layers[0]
        assert isinstance(layer, MtpLayer)
        return layer.final_layernorm

    def advance(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        state: Tensor = self.mtp_layers[0](embedded, hidden, unrolling)
        return state


class MtpLayer(nn.Module):
    """A Qwen2 block between the two input norms and the final one."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.token_layernorm = RmsNorm(hidden, eps)
        self.hidden_layernorm = RmsNorm(hidden, eps)
        self.input_proj = linear(2 * hidden, hidden)
        with torch.no_grad():
            self.input_proj.weight[:, :hidden] += torch.eye(hidden)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = Projections(shape, hidden, has_bias=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = Mlp(shape)
        self.final_layernorm = RmsNorm(hidden, eps)

    def forward(self, embedded: Tensor, hidden: Tensor, unrolling: Unrolling) -> Tensor:
        embedded = unrolling.without_first(embedded)
        parts = self.hidden_layernorm(hidden), self.token_layernorm(embedded.to(hidden.dtype))
        mixed = self.input_proj(torch.cat(parts, dim=-1))
        mixed = mixed + unrolling.attend(self.self_attn, self.input_layernorm(mixed))
        out: Tensor = mixed + self.mlp(self.post_attention_layernorm(mixed))
        normed: Tensor = self.final_layernorm(out)
        return normed


def build_recurrent(shape: HeadShape, token_ids: Sequence[int] | None = None) -> RecurrentHead:
    """Returns a freshly initialised head.

    Args:
        token_ids: EAGLE3, the target's id of each draft id; None leaves it the target's lm_head.
    """
    match shape.algorithm:
        case Algorithm.EAGLE:
            return EagleHead(shape)
        case Algorithm.MTP:
            return MtpHead(shape)
        case Algorithm.EAGLE3:
            if token_ids is None:
                return Eagle3Head(shape)
            return Eagle3CutHead(shape, torch.tensor(sorted(token_ids)))
        case Algorithm.DFLASH:
            raise AssertionError("DFLASH drafts blocks")


class TargetEnds(Protocol):
    """Embedding and lm_head of a target, `[V, H]` each."""

    @property
    def embedding(self) -> Tensor: ...
    @property
    def lm_head(self) -> Tensor: ...


def recurrent_chains(
    head: RecurrentHead, target: TargetEnds, known: Tensor, hidden: Tensor, num_steps: int
) -> Tensor:
    """Returns `[B, R, K]` int64, the greedy draft behind each of the tokens `known`.

    Args:
        known: `[B, R]` int64, the tokens behind the rows' positions.
        hidden: `[B, R, H]`, fused features.
    """
    # Where products cast, they take the lm_head as it is: a float copy is gigabytes of an 8B.
    casts = torch.is_autocast_enabled(hidden.device.type)
    lm_head = target.lm_head if casts else target.lm_head.float()
    tokens = known
    unrolling, drafted = Unrolling(head.shape), []
    for _ in range(num_steps):
        embedded = F.embedding(tokens, target.embedding).float()
        hidden = head.advance(embedded, hidden, unrolling)
        tokens = head.target_ids(head.scores(hidden, lm_head).argmax(-1))
        drafted.append(tokens)
    return torch.stack(drafted, dim=-1)
