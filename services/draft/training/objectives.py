"""What a head is trained for: the loss of a batch, and how many of its drafts would be accepted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.draft.training.block_head import BlockHead
from services.draft.training.frozen_target import FrozenTarget, TargetRows
from services.draft.training.recurrent_head import RecurrentHead, Unrolling

H = TypeVar("H", RecurrentHead, BlockHead)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """Weights of the parts of a loss.

    Attributes:
        hard: of the cross-entropy to the target's best token, which is all that greedy
            acceptance asks for.
        regression: of the smooth L1 distance between a state and the hidden state it stands for.
        noise: half the width of the uniform noise on features, relative to their mean size.
        decay: of each later token of a draft, since it counts only if all before it do.
    """

    hard: float = 0.1
    regression: float = 0.0
    noise: float = 0.0
    decay: float = 0.8


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Loss of a batch and, for each drafted position k, its share of it.

    Attributes:
        losses: `[K]`, detached.
        agreements: `[K]`, how often draft and target prefer the same token, given the right ones
            before it.
        accepted_length: tokens a round would give under greedy verification, bonus included.
    """

    loss: Tensor
    losses: Tensor
    agreements: Tensor
    accepted_length: Tensor


class TokenLoss:
    """Compares scores with the target's distribution, position by position."""

    def __init__(self, terms: LossTerms) -> None:
        self._terms = terms
        self._losses: list[Tensor] = []
        self._matches: list[Tensor] = []

    def add(self, logits: Tensor, aim: Tensor, best: Tensor, draft_best: Tensor) -> None:
        """Counts the next position of the drafts.

        Args:
            logits: `[..., Vd]` of the head.
            aim: `[..., Vd]`, the target's logits of the same tokens.
            best, draft_best: `[...]`, the preferred token of each, as the target's ids.
        """
        flat, wanted = logits.float().flatten(0, -2), aim.float().flatten(0, -2)
        probs = wanted.softmax(-1)
        entropy = -(probs * wanted.log_softmax(-1)).sum(-1).mean()
        loss = F.cross_entropy(flat, probs) - entropy
        if self._terms.hard:
            loss = loss + self._terms.hard * F.cross_entropy(flat, wanted.argmax(-1))
        self._losses.append(loss)
        self._matches.append(best == draft_best)

    def outcome(self, extra: Tensor) -> Outcome:
        """Weighs the positions; `extra` is added to the loss."""
        losses, matches = torch.stack(self._losses), torch.stack(self._matches).float()
        weights = self._terms.decay ** torch.arange(len(losses), device=losses.device)
        return Outcome(
            loss=(losses * weights).sum() / weights.sum() + extra,
            losses=losses.detach(),
            agreements=matches.flatten(1).mean(1),
            accepted_length=1.0 + matches.cumprod(0).sum(0).mean(),
        )


class Objective(nn.Module, ABC, Generic[H]):
    """A head together with the loss of a batch of the target's rows.

    The target stands in a tuple, so that its weights are none of this module's.
    """

    head: H

    def __init__(self, head: H, target: FrozenTarget, terms: LossTerms) -> None:
        super().__init__()
        self.head = head
        self._target, self._terms = (target,), terms

    @abstractmethod
    def forward(self, rows: TargetRows) -> Outcome:
        """Returns the loss of a batch."""


class RecurrentObjective(Objective[RecurrentHead]):
    """The training-time test: the head continues its own states for several tokens.

    With one step it is EAGLE's own training. Source of more: Li et al., arXiv 2503.01840, section
    3.2; for heads of the EAGLE-2 form Zhang et al., arXiv 2408.15766.
    """

    def __init__(
        self, head: RecurrentHead, target: FrozenTarget, terms: LossTerms, *, num_steps: int
    ) -> None:
        super().__init__(head, target, terms)
        self._num_steps = num_steps

    def forward(self, rows: TargetRows) -> Outcome:
        (target,), head = self._target, self.head
        num_rows = rows.token_ids.shape[1] - self._num_steps
        hidden = head.fuse(self._noisy(rows.features[:, :num_rows]))
        unrolling, tokens = Unrolling(head.shape), TokenLoss(self._terms)
        distance = hidden.new_zeros(())
        for step in range(self._num_steps):
            ahead = slice(step + 1, step + 1 + num_rows)
            embedded = F.embedding(rows.token_ids[:, ahead], target.embedding)
            hidden = head.advance(embedded, hidden, unrolling)
            logits, aim = head.scores(hidden, target.lm_head), target.logits(rows.states[:, ahead])
            drafted = head.target_ids(logits.argmax(-1))
            tokens.add(logits, head.select(aim), aim.argmax(-1), drafted)
            if self._terms.regression:
                distance = distance + F.smooth_l1_loss(
                    hidden.float(), rows.states[:, ahead].float()
                )
        return tokens.outcome(self._terms.regression * distance / self._num_steps)

    def _noisy(self, features: Tensor) -> Tensor:
        features = features.float()
        if not self._terms.noise:
            return features
        size = self._terms.noise * features.abs().mean()
        return features + size * (2 * torch.rand_like(features) - 1)


class BlockObjective(Objective[BlockHead]):
    """Blocks at random anchors of each window, all of their positions at once.

    Source: Chen et al., arXiv 2602.06036, section 3.
    """

    def __init__(
        self, head: BlockHead, target: FrozenTarget, terms: LossTerms, *, num_anchors: int
    ) -> None:
        super().__init__(head, target, terms)
        self._num_anchors = num_anchors

    def forward(self, rows: TargetRows) -> Outcome:
        (target,), size = self._target, self.head.shape.block_size
        batch, length = rows.token_ids.shape
        anchors = torch.randint(
            1, length - size + 2, (batch, self._num_anchors), device=rows.token_ids.device
        )
        states = self.head(target.embedding, rows.token_ids, rows.features.float(), anchors)
        tokens = TokenLoss(self._terms)
        for index in range(size - 1):
            logits = F.linear(states[:, :, index], target.lm_head)
            scored = (anchors + index).unsqueeze(-1).expand(-1, -1, rows.states.shape[-1])
            aim = target.logits(rows.states.gather(1, scored))
            tokens.add(logits, aim, aim.argmax(-1), logits.argmax(-1))
        return tokens.outcome(states.new_zeros(()))
