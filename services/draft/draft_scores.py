"""Distributions of a draft: how likely the target accepts a token, and chains that are drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.draft.sequence import DraftSequence
from shared.kv.upload import uploaded_numbers
from shared.speculation.distributions import coupled_confidence, point_mass_confidence
from shared.speculation.noise import fresh_seeds, gumbel_noise
from shared.speculation.rejection import DrawnChain
from shared.speculation.row_sampling import (
    RowSampling,
    TokenCounts,
    count_committed,
    row_sampling,
    uploaded_tensor,
)
from shared.speculation.verify import coupled_draw
from shared.tokens import TokenTree, TreeShape

Path = tuple[int, ...]


class DraftScores:
    """Scores the rows of S sequences while their trees grow, N rows of each at a time. See
    `RequestScores`.

    The draft mirrors each sequence's sampling transform and, where its target draws with noise
    keyed by (seed, position, token), that noise.
    """

    def __init__(self, sequences: Sequence[DraftSequence]) -> None:
        self._sequences = sequences
        self._has_penalties = any(each.sampling.has_penalties for each in sequences)
        self._samplings: dict[tuple[int, ...], RowSampling] = {}
        # By the size of the vocabulary; all levels of a tree have the same.
        self._committed: dict[int, TokenCounts] = {}
        self._num_coupled = sum(s.mirrors_noise for s in sequences)

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[Path]]) -> Tensor:
        """Returns log probabilities of acceptance `[S, N, V]` float32, -inf for removed tokens.

        Args:
            logits: `[S * N, V]` raw draft logits.
            paths: `[S][N]`, tree tokens on each row's path, its own included; all of one length.
        """
        depths = [[len(path) for path in own] for own in paths]
        return self._score(logits, paths, depths).view(len(self._sequences), -1, logits.shape[1])

    def confidence(self, logits: Tensor, paths: Tensor) -> Tensor:
        """See `RequestScores`. Waits for the device where a request has penalties."""
        # Without penalties it only matters how long they are.
        own = paths if self._has_penalties else torch.zeros(paths.shape)
        return self(logits, own.tolist())

    def finished(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Returns the trees that these scores grew, with all that their target needs."""
        return trees

    def of_blocks(self, logits: Tensor, known: Sequence[Sequence[Path]], size: int) -> Tensor:
        """Returns log probabilities of acceptance `[N, size, V]` float32 of N blocks, -inf for
        removed tokens. Penalties count no token of a block: it does not know what stands between
        those before it and the token it draws.

        Args:
            logits: `[N * size, V]` raw draft logits, the blocks of each sequence end to end.
            known: `[S][any]`, tokens between the committed ones and the first that each block
                draws.
        """
        paths = [[path for path in own for _ in range(size)] for own in known]
        depths = [[len(path) + row for path in own for row in range(size)] for own in known]
        return self._score(logits, paths, depths).view(-1, size, logits.shape[1])

    def _score(
        self, logits: Tensor, paths: Sequence[Sequence[Path]], depths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Scores rows that each draw the token that many after the committed ones."""
        row_counts = [len(each) for each in paths]
        sampling = self._sampling(row_counts, logits.device)
        counts = self._counts(paths, logits) if self._has_penalties else None
        if self._num_coupled == 0:
            return point_mass_confidence(logits, sampling, counts)
        noise = (
            None if sampling.all_greedy else self._noise(sampling.seeds, depths, logits.shape[1])
        )
        coupled = coupled_confidence(logits, sampling, noise, counts)
        if self._num_coupled == len(self._sequences):
            return coupled
        is_coupled = self._is_coupled(row_counts, logits.device).unsqueeze(1)
        return torch.where(is_coupled, coupled, point_mass_confidence(logits, sampling, counts))

    def _is_coupled(self, row_counts: Sequence[int], device: torch.device) -> Tensor:
        """Returns for each row whether its sequence's target draws with shared noise."""
        flags = [
            sequence.mirrors_noise
            for sequence, count in zip(self._sequences, row_counts, strict=True)
            for _ in range(count)
        ]
        return uploaded_numbers(flags, device) > 0

    def _sampling(self, row_counts: Sequence[int], device: torch.device) -> RowSampling:
        key = tuple(row_counts)
        if key not in self._samplings:
            params = [sequence.sampling for sequence in self._sequences]
            self._samplings[key] = row_sampling(params, row_counts, device=device)
        return self._samplings[key]

    def _noise(self, seeds: Tensor, depths: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
        """Returns the noise of each row, `[L, V]`; rows of a sequence that draw the token at one
        position share it. `seeds` are those of the rows."""
        positions = [
            (place, sequence.num_tokens + depth)
            for place, (sequence, own) in enumerate(zip(self._sequences, depths, strict=True))
            for depth in own
        ]
        first_rows = {key: row for row, key in reversed(list(enumerate(positions)))}
        ranks = {key: rank for rank, key in enumerate(first_rows)}
        first = uploaded_numbers(list(first_rows.values()), seeds.device)
        drawn = uploaded_numbers([position for _, position in first_rows], seeds.device)
        noise = gumbel_noise(seeds.index_select(0, first), drawn, vocab_size)
        chosen = uploaded_numbers([ranks[key] for key in positions], seeds.device)
        return noise.index_select(0, chosen)

    def _counts(self, paths: Sequence[Sequence[Path]], logits: Tensor) -> TokenCounts:
        vocab_size = logits.shape[1]
        if vocab_size not in self._committed:
            self._committed[vocab_size] = self._count_committed(vocab_size, logits.device)
        owners = [place for place, own in enumerate(paths) for _ in own]
        counted = [
            path if sequence.sampling.has_penalties else ()
            for sequence, own in zip(self._sequences, paths, strict=True)
            for path in own
        ]
        return self._committed[vocab_size].with_paths(owners, counted)

    def _count_committed(self, vocab_size: int, device: torch.device) -> TokenCounts:
        tokens = [
            (each.token_ids, each.num_prompt_tokens) if each.sampling.has_penalties else ((), 0)
            for each in self._sequences
        ]
        return count_committed(
            [token_ids[:num_prompt] for token_ids, num_prompt in tokens],
            [token_ids[num_prompt:] for token_ids, num_prompt in tokens],
            vocab_size=vocab_size,
            device=device,
        )


class ChainDraws(DraftScores):
    """Draws one chain for each of S sequences from the draft's own distributions, and keeps these,
    for a target that verifies by them.

    The distribution of a row is the draft's own after the request's penalties, bias, temperature
    and truncation, over the tokens of the target: tokens it does not know cannot be drawn, so that
    none has to be taken out afterwards.

    Args:
        generator: of the host; the source of randomness that is used once. A draw that shared it
            with an earlier round would depend on what became of that round.
    """

    def __init__(self, sequences: Sequence[DraftSequence], generator: torch.Generator) -> None:
        super().__init__(sequences)
        self._generator = generator
        self._levels: list[Tensor] = []
        [self._vocab_size] = {sequence.vocab_size for sequence in sequences}

    def confidence(self, logits: Tensor, paths: Tensor) -> Tensor:
        """Returns scores `[S, 1, V]` of the target's V tokens: 0 for the drawn one, else -inf."""
        log_probs = super().confidence(_over_tokens(logits, self._vocab_size), paths)
        assert log_probs.shape[1] == 1, "only chains are drawn"
        level = log_probs.squeeze(1)
        seeds = uploaded_tensor(fresh_seeds(len(level), self._generator), level.device)
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


def request_scores(
    sequences: Sequence[DraftSequence], shape: TreeShape, generator: torch.Generator
) -> DraftScores:
    """Returns how the trees of a batch grow.

    Args:
        sequences: either all or none of them `draws_chains`.
        shape: of the trees; those that are no chains are never drawn, and verified otherwise.
        generator: of the host; see `ChainDraws`.
    """
    if sequences[0].draws_chains and shape.topk == 1:
        return ChainDraws(sequences, generator)
    return DraftScores(sequences)


def _over_tokens(logits: Tensor, vocab_size: int) -> Tensor:
    """Returns `[R, vocab_size]` logits; -inf for tokens that the draft does not have."""
    num_missing = vocab_size - logits.shape[1]
    if num_missing <= 0:
        return logits[:, :vocab_size]
    return functional.pad(logits, (0, num_missing), value=-math.inf)
