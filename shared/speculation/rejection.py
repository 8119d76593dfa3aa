"""Rejection sampling of chains that a draft drew token by token, and block verification.

A *chain* has one row for its root and one for each node. Row i predicts the token of node i, and
the last row, the *leaf*, predicts the token after the chain. The target's distribution of a row is
conditioned on the row's own path. The draft's distribution of a row must be the one that the next
node's token was drawn from: truncated, penalised and rounded as it was at the draw. With any other
distribution the output does not follow the target's.

A chain may be cut at a fixed depth, or after a node because of the path down to that node. Whether
a node is verified must never depend on its own token: that would favour some tokens.

Rows of several chains lie one after another: R rows, N nodes, S chains, V tokens.

Rejection stops at the first node that fails, even if later nodes could compensate for it. Block
verification makes one decision on a whole chain and accepts at least as many tokens: a node's
threshold weighs the path down to it, and the deepest node that passes is accepted together with
everything above it.

Source of block verification: Sun et al., arXiv 2403.10444, algorithm 2 and equations 3 to 5.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.speculation.distributions import fresh_coins, fresh_seeds
from shared.speculation.row_sampling import uploaded_ids, uploaded_tensor
from shared.speculation.verify import AcceptedPath, coupled_draw
from shared.tokens import TokenTree

_MAX_DISTRIBUTION_ELEMENTS = 2**23
"""Most elements of a float64 tensor of distributions, 64 MiB; a decision holds about ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnChain(TokenTree):
    """A chain whose tokens were drawn with randomness that nothing else uses.

    Attributes:
        draft_log_probs: `[N, V]` float32, for each node the log of the distribution that its token
            was drawn from; -inf for tokens of probability 0.
    """

    draft_log_probs: Tensor = field(compare=False)

    @classmethod
    def of(cls, token_ids: Sequence[int], draft_log_probs: Tensor) -> DrawnChain:
        """Returns the chain of these tokens."""
        assert len(draft_log_probs) == len(token_ids), "a node has one distribution"
        parents = TokenTree.chain(token_ids).parent_indices
        return cls(tuple(token_ids), parents, draft_log_probs=draft_log_probs)

    def only(self, nodes: Sequence[int]) -> DrawnChain:
        """Returns the first nodes; a drawn chain may only be cut by depth."""
        count = len(nodes)
        assert list(nodes) == list(range(count)), f"nodes {list(nodes)} are no depth of a chain"
        return DrawnChain.of(self.token_ids[:count], self.draft_log_probs[:count])


@dataclass(frozen=True, slots=True)
class ChainDistributions:
    """The distributions of some chains.

    Attributes:
        target_probs: `[R, V]` float64, normalised.
        draft_probs: `[R, V]` float64, normalised; a leaf's row is 0.
        token_ids: `[N]` int64, tokens of the nodes.
        lengths: number of nodes of each chain.
    """

    target_probs: Tensor
    draft_probs: Tensor
    token_ids: Tensor
    lengths: Sequence[int]

    @classmethod
    def of(cls, log_probs: Tensor, chains: Sequence[DrawnChain]) -> ChainDistributions:
        """Normalises the distributions in float64, as tokens were drawn whatever the sums were.

        Args:
            log_probs: `[R, V]` float32, the target's, on the device of the draft's.
        """
        lengths = [len(chain) for chain in chains]
        token_ids = [token for chain in chains for token in chain.token_ids]
        draft = torch.cat([chain.draft_log_probs for chain in chains]).to(torch.float64)
        assert log_probs.shape == (len(draft) + len(chains), draft.shape[1]), (
            f"{len(draft)} distributions over {draft.shape[1]} tokens "
            f"for rows {tuple(log_probs.shape)}"
        )
        target_probs = log_probs.to(torch.float64).softmax(-1)
        above = uploaded_ids(_rows_above_nodes(lengths), log_probs.device)
        return cls(
            target_probs,
            torch.zeros_like(target_probs).index_copy_(0, above, draft.softmax(-1)),
            uploaded_ids(token_ids, log_probs.device),
            lengths,
        )

    def rows_above_nodes(self) -> Tensor:
        """Returns `[N]` int64, the row that predicts each node."""
        return uploaded_ids(_rows_above_nodes(self.lengths), self.target_probs.device)

    def ratios(self) -> Tensor:
        """Returns `[N]` float64, target over draft probability of each node's token; NaN where the
        draft's probability is 0."""
        rows = self.rows_above_nodes()
        draft_probs = self.draft_probs[rows, self.token_ids]
        ratios = self.target_probs[rows, self.token_ids] / draft_probs
        return ratios.masked_fill(draft_probs == 0.0, torch.nan)


@dataclass(frozen=True, slots=True)
class ChainRows:
    """The thresholds and residual distributions of chains under a rule.

    Attributes:
        thresholds: `[N]` float64 in [0, 1]; a node passes when its coin is below.
        residuals: `[R, V]` float64, the bonus token's distribution if the accepted path ends at
            that row. Not normalised; never empty, and only of tokens that the target may draw.
    """

    thresholds: Tensor
    residuals: Tensor

    @classmethod
    def of(
        cls, distributions: ChainDistributions, thresholds: Tensor, residuals: Tensor
    ) -> ChainRows:
        """Fills empty residuals with the target's distribution. They are empty where target and
        draft have equal distributions, so a path ends there only because of rounding."""
        is_empty = residuals.sum(-1, keepdim=True) == 0.0
        return cls(thresholds, torch.where(is_empty, distributions.target_probs, residuals))


@dataclass(frozen=True, slots=True)
class ChainRule:
    """A rule of verification.

    Attributes:
        rows: computes thresholds and residuals.
        num_accepted: returns the number of accepted nodes, given whether each node's coin passes.
    """

    rows: Callable[[ChainDistributions], ChainRows]
    num_accepted: Callable[[Sequence[bool]], int]


def rejection_rows(distributions: ChainDistributions) -> ChainRows:
    """Accepts a token with the ratio of its probabilities; else draws from the positive part of
    target minus draft.

    Source: Leviathan, Kalman, Matias, arXiv 2211.17192, algorithm 1; Chen et al.,
    arXiv 2302.01318, algorithm 2.
    """
    residuals = (distributions.target_probs - distributions.draft_probs).clamp_min_(0.0)
    return ChainRows.of(distributions, distributions.ratios().clamp_max(1.0), residuals)


def num_before_first_refusal(passes: Sequence[bool]) -> int:
    """Returns how many nodes pass before the first that does not."""
    return len(list(itertools.takewhile(bool, passes)))


REJECTION = ChainRule(rejection_rows, num_before_first_refusal)


def accept_chains(
    log_probs: Tensor,
    chains: Sequence[DrawnChain],
    rule: ChainRule,
    generator: torch.Generator,
) -> list[AcceptedPath]:
    """Decides non-empty chains. Waits for the device once, for its results.

    A coin is never 0 or 1 and a residual holds only tokens of the target, so rounding cannot commit
    a token that the target forbids.

    Args:
        log_probs: `[R, V]` float32, the target's, see `distributions.target_log_probs`.
        generator: the host's source of fresh randomness; must not be the draft's.
    """
    num_nodes = sum(map(len, chains))
    thresholds, drawn = _drawn_rows(log_probs, chains, rule, generator)
    # One transfer instead of two: token ids are exact in float64.
    packed = torch.cat((thresholds, drawn.to(torch.float64))).tolist()
    limits, bonuses = packed[:num_nodes], packed[num_nodes:]
    assert not any(map(math.isnan, limits)), "a token that its distribution cannot have drawn"
    coins = fresh_coins(num_nodes, generator)
    passes = [coin < limit for coin, limit in zip(coins, limits, strict=True)]
    paths: list[AcceptedPath] = []
    node = row = 0
    for chain in chains:
        count = rule.num_accepted(passes[node : node + len(chain)])
        paths.append(AcceptedPath(tuple(range(count)), int(bonuses[row + count])))
        node, row = node + len(chain), row + len(chain) + 1
    return paths


def _drawn_rows(
    log_probs: Tensor,
    chains: Sequence[DrawnChain],
    rule: ChainRule,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Returns thresholds `[N]` and a token `[R]` drawn from each row's residual; does not wait."""
    thresholds: list[Tensor] = []
    drawn: list[Tensor] = []
    start = 0
    for batch in _batches(
        chains, max_rows=max(_MAX_DISTRIBUTION_ELEMENTS // log_probs.shape[1], 1)
    ):
        end = start + sum(len(chain) + 1 for chain in batch)
        rows = rule.rows(ChainDistributions.of(log_probs[start:end], batch))
        seeds = uploaded_tensor(fresh_seeds(end - start, generator), log_probs.device)
        residual_log_probs = rows.residuals.log().to(torch.float32)
        drawn.append(coupled_draw(residual_log_probs, seeds, torch.zeros_like(seeds)))
        thresholds.append(rows.thresholds)
        start = end
    return torch.cat(thresholds), torch.cat(drawn)


def _batches(chains: Sequence[DrawnChain], *, max_rows: int) -> Iterator[list[DrawnChain]]:
    """Yields the chains in order, in batches of at most `max_rows` rows or of one chain."""
    batch: list[DrawnChain] = []
    num_rows = 0
    for chain in chains:
        num_rows += len(chain) + 1
        if batch and num_rows > max_rows:
            yield batch
            batch, num_rows = [], len(chain) + 1
        batch.append(chain)
    yield batch


def _rows_above_nodes(lengths: Sequence[int]) -> list[int]:
    starts = itertools.accumulate((length + 1 for length in lengths), initial=0)
    return [start + place for start, n in zip(starts, lengths, strict=False) for place in range(n)]


def path_weights(ratios: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns `[N]` float64 in [0, 1], for each node the joint ratio of the path down to it: the
    ratio of its token times the joint ratio of its parent, at most 1."""
    depth = max(lengths)
    places = uploaded_ids(
        [chain * depth + place for chain, n in enumerate(lengths) for place in range(n)],
        ratios.device,
    )
    padded = ratios.new_ones(len(lengths) * depth).index_copy_(0, places, ratios)
    levels = padded.view(len(lengths), depth)
    for above, level in itertools.pairwise((torch.ones_like(levels[:, 0]), *levels.unbind(1))):
        level.mul_(above).clamp_max_(1.0)
    return padded.index_select(0, places)


def block_rows(distributions: ChainDistributions) -> ChainRows:
    """Returns thresholds and residuals of algorithm 2.

    At a node of weight w that is not the last, the target's distribution times w exceeds the
    draft's distribution of the next token by a mass m, and the threshold is m / (m + 1 - w). The
    last node's threshold is w. If w is 1, so is the threshold; if m is 0 as well, the next node has
    weight 1, and a deeper node is accepted.
    """
    weights = path_weights(distributions.ratios(), distributions.lengths)
    own_rows = distributions.rows_above_nodes() + 1
    row_weights = torch.ones_like(distributions.target_probs[:, :1]).index_copy_(
        0, own_rows, weights.unsqueeze(1)
    )
    residuals = (row_weights * distributions.target_probs - distributions.draft_probs).clamp_min_(
        0.0
    )
    masses = residuals.sum(-1).index_select(0, own_rows)
    thresholds = torch.where(weights < 1.0, masses / (masses + 1.0 - weights), 1.0)
    is_last = uploaded_tensor(
        torch.tensor(
            [place == length - 1 for length in distributions.lengths for place in range(length)]
        ),
        weights.device,
    )
    return ChainRows.of(distributions, torch.where(is_last, weights, thresholds), residuals)


def num_up_to_last_pass(passes: Sequence[bool]) -> int:
    """Returns the number of nodes up to the deepest that passes, itself included."""
    return max((place + 1 for place, is_passed in enumerate(passes) if is_passed), default=0)


BLOCK = ChainRule(block_rows, num_up_to_last_pass)
