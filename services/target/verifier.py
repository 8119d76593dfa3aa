"""Draws the tokens of a step from its logits, by the verification rule of the target."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from services.target.draw import CoupledDraw, Draw, FreshDraw, FreshRule, RowDistributions
from services.target.settings import VerificationMode as VerificationMode
from services.target.step_plan import ScheduledSequence
from services.target.token_masks import RowMasks, TokenMasks
from shared.kv.upload import uploaded_numbers
from shared.runtime.host_copy import UploadMemory
from shared.speculation.rejection import BLOCK, REJECTION
from shared.speculation.row_sampling import RowSampling, TokenCounts, histogram, row_sampling
from shared.speculation.tree import row_paths
from shared.speculation.verify import EXACT, Thresholds

_CHAIN_RULES = {VerificationMode.REJECTION: REJECTION, VerificationMode.BLOCK: BLOCK}


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
        self._rule: FreshRule | None = None
        if mode is not VerificationMode.COUPLED:
            self._rule = FreshRule(generator, _CHAIN_RULES.get(mode), thresholds)
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
            else FreshDraw(distributions, self._rule)
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
