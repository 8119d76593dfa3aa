"""Draws the tokens of a step from its logits, by the verification rule of the target: queued on the
device first, read as decisions later.

Glossary. A sequence has one row for its last token, the *root*, and one row for each tree node. The
distribution of a row is the target's, given the path to that row, with sampling parameters and
grammar applied. The rules over these distributions are in `shared.speculation.verify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.target.scheduler import ScheduledSequence
from services.target.settings import VerificationMode as VerificationMode
from services.target.token_masks import RowMasks, TokenMasks
from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import HostCopy, UploadMemory
from shared.speculation.distributions import (
    packed_logprobs,
    shaped_logits,
    target_log_probs,
    unpacked_logprobs,
)
from shared.speculation.rejection import (
    BLOCK,
    REJECTION,
    ChainRule,
    DrawnChain,
    accept_chains,
)
from shared.speculation.row_sampling import (
    RowSampling,
    TokenCounts,
    histogram,
    row_sampling,
    uploaded_tensor,
)
from shared.speculation.tree import row_paths
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

_CHAIN_RULES = {VerificationMode.REJECTION: REJECTION, VerificationMode.BLOCK: BLOCK}


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

    drawn: SequenceOf[ScheduledSequence]
    rows: SequenceOf[slice]
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


class RejectionDraw:
    """Rows accept by fresh random numbers, in contrast to the coupled rule, whose noise draft and
    target share. All the work happens in `read`, before the next forward.

    Source: speculative sampling, Leviathan et al., arXiv 2211.17192.
    """

    token_ids = None

    def __init__(self, distributions: RowDistributions, rule: RejectionRule) -> None:
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
    num_top: SequenceOf[int]
    named: SequenceOf[SequenceOf[int]]

    @classmethod
    def of(
        cls,
        logits: Tensor,
        token_ids: Tensor,
        num_top: SequenceOf[int],
        named: SequenceOf[SequenceOf[int]],
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
        named: list[SequenceOf[int]] = []
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


class RejectionRule:
    """Verifies the trees of a step with fresh random numbers.

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

    def __call__(self, log_probs: Tensor, trees: SequenceOf[TokenTree]) -> list[AcceptedPath]:
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


class RunningCounts:
    """Token counts of the sequences of the last step with penalties; one row a sequence.

    Penalties count every token of a sequence. Counting all tokens anew in each step would cost the
    host milliseconds, and the host may not know the last token, which may be on the device only. So
    each step adds the new tokens, usually one a sequence.

    The rows of sequences without penalties hold arbitrary counts: neutral penalties ignore them.
    """

    def __init__(self) -> None:
        self._sequence_ids: list[int] = []
        self._num_counted: list[int] = []
        self._output = torch.zeros(0)
        self._in_prompt = torch.zeros(0, dtype=torch.bool)

    def of(
        self, drawn: SequenceOf[ScheduledSequence], input_ids: Tensor, vocab_size: int
    ) -> TokenCounts:
        """Returns the counts of every row. They are valid until the next call.

        Args:
            input_ids: `[L]` int64 on the device, the token each row computes.
        """
        if [entry.sequence.sequence_id for entry in drawn] != self._sequence_ids:
            self._change_rows(drawn, vocab_size, input_ids.device)
        self._count_committed(drawn)
        self._count_pending(drawn, input_ids)
        if len(input_ids) == len(drawn):
            return TokenCounts(self._output, self._in_prompt | (self._output > 0))
        return self._with_paths(drawn)

    def _change_rows(
        self, drawn: SequenceOf[ScheduledSequence], vocab_size: int, device: torch.device
    ) -> None:
        """Keeps the rows of sequences of the last step, and adds rows of new sequences."""
        old_rows = {sequence_id: row for row, sequence_id in enumerate(self._sequence_ids)}
        prompts: list[SequenceOf[int]] = []
        rows: list[int] = []
        num_counted: list[int] = []
        for entry in drawn:
            sequence = entry.sequence
            row = old_rows.get(sequence.sequence_id)
            if row is None:
                row = len(old_rows) + len(prompts)
                has_penalties = sequence.sampling.has_penalties
                prompts.append(sequence.request.prompt_token_ids if has_penalties else ())
            rows.append(row)
            is_old = row < len(old_rows)
            num_counted.append(self._num_counted[row] if is_old else 0)
        index = uploaded_numbers(rows, device)
        fresh = histogram(prompts, vocab_size, device)
        old_output = self._output.to(device).view(len(old_rows), vocab_size)
        old_in_prompt = self._in_prompt.to(device).view(len(old_rows), vocab_size)
        self._output = torch.cat((old_output, torch.zeros_like(fresh))).index_select(0, index)
        self._in_prompt = torch.cat((old_in_prompt, fresh > 0)).index_select(0, index)
        self._sequence_ids = [entry.sequence.sequence_id for entry in drawn]
        self._num_counted = num_counted

    def _count_committed(self, drawn: SequenceOf[ScheduledSequence]) -> None:
        """Adds the tokens that were committed since the last step."""
        vocab_size = self._output.shape[1]
        offsets: list[int] = []
        for row, entry in enumerate(drawn):
            sequence = entry.sequence
            if sequence.sampling.has_penalties:
                first = sequence.num_prompt_tokens + self._num_counted[row]
                offsets += [row * vocab_size + token for token in sequence.token_ids[first:]]
            # A token that was pending then was counted as the input of a row.
            self._num_counted[row] = max(self._num_counted[row], sequence.num_output_tokens)
        if offsets:
            self._add(uploaded_numbers(offsets, self._output.device))

    def _count_pending(self, drawn: SequenceOf[ScheduledSequence], input_ids: Tensor) -> None:
        """Adds the pending tokens, which only the device knows, as the inputs of their rows."""
        rows = [row for row, entry in enumerate(drawn) if entry.sequence.num_pending]
        if not rows:
            return
        assert len(input_ids) == len(drawn), "a tree cannot hang off an unread token"
        for row in rows:
            self._num_counted[row] += 1
        offsets = torch.arange(len(drawn), device=input_ids.device) * self._output.shape[1]
        offsets += input_ids
        if len(rows) < len(drawn):
            offsets = offsets.index_select(0, uploaded_numbers(rows, input_ids.device))
        self._add(offsets)

    def _add(self, offsets: Tensor) -> None:
        # Sums of ones are exact in float32, so the order of the additions does not matter.
        ones = torch.ones((), device=offsets.device).expand(len(offsets))
        self._output.view(-1).scatter_add_(0, offsets, ones)

    def _with_paths(self, drawn: SequenceOf[ScheduledSequence]) -> TokenCounts:
        """Returns a row for each root and node: counts of the sequence plus those of its path."""
        device = self._output.device
        sequence_rows = [[row] * (1 + len(entry.tree)) for row, entry in enumerate(drawn)]
        rows = uploaded_numbers(list(itertools.chain.from_iterable(sequence_rows)), device)
        paths = [path for entry in drawn for path in row_paths(entry.tree)]
        output = self._output.index_select(0, rows)
        output += histogram(paths, self._output.shape[1], device)
        return TokenCounts(output, self._in_prompt.index_select(0, rows) | (output > 0))


class Verifier:
    """Draws and verifies by one rule.

    Args:
        generator: on the host; source of the fresh randomness of all rules but the coupled one.
        thresholds: thresholds of the point-mass rule; below 1 they are lossy.

    Attributes:
        masks: computes the masks of grammars and token rules.
    """

    def __init__(
        self, mode: VerificationMode, *, generator: torch.Generator, thresholds: Thresholds = EXACT
    ) -> None:
        self.mode = mode
        self._rule: RejectionRule | None = None
        if mode is not VerificationMode.COUPLED:
            self._rule = RejectionRule(generator, _CHAIN_RULES.get(mode), thresholds)
        self._num_rows: list[tuple[int, int]] = []
        self._sampling: RowSampling | None = None
        self._counts = RunningCounts()
        self.masks = TokenMasks()
        self._mask_memory: UploadMemory | None = None

    @torch.inference_mode()
    def draw(
        self,
        drawn: SequenceOf[ScheduledSequence],
        logits: Tensor,
        *,
        positions: Tensor,
        input_ids: Tensor,
    ) -> Draw:
        """Queues the draw of a step; see `RowDistributions` for the arguments.

        The result must be read before the next forward, unless its `token_ids` are not None: then
        it no longer needs `logits`.

        Args:
            input_ids: `[L]` int64, the token each row computes.
        """
        sampling = self._sampling_of(drawn, logits.device)
        counts = None
        if sampling.penalties is not None:
            counts = self._counts.of(drawn, input_ids, logits.shape[-1])
        # On a GPU the host computes masks while the queued forward runs.
        is_masked = any(entry.sequence.is_masked for entry in drawn)
        masks = self._masks_of(drawn, logits) if is_masked else None
        ends = itertools.accumulate(1 + len(entry.tree) for entry in drawn)
        rows = [
            slice(end - 1 - len(entry.tree), end) for entry, end in zip(drawn, ends, strict=True)
        ]
        distributions = RowDistributions(drawn, rows, logits, positions, sampling, counts, masks)
        return (
            CoupledDraw(distributions)
            if self._rule is None
            else RejectionDraw(distributions, self._rule)
        )

    def _masks_of(self, drawn: SequenceOf[ScheduledSequence], logits: Tensor) -> RowMasks:
        if self._mask_memory is None:
            self._mask_memory = UploadMemory(logits.device)
        return self.masks.of(drawn, logits, self._mask_memory)

    def _sampling_of(
        self, drawn: SequenceOf[ScheduledSequence], device: torch.device
    ) -> RowSampling:
        """Returns the sampling parameters of every row. They are cached while the same sequences
        draw the same numbers of rows."""
        may_ban = any(entry.sequence.request.stop.min_output_tokens for entry in drawn)
        banned = _banned(drawn) if may_ban else ()
        num_rows = [(entry.sequence.sequence_id, 1 + len(entry.tree)) for entry in drawn]
        if self._sampling is None or banned or num_rows != self._num_rows:
            # Banned tokens depend on the output's length, so they are not cached.
            self._num_rows = [] if banned else num_rows
            self._sampling = row_sampling(
                [entry.sequence.sampling for entry in drawn],
                [count for _, count in num_rows],
                device=device,
                banned_token_ids=banned,
            )
        return self._sampling


def _banned(drawn: SequenceOf[ScheduledSequence]) -> SequenceOf[SequenceOf[int]]:
    """Returns the tokens that each row must not draw; empty when no row bans any."""
    if not any(entry.sequence.banned_token_ids(0) for entry in drawn):
        return ()
    return [
        sorted(entry.sequence.banned_token_ids(depth))
        for entry in drawn
        for depth in (0, *entry.tree.depths)
    ]
