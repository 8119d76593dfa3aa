"""Scores of draft tokens, by their probability of acceptance, and chains drawn by the draft."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from services.draft.sequence import DraftSequence
from shared.kv.upload import uploaded_numbers
from shared.speculation.distributions import (
    coupled_confidence,
    fresh_seeds,
    gumbel_noise,
    point_mass_confidence,
)
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
        self._has_penalties = any(sequence.sampling.has_penalties for sequence in sequences)
        self._samplings: dict[tuple[int, ...], RowSampling] = {}
        # By vocabulary size, which all levels of a tree share.
        self._committed: dict[int, TokenCounts] = {}
        self._num_coupled = sum(sequence.mirrors_noise for sequence in sequences)

    def __call__(self, logits: Tensor, paths: Sequence[Sequence[Path]]) -> Tensor:
        """Returns log probabilities of acceptance `[S, N, V]` float32, -inf for removed tokens.

        Args:
            logits: `[S * N, V]` raw draft logits.
            paths: `[S][N]`, tree tokens on the path to each row, its own included; equally long.
        """
        depths = [[len(path) for path in sequence_paths] for sequence_paths in paths]
        return self._score(logits, paths, depths).view(len(self._sequences), -1, logits.shape[1])

    def confidence(self, logits: Tensor, paths: Tensor) -> Tensor:
        """See `RequestScores`. Waits for the device where a request has penalties."""
        # Without penalties only the lengths of the paths matter.
        read_paths = paths if self._has_penalties else torch.zeros(paths.shape)
        return self(logits, read_paths.tolist())

    def finished(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Returns the trees that these scores grew, with all data that their target needs."""
        return trees

    def of_blocks(self, logits: Tensor, known: Sequence[Sequence[Path]], size: int) -> Tensor:
        """Returns log probabilities of acceptance `[N, size, V]` float32 of N blocks, -inf for
        removed tokens. Penalties do not count a block's own tokens: its rows are scored at once,
        so a row does not know the drafted tokens before it.

        Args:
            logits: `[N * size, V]` raw draft logits, the blocks of each sequence end to end.
            known: `[S][any]`, tokens between the committed ones and each block's first token.
        """
        paths = [[path for path in known_paths for _ in range(size)] for known_paths in known]
        depths = [
            [len(path) + row for path in known_paths for row in range(size)]
            for known_paths in known
        ]
        return self._score(logits, paths, depths).view(-1, size, logits.shape[1])

    def _score(
        self, logits: Tensor, paths: Sequence[Sequence[Path]], depths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Scores rows. `depths` says how far after the committed tokens each row's token is."""
        row_counts = [len(sequence_paths) for sequence_paths in paths]
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
        """Returns, for each row, whether its sequence's target draws with shared noise."""
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
        """Returns the noise of each row, `[L, V]`. Rows of a sequence that draw the token at the
        same position share noise. `seeds` has one entry per row."""
        positions = [
            (index, sequence.num_tokens + depth)
            for index, sequence in enumerate(self._sequences)
            for depth in depths[index]
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
        owners = [index for index, sequence_paths in enumerate(paths) for _ in sequence_paths]
        counted = [
            path if sequence.sampling.has_penalties else ()
            for sequence, sequence_paths in zip(self._sequences, paths, strict=True)
            for path in sequence_paths
        ]
        return self._committed[vocab_size].with_paths(owners, counted)

    def _count_committed(self, vocab_size: int, device: torch.device) -> TokenCounts:
        tokens = [
            (s.token_ids, s.num_prompt_tokens) if s.sampling.has_penalties else ((), 0)
            for s in self._sequences
        ]
        return count_committed(
            [token_ids[:num_prompt] for token_ids, num_prompt in tokens],
            [token_ids[num_prompt:] for token_ids, num_prompt in tokens],
            vocab_size=vocab_size,
            device=device,
        )


class ChainDraws(DraftScores):
    """Draws one chain for each of S sequences from the draft's own distributions, and keeps the
    distributions for a target that verifies by them.

    The distribution of a row is the draft's own after the request's penalties, bias, temperature
    and truncation, over the target's tokens. Tokens that the target does not know cannot be drawn,
    so that none has to be removed afterwards.

    Args:
        generator: random generator on the host. Each draw uses fresh randomness: a draw that shared
            it with an earlier round would depend on that round's verdict.
    """

    def __init__(self, sequences: Sequence[DraftSequence], generator: torch.Generator) -> None:
        super().__init__(sequences)
        self._generator = generator
        self._levels: list[Tensor] = []
        [self._vocab_size] = {sequence.vocab_size for sequence in sequences}

    def confidence(self, logits: Tensor, paths: Tensor) -> Tensor:
        """Returns scores `[S, 1, V]` of the target's V tokens: 0 for the drawn one, else -inf."""
        log_probs = super().confidence(_resized_logits(logits, self._vocab_size), paths)
        assert log_probs.shape[1] == 1, "only chains are drawn"
        level = log_probs.squeeze(1)
        seeds = uploaded_tensor(fresh_seeds(len(level), self._generator), level.device)
        drawn = coupled_draw(level, seeds, torch.zeros_like(seeds))
        self._levels.append(level)
        return torch.full_like(log_probs, -math.inf).scatter_(-1, drawn[:, None, None], 0.0)

    def finished(self, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Returns the chains with their distributions in place of log probabilities."""
        distributions = torch.stack(self._levels, dim=1)
        return [
            DrawnChain.of(tree.token_ids, levels[: len(tree)])
            for tree, levels in zip(trees, distributions, strict=True)
        ]


def request_scores(
    sequences: Sequence[DraftSequence], shape: TreeShape, generator: torch.Generator
) -> DraftScores:
    """Returns the scores that a batch of trees grows by.

    Args:
        sequences: either all or none of them `draws_chains`.
        shape: shape of the trees. Only chains are drawn; other trees are verified differently.
        generator: random generator on the host; see `ChainDraws`.
    """
    if sequences[0].draws_chains and shape.topk == 1:
        return ChainDraws(sequences, generator)
    return DraftScores(sequences)


def _resized_logits(logits: Tensor, vocab_size: int) -> Tensor:
    """Returns `[R, vocab_size]` logits; -inf for tokens that the draft does not have."""
    num_missing = vocab_size - logits.shape[1]
    if num_missing <= 0:
        return logits[:, :vocab_size]
    return functional.pad(logits, (0, num_missing), value=-math.inf)
