"""Tokens that a step draws: queued on the device first, read as decisions later.

Glossary. A sequence has one row for its last token, the *root*, and one row for each tree node. The
distribution of a row is the target's, given the path to that row, with sampling parameters and
grammar applied. The rules over these distributions are in `shared.speculation.verify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.target.step_plan import ScheduledSequence
from services.target.token_masks import RowMasks
from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import HostCopy
from shared.speculation.distributions import (
    packed_logprobs,
    shaped_logits,
    target_log_probs,
    unpacked_logprobs,
)
from shared.speculation.rejection import ChainRule, DrawnChain, accept_chains
from shared.speculation.row_sampling import RowSampling, TokenCounts, uploaded_tensor
from shared.speculation.verify import (
    EXACT,
    AcceptedPath,
    Thresholds,
    accept_path,
    accept_point_mass,
    draw_tokens,
    point_mass_draws,
)
from shared.tokens import TokenLogprobs, TokenTree


class FreshRule:
    """Verifies the trees of a step with fresh randomness.

    A tree without the draft distributions of its tokens is verified by the point-mass rule, no
    matter how it was drafted. That rule accepts a child with the target's probability of it, so it
    is exact for every tree that does not depend on the target's random numbers.

    Args:
        generator: on the host; source of the fresh randomness.
        chains: rule for drawn chains, which come with their draft distributions; None: no rule.
        thresholds: thresholds of the point-mass rule; below 1 they are lossy.
    """

    def __init__(
        self,
        generator: torch.Generator,
        chains: ChainRule | None = None,
        thresholds: Thresholds = EXACT,
    ) -> None:
        self._generator = generator
        self._chains = chains
        self._thresholds = thresholds

    def __call__(self, log_probs: Tensor, trees: Sequence[TokenTree]) -> list[AcceptedPath]:
        """Returns the accepted path of each tree. Waits for the device, twice with trees of both
        kinds.

        Args:
            log_probs: `[R, V]` float32, the target's distributions; for each tree the row of its
                root, then the rows of its nodes.
        """
        rows = torch.split(log_probs, [1 + len(tree) for tree in trees])
        chains = {
            index: tree
            for index, tree in enumerate(trees)
            if self._chains and isinstance(tree, DrawnChain) and tree.token_ids
        }
        point_mass = {index: tree for index, tree in enumerate(trees) if index not in chains}
        paths: dict[int, AcceptedPath] = {}
        if self._chains and chains:
            distributions = torch.cat([rows[index] for index in chains])
            drawn_chains = list(chains.values())
            accepted = accept_chains(distributions, drawn_chains, self._chains, self._generator)
            paths.update(zip(chains, accepted, strict=True))
        if point_mass:
            distributions = torch.cat([rows[index] for index in point_mass])
            draws = point_mass_draws(distributions, list(point_mass.values()), self._generator)
            for (index, tree), draw in zip(point_mass.items(), draws, strict=True):
                paths[index] = accept_point_mass(tree, draw, self._thresholds)
        return [paths[index] for index in range(len(trees))]


@dataclass(frozen=True, slots=True)
class Decision:
    """The tokens that one round of one sequence commits.

    Attributes:
        accepted_nodes: the accepted path, the root's child first.
        token_ids: tokens of the path, then the bonus token.
        logprobs: one for each of `token_ids`; empty when the request wants none.
    """

    accepted_nodes: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class RowDistributions:
    """The distributions from which the rows of a step draw.

    Attributes:
        drawn: scheduled sequences whose last token the step computes.
        rows: rows of each of these sequences: the root, then the nodes.
        logits: `[L, V]` as the model returns them.
        positions: `[L]` int64, the position of each row's token; the row draws the token after it.
        sampling: sampling parameters of the L rows.
        counts: token counts of the L rows; None without penalties.
        masks: token masks of the L rows; None without grammars and rules.
    """

    drawn: Sequence[ScheduledSequence]
    rows: Sequence[slice]
    logits: Tensor
    positions: Tensor
    sampling: RowSampling
    counts: TokenCounts | None
    masks: RowMasks | None

    @property
    def allowed_logits(self) -> Tensor:
        """The logits, -inf where a grammar or a rule forbids the token."""
        return self.logits if self.masks is None else self.masks.applied(self.logits)

    @property
    def scored_logits(self) -> Tensor:
        """The logits for log probabilities: as the model returns them, or, for requests with
        `logprobs_after_temperature`, shaped and divided by the temperature."""
        wanted = [
            entry.sequence.request.logprobs_after_temperature
            for entry in self.drawn
            for _ in range(1 + len(entry.tree))
        ]
        if not any(wanted):
            return self.logits
        sampling = self.sampling
        shaped = shaped_logits(self.allowed_logits, sampling, self.counts)
        scaled = torch.where(sampling.greedy, shaped, shaped / sampling.temperatures)
        is_wanted = uploaded_tensor(torch.tensor(wanted), scaled.device).unsqueeze(1)
        return torch.where(is_wanted, scaled, self.logits.to(scaled.dtype))


class Draw(Protocol):
    """The draw of one step."""

    @property
    def token_ids(self) -> Tensor | None:
        """`[L]` int64 on the device, the token that each row drew; None when the host decides."""

    def read(self) -> list[Decision]:
        """Waits for the device and returns one decision for each sequence that drew."""


class CoupledDraw:
    """Every row draws with the noise of its seed and position; queued by the constructor."""

    def __init__(self, distributions: RowDistributions) -> None:
        self._drawn = distributions.drawn
        self._masks = distributions.masks
        self._slices = distributions.rows
        self.token_ids = draw_tokens(
            distributions.allowed_logits,
            distributions.sampling,
            distributions.positions + 1,
            distributions.counts,
        )
        self._tokens = HostCopy(self.token_ids)
        self._logprobs = _RowLogprobs.of(distributions, self.token_ids)

    def read(self) -> list[Decision]:
        """See `Draw`."""
        tokens = self._tokens.read().tolist()
        if self._logprobs is None and len(tokens) == len(self._drawn):
            return [Decision((), (token,), ()) for token in tokens]  # there are no trees
        logprobs = None if self._logprobs is None else self._logprobs.read()
        decisions: list[Decision] = []
        for entry, rows in zip(self._drawn, self._slices, strict=True):
            path = accept_path(entry.tree, tokens[rows])
            if self._masks is not None:
                path = self._masks.cut(path, entry.tree, rows.start)
            decisions.append(_decision(path, entry, rows, logprobs))
        return decisions


class FreshDraw:
    """Rows accept by fresh randomness. All the work happens in `read`, before the next forward."""

    token_ids = None

    def __init__(self, distributions: RowDistributions, rule: FreshRule) -> None:
        self._distributions = distributions
        self._rule = rule

    @torch.inference_mode()
    def read(self) -> list[Decision]:
        """See `Draw`."""
        distributions = self._distributions
        log_probs = target_log_probs(
            distributions.allowed_logits, distributions.sampling, distributions.counts
        )
        drawn, slices = distributions.drawn, distributions.rows
        paths = self._rule(log_probs, [entry.tree for entry in drawn])
        if distributions.masks is not None:
            cut, trees = distributions.masks.cut, [entry.tree for entry in drawn]
            paths = list(map(cut, paths, trees, [rows.start for rows in slices]))
        token_ids = [0] * len(log_probs)
        for path, entry, rows in zip(paths, drawn, slices, strict=True):
            for row, token_id in zip(
                _path_rows(path, rows), path.token_ids(entry.tree), strict=True
            ):
                token_ids[row] = token_id
        scores = _RowLogprobs.of(distributions, uploaded_numbers(token_ids, log_probs.device))
        logprobs = None if scores is None else scores.read()
        return list(map(_decision, paths, drawn, slices, itertools.repeat(logprobs)))


@dataclass(frozen=True, slots=True)
class QueuedLogprobs:
    """Log probabilities of N tokens, whose copy to the host is queued.

    Attributes:
        num_top: number of top alternatives for each token.
        named: for each token, further token ids whose log probabilities are wanted.
    """

    packed: HostCopy
    num_top: Sequence[int]
    named: Sequence[Sequence[int]]

    @classmethod
    def of(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        num_top: Sequence[int],
        named: Sequence[Sequence[int]],
    ) -> QueuedLogprobs:
        """Queues the computation and the copy.

        Args:
            logits: `[N, V]`, of the rows that predict the tokens.
            token_ids: `[N]` int64.
        """
        packed = packed_logprobs(logits, token_ids, max(num_top), named)
        return cls(HostCopy(packed), num_top, named)

    def read(self) -> tuple[TokenLogprobs, ...]:
        """Waits for the device."""
        return unpacked_logprobs(self.packed.read(), self.num_top, self.named)


@dataclass(frozen=True, slots=True)
class _RowLogprobs:
    """Log probabilities of the rows of a step whose requests want any."""

    queued: QueuedLogprobs
    rows: list[int]

    @classmethod
    def of(cls, distributions: RowDistributions, token_ids: Tensor) -> _RowLogprobs | None:
        """Queues the log probabilities; None when no request wants any.

        Args:
            token_ids: `[L]` int64, the next token of each row.
        """
        rows: list[int] = []
        num_top: list[int] = []
        named: list[Sequence[int]] = []
        for entry, entry_rows in zip(distributions.drawn, distributions.rows, strict=True):
            request = entry.sequence.request
            if request.top_logprobs is not None:
                num_rows = entry_rows.stop - entry_rows.start
                rows += range(entry_rows.start, entry_rows.stop)
                num_top += [request.top_logprobs] * num_rows
                named += [request.logprob_token_ids] * num_rows
        if not rows:
            return None
        index = uploaded_numbers(rows, token_ids.device)
        logits = distributions.scored_logits.index_select(0, index)
        return cls(
            QueuedLogprobs.of(logits, token_ids.index_select(0, index), num_top, named), rows
        )

    def read(self) -> dict[int, TokenLogprobs]:
        """Waits for the device and returns the log probabilities by row."""
        return dict(zip(self.rows, self.queued.read(), strict=True))


def _decision(
    path: AcceptedPath,
    entry: ScheduledSequence,
    rows: slice,
    logprobs: dict[int, TokenLogprobs] | None,
) -> Decision:
    committed = path.token_ids(entry.tree)
    if logprobs is None or entry.sequence.request.top_logprobs is None:
        return Decision(path.node_indices, committed, ())
    of_path = tuple(logprobs[row] for row in _path_rows(path, rows))
    return Decision(path.node_indices, committed, of_path)


def _path_rows(path: AcceptedPath, rows: slice) -> tuple[int, ...]:
    """Returns the rows whose next tokens are the tokens of the path, then the bonus token."""
    return (rows.start, *(rows.start + 1 + node for node in path.node_indices))
