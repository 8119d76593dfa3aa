"""Chains that a draft draws from its own distributions, for a target that verifies by those
distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.draft.draft_scores import DraftScores, Path
from services.draft.sequence import DraftSequence
from shared.speculation.noise import fresh_seeds
from shared.speculation.rejection import DrawnChain
from shared.speculation.row_sampling import uploaded
from shared.speculation.verify import coupled_draw
from shared.tokens import TokenTree, TreeShape


class LevelScores(Protocol):
    """The scores from which the children of a level are chosen."""

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[Path]]) -> Tensor:
        """See `DraftScores`."""

    def finished(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Returns the grown trees with all that their target needs, one for each sequence."""


def level_scores(
    sequences: Sequence[DraftSequence],
    shape: TreeShape,
    device: torch.device,
    generator: torch.Generator,
) -> LevelScores:
    """Returns how the trees of a batch grow.

    Args:
        sequences: either all or none of them `draws_chains`.
        shape: of the trees; those that are no chains are never drawn, and verified otherwise.
        generator: of the host; see `ChainDraws`.
    """
    if sequences[0].draws_chains and shape.topk == 1:
        return ChainDraws(sequences, device, generator)
    return DraftScores(sequences, device)


class ChainDraws:
    """Draws one chain for each of S sequences, and keeps the distributions.

    The distribution of a row is the draft's own after the request's penalties, bias, temperature
    and truncation, over the tokens of the target: tokens it does not know cannot be drawn, so that
    none has to be taken out afterwards.

    Args:
        generator: of the host; the source of randomness that is used once. A draw that shared it
            with an earlier round would depend on what became of that round.
    """

    def __init__(
        self,
        sequences: Sequence[DraftSequence],
        device: torch.device,
        generator: torch.Generator,
    ) -> None:
        self._distribution = DraftScores(sequences, device)
        self._generator = generator
        self._levels: list[Tensor] = []
        [self._vocab_size] = {sequence.vocab_size for sequence in sequences}

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[Path]]) -> Tensor:
        """Returns scores `[S, 1, V]` of the target's V tokens: 0 for the drawn one, else -inf.

        Arguments are those of `DraftScores`, with one row a sequence.
        """
        log_probs = self._distribution(_over_tokens(logits, self._vocab_size), paths)
        assert log_probs.shape[1] == 1, "only chains are drawn"
        level = log_probs.squeeze(1)
        seeds = uploaded(fresh_seeds(len(level), self._generator), level.device)
        drawn = coupled_draw(level, seeds, torch.zeros_like(seeds))
        self._levels.append(level)
        return torch.full_like(log_probs, -math.inf).scatter_(-1, drawn[:, None, None], 0.0)

    def finished(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Returns the chains with their distributions, which are all that is said of their
        tokens."""
        distributions = torch.stack(self._levels, dim=1)
        return [
            DrawnChain.of(tree.token_ids, own[: len(tree)])
            for tree, own in zip(trees, distributions, strict=True)
        ]


def _over_tokens(logits: Tensor, vocab_size: int) -> Tensor:
    """Returns `[R, vocab_size]` logits; -inf for tokens that the draft does not have."""
    num_missing = vocab_size - logits.shape[1]
    if num_missing <= 0:
        return logits[:, :vocab_size]
    return functional.pad(logits, (0, num_missing), value=-math.inf)
