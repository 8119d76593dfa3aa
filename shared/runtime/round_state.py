"""The device state of speculative rounds, one *slot* for each sequence.

A round reads the state, and its last kernel writes the state that the next round starts from, so
rounds follow one another without the host. A slot without a sequence computes in the padding page.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shared.kv.leases import PADDING_PAGE
from shared.kv.upload import Array, uploaded
from shared.speculation.distributions import coupled_confidence, gumbel_noise
from shared.speculation.row_sampling import (
    RowSampling,
    sampling_columns,
    sampling_of_columns,
    signed_seed,
)
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams, TokenLogprobs

NewPage = tuple[int, int, int]
"""A slot, the logical index of a page in the slot's sequence, and the page."""
LENGTH, OPEN, ACTIVE, SEED, OFFSET, ENDED, TAIL = range(7)
"""Columns of `RoundState.numbers`; the tail takes the rest."""
# The smallest input of a forward: one open row behind one token.
_EMPTY_LENGTH, _EMPTY_OPEN = 2, 1


@dataclass(frozen=True, slots=True, eq=False)
class RoundState:
    """S slots. Columns are views of the first two tensors, so few copies write a slot.

    Attributes:
        numbers: `[S, 6 + W]` int64; see the properties.
        sampling: `[S, 4]` float64, `sampling_columns` of each slot.
        page_table: `[S, P]` int32, the target's pages, padded with the padding page.
        head_page_table: `[S, P]` int32, the head's pages.
        last_states: `[S, N, H]`, for a head of N + 1 layers: the output of each layer but the last
            on the last row before the open ones. None for other heads.
    """

    numbers: Tensor
    sampling: Tensor
    page_table: Tensor
    head_page_table: Tensor
    last_states: Tensor | None = None

    @classmethod
    def empty(
        cls, num_slots: int, *, max_open_rows: int, num_pages: int, device: torch.device
    ) -> RoundState:
        """Returns S slots without sequences.

        Args:
            max_open_rows: W, most tokens that a round commits to one sequence.
            num_pages: P, pages of the longest sequence.
        """
        tables = torch.full(
            (2, num_slots, num_pages), PADDING_PAGE, dtype=torch.int32, device=device
        )
        numbers = torch.tensor([empty_number_row(max_open_rows)], device=device)
        greedy = torch.tensor([sampling_columns(_GREEDY)], dtype=torch.float64, device=device)
        return cls(numbers.repeat(num_slots, 1), greedy.repeat(num_slots, 1), tables[0], tables[1])

    @property
    def lengths(self) -> Tensor:
        """`[S]` int64, committed tokens. The target has not computed the last one."""
        return self.numbers[:, LENGTH]

    @property
    def num_open(self) -> Tensor:
        """`[S]` int64, in [1, W]: tokens at the end that the head has not read, the last included.

        Their rows in the head's cache come behind `lengths - 1 - num_open` computed rows.
        """
        return self.numbers[:, OPEN]

    @property
    def is_active(self) -> Tensor:
        """`[S]` int64, 1 where the slot takes part in the round; 0 where it has no sequence, or no
        tree was prepared for its sequence."""
        return self.numbers[:, ACTIVE]

    @property
    def seeds(self) -> Tensor:
        """`[S]` int64."""
        return self.numbers[:, SEED]

    @property
    def drawn_positions(self) -> Tensor:
        """`[S]` int64, the position of the token after the last committed one: the length, and the
        tokens outside a head's window. In rounds there are no tokens outside."""
        return self.lengths + self.numbers[:, OFFSET]

    @property
    def ended_rows(self) -> Tensor:
        """`[S]` int64, the tree row at which the accepted path of the slot's last round ended."""
        return self.numbers[:, ENDED]

    @property
    def roots(self) -> Tensor:
        """`[S]` int64, the last committed tokens."""
        return self.open_tokens.gather(1, self.num_open.unsqueeze(1) - 1).squeeze(1)

    @property
    def open_tokens(self) -> Tensor:
        """`[S, W]` int64, the last `num_open` committed tokens in order, then undefined values."""
        return self.numbers[:, TAIL:]

    @property
    def num_slots(self) -> int:
        return len(self.numbers)

    def first(self, num_slots: int) -> RoundState:
        """Returns a view of the first slots."""
        return self.of(slice(num_slots))

    def of(self, slots: slice) -> RoundState:
        """Returns a view of a range of slots."""
        return RoundState(
            self.numbers[slots],
            self.sampling[slots],
            self.page_table[slots],
            self.head_page_table[slots],
            None if self.last_states is None else self.last_states[slots],
        )

    def narrowed(self, max_open_rows: int) -> RoundState:
        """Returns a view for rounds that commit no more than `max_open_rows` tokens."""
        return replace(self, numbers=self.numbers[:, : TAIL + max_open_rows])

    def emptied(self) -> RoundState:
        """Returns a new state of the same sizes without sequences."""
        num_open, num_pages = self.open_tokens.shape[1], self.page_table.shape[1]
        empty = RoundState.empty(
            self.num_slots, max_open_rows=num_open, num_pages=num_pages, device=self.numbers.device
        )
        states = self.last_states
        return replace(empty, last_states=None if states is None else torch.zeros_like(states))

    def limit_open(self, most: int) -> None:
        """Leaves one row open in slots with more than `most`: the head has read the others."""
        is_more = self.num_open > most
        self.open_tokens[:, 0] = torch.where(is_more, self.roots, self.open_tokens[:, 0])
        self.num_open.masked_fill_(is_more, 1)

    def copy_(self, other: RoundState) -> None:
        """Copies all values from a state of the same sizes."""
        self.numbers.copy_(other.numbers)
        self.sampling.copy_(other.sampling)
        self.page_table.copy_(other.page_table)
        self.head_page_table.copy_(other.head_page_table)

    def place(self, sequences: Mapping[int, SlotSequence]) -> None:
        """Puts sequences into free slots, with one copy from the host. The head has computed all
        rows of a sequence but the last one."""
        width, placed = self.open_tokens.shape[1], sequences.values()
        # Planned steps may have used more pages than a round's page table holds.
        most_pages = max(max(len(own.pages), len(own.head_pages)) for own in placed)
        num_pages = min(most_pages, self.page_table.shape[1])
        tables = np.full((2, len(sequences), num_pages), PADDING_PAGE, np.int32)
        for row, sequence in enumerate(placed):
            for table, pages in zip(tables, (sequence.pages, sequence.head_pages), strict=True):
                table[row, : len(pages)] = pages[:num_pages]
        columns = [sampling_columns(sequence.sampling) for sequence in placed]
        numbers = [sequence.numbers(width) for sequence in placed]
        index, *new = self._write(list(sequences), numbers, columns, [*tables])
        # The columns behind these pages hold the padding page already, in every free slot.
        for target, rows in zip((self.page_table, self.head_page_table), new, strict=True):
            target[:, :num_pages].index_copy_(0, index, rows)

    def clear(self, slots: Sequence[int]) -> None:
        """Removes the sequences from slots."""
        count, width = len(slots), self.open_tokens.shape[1]
        columns = [sampling_columns(_GREEDY)] * count
        (index,) = self._write(slots, [empty_number_row(width)] * count, columns, [])
        for table in (self.page_table, self.head_page_table):
            table.index_fill_(0, index, PADDING_PAGE)

    def set_pages(self, pages: Sequence[NewPage], head_pages: Sequence[NewPage]) -> None:
        """Writes new pages with one copy from the host; those past the page table are dropped."""
        width = self.page_table.shape[1]
        parts = [
            np.array([page for page in new if page[1] < width], np.int64).reshape(-1, 3)
            for new in (pages, head_pages)
        ]
        tables = (self.page_table, self.head_page_table)
        uploads = uploaded([part.T.copy() for part in parts], self.numbers.device)
        for table, part in zip(tables, uploads, strict=True):
            if part.shape[1]:
                table.index_put_((part[0], part[1]), part[2].int())

    def _write(
        self,
        slots: Sequence[int],
        numbers: Sequence[Sequence[int]],
        sampling: Sequence[Sequence[float]],
        others: Sequence[Array],
    ) -> list[Tensor]:
        """Writes slots without waiting. Work queued earlier on the device reads the old values.

        Returns:
            The slots on the device, and `others`, uploaded with the same copy.
        """
        as_numbers = np.array(sampling, np.float64).view(np.int64)
        rows = [np.array(numbers, np.int64), as_numbers, *others]
        index, new_numbers, columns, *rest = uploaded(
            [np.array(slots, np.int64), *rows], self.numbers.device
        )
        self.numbers.index_copy_(0, index, new_numbers)
        self.sampling.index_copy_(0, index, columns.view(torch.float64))
        return [index, *rest]


_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SlotSequence:
    """The data of one sequence that its slot holds.

    Attributes:
        num_tokens: committed tokens.
        pages: the target's pages, in logical order.
        head_pages: the head's pages.
    """

    num_tokens: int
    last_token_id: int
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]

    def numbers(self, max_open_rows: int) -> list[int]:
        """Returns the sequence's row of `RoundState.numbers`."""
        row = empty_number_row(max_open_rows)
        row[LENGTH], row[ACTIVE], row[TAIL] = self.num_tokens, 1, self.last_token_id
        row[SEED] = signed_seed(self.sampling.seed)
        return row


def empty_number_row(max_open_rows: int) -> list[int]:
    """Returns the numbers of a slot without a sequence."""
    return [_EMPTY_LENGTH, _EMPTY_OPEN, *[0] * (TAIL - 2 + max_open_rows)]


# Scores and draws for a round's rows, by the sampling parameters of their slots.

_MAX_CUT_ROWS = 512


class RoundSampling(enum.Enum):
    """The kind of sampling that the slots of a round need. Each kind includes those before it:
    argmax alone, draws at a temperature, draws with top-k, top-p or min-p.

    Draws follow the coupled rule. `LaneSampling` draws for lanes with penalties, bias or bans.
    """

    GREEDY = 0
    DRAWN = 1
    CUT = 2

    @classmethod
    def of(
        cls, params: Iterable[SamplingParams], drafted: Iterable[SamplingParams] = ()
    ) -> RoundSampling:
        """Returns the simplest kind that draws for all `params`, and drafts for `drafted` too."""
        kinds = [_kind_of(own) for own in params]
        kinds += [cls.GREEDY if own.is_greedy else cls.DRAWN for own in drafted]
        return max(kinds, key=lambda kind: kind.value, default=cls.GREEDY)

    def confidence(self, logits: Tensor, state: RoundState, depth: int) -> Tensor:
        """Returns the head's `coupled_confidence` `[S * N, V]` for its logits `[S * N, V]`.

        Args:
            depth: depth of the rows; the root's is 0.
        """
        num_rows = len(logits) // state.num_slots
        rows = self._rows(state, num_rows)
        if self is RoundSampling.GREEDY:
            return coupled_confidence(logits, rows, None)
        noise = gumbel_noise(state.seeds, state.drawn_positions + depth, logits.shape[1])
        # Rows of one sequence and level draw a token for the same position, so they share noise.
        return coupled_confidence(logits, rows, noise.repeat_interleave(num_rows, dim=0))

    def draw(self, logits: Tensor, state: RoundState, depths: Tensor) -> Tensor:
        """Returns the target's tokens `[S, T]` for its logits `[S * T, V]` and depths `[S, T]`."""
        positions = state.lengths.unsqueeze(1) + depths
        num_slots, num_rows = depths.shape
        # Top-k and top-p sort a row, which takes several times its memory.
        size = max(_MAX_CUT_ROWS // num_rows, 1) if self is RoundSampling.CUT else num_slots
        drawn = []
        for first in range(0, num_slots, size):
            slots = slice(first, min(first + size, num_slots))
            rows = self._rows(state.of(slots), num_rows)
            own_logits = logits[slots.start * num_rows : slots.stop * num_rows]
            drawn.append(draw_tokens(own_logits, rows, positions[slots].flatten()))
        return (drawn[0] if len(drawn) == 1 else torch.cat(drawn)).view(depths.shape)

    def _rows(self, state: RoundState, num_rows: int) -> RowSampling:
        return sampling_of_columns(
            state.sampling.repeat_interleave(num_rows, dim=0),
            state.seeds.repeat_interleave(num_rows),
            has_draws=self is not RoundSampling.GREEDY,
            has_cuts=self is RoundSampling.CUT,
        )


def _kind_of(params: SamplingParams) -> RoundSampling:
    if params.is_greedy:
        return RoundSampling.GREEDY
    is_cut = bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0
    return RoundSampling.CUT if is_cut else RoundSampling.DRAWN


# Sequences that join rounds on the device, and the results of a round for one sequence.


@dataclass(frozen=True, slots=True)
class NewLane:
    """A sequence that is to join rounds.

    Attributes:
        token_ids: committed tokens, at least two.
        pages: the target's pages, in logical order.
        head_pages: the head's pages; they cover one row for each token but the last.
        num_head_rows: number of leading rows whose keys and values are in `head_pages` already.
        num_computed: tokens that the target has computed and whose features are in `feature_rows`,
            at least one. The first round computes the others; None means all but the last.
        num_prompt_tokens: how many of the tokens are the prompt.
        min_length: number of tokens from which on one of `stop_token_ids` may be drawn.
        top_logprobs: alternatives to report for each token; None reports no log probability.
        logprob_temperature: divisor of the logits for log probabilities.
    """

    sequence_id: int
    token_ids: Sequence[int]
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]
    num_head_rows: int
    num_computed: int | None = None
    num_prompt_tokens: int = 0
    min_length: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    top_logprobs: int | None = None
    logprob_temperature: float = 1.0

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_shaped(self) -> bool:
        """Whether more than temperature, top-k, top-p and min-p shapes its distribution."""
        is_early = bool(self.stop_token_ids) and len(self.token_ids) < self.min_length
        return self.sampling.shapes_logits or is_early

    @property
    def reads_prompt(self) -> bool:
        """Whether the first round computes more than the last token."""
        return len(self.uncomputed_token_ids) > 1

    @property
    def uncomputed_token_ids(self) -> Sequence[int]:
        """The tokens that the first round computes, the last one at least."""
        return self.token_ids[-1 if self.num_computed is None else self.num_computed :]

    def in_slot(self, start: int, *, is_last: bool = True) -> SlotSequence:
        """Returns the data of a slot whose first row is the token at `start`.

        Args:
            is_last: whether it is the sequence's own slot; slots of earlier chunks draw nothing.
        """
        head_pages = self.head_pages if is_last else ()
        root = self.token_ids[start]
        return SlotSequence(start + 1, root, self.sampling, self.pages, head_pages)


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """The result of a round for one sequence.

    Attributes:
        token_ids: committed tokens, the bonus token last; at least one.
        num_drafted: nodes of the sequence's tree.
        logprobs: log probabilities of each token; empty if the request wants none.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
