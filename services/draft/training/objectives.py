"""Training objectives: the loss of a batch, and its accepted length."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.frozen_target import FrozenTarget, TargetRows
from services.draft.training.heads import BlockHead, RecurrentHead, Unrolling
from services.draft.training.modules import fused_unrolled, unrolled

H = TypeVar("H", RecurrentHead, BlockHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Weights of the terms of a loss.

    Attributes:
        hard: weight of the cross-entropy to the target's best token, which alone decides greedy
            acceptance.
        regression: weight of the smooth L1 distance between a state and the target's hidden state.
        noise: half the width of uniform noise on features, relative to their mean absolute value.
        decay: factor of the weight of each further token, which counts only if all tokens before it
            are accepted.
    """

    hard: float = 0.1
    regression: float = 0.0
    noise: float = 0.0
    decay: float = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Loss of a batch, and figures of each drafted position k.

    Attributes:
        losses: `[K]`, detached.
        agreements: `[K]`, how often draft and target have the same best token, after the right
            tokens.
        accepted_length: tokens per round under greedy verification, bonus token included.
    """

    loss: Tensor
    losses: Tensor
    agreements: Tensor
    accepted_length: Tensor


def divergence(logits: Tensor, target_logits: Tensor, hard: float) -> Tensor:
    """Returns the mean KL(target || draft), plus `hard` times the cross-entropy to the target's
    best token.

    Args:
        logits, target_logits: `[R, Vd]`, the head's and the target's scores of the same tokens.
    """
    log_probs = logits.float().log_softmax(-1)
    target_log_probs = target_logits.float().log_softmax(-1)
    soft = (target_log_probs.exp() * (target_log_probs - log_probs)).sum(-1)
    best = target_log_probs.argmax(-1, keepdim=True)
    return (soft - hard * log_probs.gather(-1, best).squeeze(-1)).mean()


def outcome_of(
    losses: Sequence[Tensor], matches: Sequence[Tensor], *, decay: float, extra: Tensor
) -> Outcome:
    """Returns the weighted loss of all drafted positions, plus `extra`, and the figures.

    Args:
        matches: `[...]` each, whether draft and target have the same best token.
        decay: see `LossTerms`.
    """
    loss, is_same = torch.stack(list(losses)), torch.stack(list(matches)).float()
    weights = decay ** torch.arange(len(loss), device=loss.device)
    return Outcome(
        loss=(loss * weights).sum() / weights.sum() + extra,
        losses=loss.detach(),
        agreements=is_same.flatten(1).mean(1),
        accepted_length=1.0 + is_same.cumprod(0).sum(0).mean(),
    )


class Objective(nn.Module, ABC, Generic[H]):
    """A head with the loss of a batch of the target's rows.

    The target is in a tuple, so that its weights do not become parameters of this module.

    Args:
        is_compiled: compile the passes over scores, which take most of the time.
    """

    head: H

    def __init__(
        self, head: H, target: FrozenTarget, terms: LossTerms, *, is_compiled: bool
    ) -> None:
        super().__init__()
        self.head = head
        self._target, self._terms = (target,), terms
        self._divergence = torch.compile(divergence) if is_compiled else divergence

    @abstractmethod
    def forward(self, rows: TargetRows) -> Outcome:
        """Returns the loss of a batch."""


class RecurrentObjective(Objective[RecurrentHead]):
    """The training-time test: the head continues from its own states for several tokens.

    With one step it is EAGLE's original training. Source for several steps: Li et al., arXiv
    2503.01840, section 3.2; for heads of the EAGLE-2 form Zhang et al., arXiv 2408.15766.
    """

    def __init__(
        self,
        head: RecurrentHead,
        target: FrozenTarget,
        terms: LossTerms,
        *,
        num_steps: int,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(head, target, terms, is_compiled=is_compiled)
        self._num_steps = num_steps
        self._attention = fused_unrolled(num_steps) if is_compiled else unrolled

    def forward(self, rows: TargetRows) -> Outcome:
        (target,), head = self._target, self.head
        num_rows = rows.token_ids.shape[1] - self._num_steps
        hidden = head.fuse(self._noisy(rows.features[:, :num_rows]))
        unrolling = Unrolling(head.shape, self._attention)
        losses, matches = list[Tensor](), list[Tensor]()
        target_scores, best = self._target_scores(rows.states)
        distance = hidden.new_zeros(())
        for step in range(self._num_steps):
            ahead = slice(step + 1, step + 1 + num_rows)
            embedded = F.embedding(rows.token_ids[:, ahead], target.embedding)
            hidden = head.advance(embedded, hidden, unrolling)
            logits = head.scores(hidden, target.lm_head)
            target_logits = target_scores[:, ahead].flatten(0, 1)
            losses.append(self._divergence(logits.flatten(0, 1), target_logits, self._terms.hard))
            matches.append(head.target_ids(logits.argmax(-1)) == best[:, ahead])
            if self._terms.regression:
                distance = distance + F.smooth_l1_loss(
                    hidden.float(), rows.states[:, ahead].float()
                )
        extra = self._terms.regression * distance / self._num_steps
        return outcome_of(losses, matches, decay=self._terms.decay, extra=extra)

    def _target_scores(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the target's scores `[B, N, Vd]` of the head's tokens, and its best tokens
        `[B, N]`, for states `[B, N, H]`."""
        logits = self._target[0].logits(states)
        best = logits.argmax(-1)
        chosen = self.head.select(self._target[0].lm_head)
        is_whole = chosen is self._target[0].lm_head
        return (logits if is_whole else F.linear(states, chosen)), best

    def _noisy(self, features: Tensor) -> Tensor:
        features = features.float()
        if not self._terms.noise:
            return features
        size = self._terms.noise * features.abs().mean()
        return features + size * (2 * torch.rand_like(features) - 1)


class BlockObjective(Objective[BlockHead]):
    """Drafts blocks at random anchors of each window, all positions of a block at once.

    Source: Chen et al., arXiv 2602.06036, section 3.
    """

    def __init__(
        self,
        head: BlockHead,
        target: FrozenTarget,
        terms: LossTerms,
        *,
        num_anchors: int,
        is_compiled: bool = False,
    ) -> None:
        super().__init__(head, target, terms, is_compiled=is_compiled)
        self._num_anchors = num_anchors

    def forward(self, rows: TargetRows) -> Outcome:
        (target,), size = self._target, self.head.shape.block_size
        batch, length = rows.token_ids.shape
        anchors = torch.randint(
            1, length - size + 2, (batch, self._num_anchors), device=rows.token_ids.device
        )
        states = self.head(target.embedding, rows.token_ids, rows.features.float(), anchors)
        losses, matches = list[Tensor](), list[Tensor]()
        for index in range(size - 1):
            logits = F.linear(states[:, :, index], target.lm_head)
            scored = (anchors + index).unsqueeze(-1).expand(-1, -1, rows.states.shape[-1])
            target_logits = target.logits(rows.states.gather(1, scored))
            pair = logits.flatten(0, 1), target_logits.flatten(0, 1)
            losses.append(self._divergence(*pair, self._terms.hard))
            matches.append(logits.argmax(-1) == target_logits.argmax(-1))
        return outcome_of(losses, matches, decay=self._terms.decay, extra=states.new_zeros(()))
