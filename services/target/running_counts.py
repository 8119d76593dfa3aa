"""Token counts of the sequences that draw, kept on the device from one step to the next.

Penalties count every token of a sequence. To count them all anew in every step would cost the host
milliseconds, and it could not: the last token may be on the device only. So each step adds what is
new, which is one token a sequence as a rule.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from services.target.step_plan import ScheduledSequence
from shared.kv.upload import uploaded_numbers
from shared.speculation.penalties import TokenCounts, histogram
from shared.speculation.tree import row_paths


class RunningCounts:
    """Counts of the sequences of the last step that had any penalties; a row each.

    Rows of sequences without penalties hold anything: neutral penalties do not read them.
    """

    def __init__(self) -> None:
        self._sequence_ids: list[int] = []
        self._num_counted: list[int] = []
        self._output = torch.zeros(0)
        self._in_prompt = torch.zeros(0, dtype=torch.bool)

    def of(
        self, drawn: Sequence[ScheduledSequence], input_ids: Tensor, vocab_size: int
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
        self, drawn: Sequence[ScheduledSequence], vocab_size: int, device: torch.device
    ) -> None:
        """Keeps the rows of sequences that were there, and begins those of the others."""
        places = {sequence_id: row for row, sequence_id in enumerate(self._sequence_ids)}
        prompts: list[Sequence[int]] = []
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

    def _count_known(self, drawn: Sequence[ScheduledSequence]) -> None:
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

    def _count_pending(self, drawn: Sequence[ScheduledSequence], input_ids: Tensor) -> None:
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

    def _with_paths(self, drawn: Sequence[ScheduledSequence]) -> TokenCounts:
        """Returns a row for each root and node: the sequence's counts and those of its path."""
        device = self._output.device
        owners = [[row] * (1 + len(entry.tree)) for row, entry in enumerate(drawn)]
        rows = uploaded_numbers(list(itertools.chain.from_iterable(owners)), device)
        paths = [path for entry in drawn for path in row_paths(entry.tree)]
        output = self._output.index_select(0, rows)
        output += histogram(paths, self._output.shape[1], device)
        return TokenCounts(output, self._in_prompt.index_select(0, rows) | (output > 0))
