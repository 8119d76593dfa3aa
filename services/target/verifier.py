"""From the logits of a step to the draw of its tokens, by one rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from services.target.draw import (
    CoupledDraw,
    Draw,
    FreshDraw,
    FreshRule,
    RowDistributions,
)
from services.target.settings import VerificationMode as VerificationMode
from services.target.step_plan import ScheduledSequence
from services.target.token_masks import TokenMasks
from shared.kv.upload import uploaded_numbers
from shared.speculation.rejection import BLOCK, REJECTION
from shared.speculation.row_sampling import RowSampling, TokenCounts, histogram, row_sampling
from shared.speculation.tree import row_paths
from shared.speculation.verify import EXACT, Thresholds

_CHAIN_RULES = {VerificationMode.REJECTION: REJECTION, VerificationMode.BLOCK: BLOCK}


class RunningCounts:
    """Counts of the sequences of the last step that had any penalties; a row each.

    Penalties count every token of a sequence. To count them all anew in every step would cost the
    host milliseconds, and it could not: the last token may be on the device only. So each step adds
    what is new, which is one token a sequence as a rule.

    Rows of sequences without penalties hold anything: neutral penalties do not read them.
    """

    def __init__(self) -> None:
        self._sequence_ids: list[int] = []
        self._num_counted: list[int] = []
        self._output = torch.zeros(0)
        self._in_prompt = torch.zeros(0, dtype=torch.bool)

    def of(
        self, drawn: SequenceOf[ScheduledSequence], input_ids: Tensor, vocab_size: int
    ) -> TokenCounts:
        """Returns the counts of every row. They hold until the next call.

        Args:
            input_ids: `[L]` int64 on the device, the token each row computes.
        """
        if [entry.sequence.sequence_id for entry in drawn] != self._sequence_ids:
            self._take_over(drawn, vocab_size, input_ids.device)
        self._count_known(drawn)
        self._count_pending(drawn, input_ids)
        if len(input_ids) == len(drawn):
            return TokenCounts(self._output, self._in_prompt | (self._output > 0))
        return self._with_paths(drawn)

    def _take_over(
        self, drawn: SequenceOf[ScheduledSequence], vocab_size: int, device: torch.device
    ) -> None:
        """Keeps the rows of sequences that were there, and begins those of the others."""
        places = {sequence_id: row for row, sequence_id in enumerate(self._sequence_ids)}
        prompts: list[SequenceOf[int]] = []
        rows: list[int] = []
        num_counted: list[int] = []
        for entry in drawn:
            sequence = entry.sequence
            place = places.get(sequence.sequence_id)
            if place is None:
                place = len(places) + len(prompts)
                has_penalties = sequence.sampling.has_penalties
                prompts.append(sequence.request.prompt_token_ids if has_penalties else ())
            rows.append(place)
            is_old = place < len(places)
            num_counted.append(self._num_counted[place] if is_old else 0)
        index = uploaded_numbers(rows, device)
        fresh = histogram(prompts, vocab_size, device)
        old_output = self._output.to(device).view(len(places), vocab_size)
        old_in_prompt = self._in_prompt.to(device).view(len(places), vocab_size)
        self._output = torch.cat((old_output, torch.zeros_like(fresh))).index_select(0, index)
        self._in_prompt = torch.cat((old_in_prompt, fresh > 0)).index_select(0, index)
        self._sequence_ids = [entry.sequence.sequence_id for entry in drawn]
        self._num_counted = num_counted

    def _count_known(self, drawn: SequenceOf[ScheduledSequence]) -> None:
        """Adds the tokens that were committed since."""
        vocab_size = self._output.shape[1]
        places: list[int] = []
        for row, entry in enumerate(drawn):
            sequence = entry.sequence
            if sequence.sampling.has_penalties:
                first = sequence.num_prompt_tokens + self._num_counted[row]
                places += [row * vocab_size + token for token in sequence.token_ids[first:]]
            # A pending token was counted when it was the root of a row.
            self._num_counted[row] = max(self._num_counted[row], sequence.num_output_tokens)
        if places:
            self._add(uploaded_numbers(places, self._output.device))

    def _count_pending(self, drawn: SequenceOf[ScheduledSequence], input_ids: Tensor) -> None:
        """Adds the tokens that only the device knows: the inputs of rows that follow a draw."""
        rows = [row for row, entry in enumerate(drawn) if entry.sequence.num_pending]
        if not rows:
            return
        assert len(input_ids) == len(drawn), "a tree cannot hang off an unread token"
        for row in rows:
            self._num_counted[row] += 1
        places = torch.arange(len(drawn), device=input_ids.device) * self._output.shape[1]
        places += input_ids
        if len(rows) < len(drawn):
            places = places.index_select(0, uploaded_numbers(rows, input_ids.device))
        self._add(places)

    def _add(self, places: Tensor) -> None:
        # Sums of ones are exact in float32, so the order of the additions does not matter.
        ones = torch.ones((), device=places.device).expand(len(places))
        self._output.view(-1).scatter_add_(0, places, ones)

    def _with_paths(self, drawn: SequenceOf[ScheduledSequence]) -> TokenCounts:
        """Returns a row for each root and node: the sequence's counts and those of its path."""
        device = self._output.device
        owners = [[row] * (1 + len(entry.tree)) for row, entry in enumerate(drawn)]
        rows = uploaded_numbers(list(itertools.chain.from_iterable(owners)), device)
        paths = [path for entry in drawn for path in row_paths(entry.tree)]
        output = self._output.index_select(0, rows)
        output += histogram(paths, self._output.shape[1], device)
        return TokenCounts(output, self._in_prompt.index_select(0, rows) | (output > 0))


class Verifier:
    """Decides by one rule.

    Args:
        generator: on the host; the source of fresh randomness of all rules but the coupled one.
        thresholds: of the point-mass rule; below 1 they are lossy.

    Attributes:
        masks: computes what grammars and rules allow.
    """

    def __init__(
        self,
        mode: VerificationMode,
        *,
        generator: torch.Generator,
        thresholds: Thresholds = EXACT,
    ) -> None:
        self.mode = mode
        self._rule: FreshRule | None = None
        if mode is not VerificationMode.COUPLED:
            self._rule = FreshRule(generator, _CHAIN_RULES.get(mode), thresholds)
        self._num_rows: list[tuple[int, int]] = []
        self._sampling: RowSampling | None = None
        self._counts = RunningCounts()
        self.masks = TokenMasks()

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

        The result must be read before the next forward, unless its `token_ids` are there: then it
        needs `logits` no more.

        Args:
            input_ids: `[L]` int64, the token each row computes.
        """
        sampling = self._sampling_of(drawn, logits.device)
        counts = None
        if sampling.penalties is not None:
            counts = self._counts.of(drawn, input_ids, logits.shape[-1])
        # On a GPU the host does this while the forward, which is queued, runs.
        is_masked = any(entry.sequence.is_masked for entry in drawn)
        masks = self.masks.of(drawn, logits) if is_masked else None
        ends = itertools.accumulate(1 + len(entry.tree) for entry in drawn)
        rows = [slice(end - 1 - len(each.tree), end) for each, end in zip(drawn, ends, strict=True)]
        distributions = RowDistributions(drawn, rows, logits, positions, sampling, counts, masks)
        return (
            CoupledDraw(distributions)
            if self._rule is None
            else FreshDraw(distributions, self._rule)
        )

    def _sampling_of(
        self, drawn: SequenceOf[ScheduledSequence], device: torch.device
    ) -> RowSampling:
        """Returns the parameters of every row, kept while the same sequences draw the same rows."""
        is_ruled = any(entry.sequence.request.stop.min_output_tokens for entry in drawn)
        banned = _banned(drawn) if is_ruled else ()
        num_rows = [(each.sequence.sequence_id, 1 + len(each.tree)) for each in drawn]
        if self._sampling is None or banned or num_rows != self._num_rows:
            # What is banned changes with every token.
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
