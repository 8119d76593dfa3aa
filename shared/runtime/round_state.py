"""The device state of speculative rounds, one *slot* a sequence.

A round reads it, and its last kernel writes what the next round starts from, so rounds follow one
another without the host. A slot without a sequence computes in the padding page.
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
from shared.speculation.distributions import coupled_confidence
from shared.speculation.noise import gumbel_noise
from shared.speculation.row_sampling import (
    RowSampling,
    sampling_columns,
    sampling_of_columns,
    signed_seed,
)
from shared.speculation.verify import draw_tokens
from shared.tokens import SamplingParams, TokenLogprobs

NewPage = tuple[int, int, int]
"""A slot, the place in its sequence that a page has, and the page."""
LENGTH, OPEN, ACTIVE, SEED, OFFSET, ENDED, TAIL = range(7)
"""Columns of `RoundState.numbers`; the tail takes the rest."""
# The least that a forward can compute: one open row behind one token.
_EMPTY_LENGTH, _EMPTY_OPEN = 2, 1


@dataclass(frozen=True, slots=True, eq=False)
class RoundState:
    """S slots. Columns are views of the first two tensors, so that a slot is written by few copies.

    Attributes:
        numbers: `[S, 6 + W]` int64; see the properties.
        sampling: `[S, 4]` float64, `sampling_columns` of each slot.
        page_table: `[S, P]` int32, the target's pages, padded with the padding page.
        head_page_table: `[S, P]` int32, the head's.
        last_states: `[S, N, H]`, of a head of N + 1 layers: what each layer but the last left on
            the last row before the open ones. None of others.
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
            max_open_rows: W, most tokens a round commits to one sequence.
            num_pages: P, pages of the longest sequence.
        """
        tables = torch.full(
            (2, num_slots, num_pages), PADDING_PAGE, dtype=torch.int32, device=device
        )
        numbers = torch.tensor([_number_row((), 0, max_open_rows)], device=device)
        greedy = torch.tensor([sampling_columns(_GREEDY)], dtype=torch.float64, device=device)
        return cls(numbers.repeat(num_slots, 1), greedy.repeat(num_slots, 1), tables[0], tables[1])

    @property
    def lengths(self) -> Tensor:
        """`[S]` int64, committed tokens; the last one is not computed by the target."""
        return self.numbers[:, LENGTH]

    @property
    def num_open(self) -> Tensor:
        """`[S]` int64, in [1, W]: tokens at the end that the head has not read, the last included.

        Their rows in the head's cache come behind `lengths - 1 - num_open` computed ones.
        """
        return self.numbers[:, OPEN]

    @property
    def is_active(self) -> Tensor:
        """`[S]` int64, 1 where the slot takes part in the round, else 0: it has no sequence, or one
        that no tree was prepared for."""
        return self.numbers[:, ACTIVE]

    @property
    def seeds(self) -> Tensor:
        """`[S]` int64."""
        return self.numbers[:, SEED]

    @property
    def drawn_positions(self) -> Tensor:
        """`[S]` int64, the position of the token after the last committed one. Beside the length
        it counts what a head's window leaves out; in rounds that is nothing."""
        return self.lengths + self.numbers[:, OFFSET]

    @property
    def ended_rows(self) -> Tensor:
        """`[S]` int64, the row of its tree at which the last round of the slot ended."""
        return self.numbers[:, ENDED]

    @property
    def roots(self) -> Tensor:
        """`[S]` int64, the last committed tokens."""
        return self.open_tokens.gather(1, self.num_open.unsqueeze(1) - 1).squeeze(1)

    @property
    def open_tokens(self) -> Tensor:
        """`[S, W]` int64, the last `num_open` committed tokens in order, then anything."""
        return self.numbers[:, TAIL:]

    @property
    def num_slots(self) -> int:
        return len(self.numbers)

    def first(self, num_slots: int) -> RoundState:
        """Returns a view of the first slots."""
        return self.of(slice(num_slots))

    def of(self, slots: slice) -> RoundState:
        """Returns a view of some slots."""
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
        """Returns a state of as many slots, without sequences."""
        num_open, num_pages = self.open_tokens.shape[1], self.page_table.shape[1]
        empty = RoundState.empty(
            self.num_slots, max_open_rows=num_open, num_pages=num_pages, device=self.numbers.device
        )
        states = self.last_states
        return replace(empty, last_states=None if states is None else torch.zeros_like(states))

    def limit_open(self, most: int) -> None:
        """Keeps the last row alone open where more than `most` are: the head has read them."""
        is_more = self.num_open > most
        self.open_tokens[:, 0] = torch.where(is_more, self.roots, self.open_tokens[:, 0])
        self.num_open.masked_fill_(is_more, 1)

    def copy_(self, other: RoundState) -> None:
        """Takes all values of a state of the same sizes."""
        self.numbers.copy_(other.numbers)
        self.sampling.copy_(other.sampling)
        self.page_table.copy_(other.page_table)
        self.head_page_table.copy_(other.head_page_table)

    def place(self, sequences: Mapping[int, SlotSequence]) -> None:
        """Puts sequences into free slots, with one copy from the host. The rows of their heads are
        computed but for the last ones."""
        width, placed = self.open_tokens.shape[1], sequences.values()
        # Planned steps may have had more pages than rounds reach.
        most_pages = max(max(len(each.pages), len(each.head_pages)) for each in placed)
        num_pages = min(most_pages, self.page_table.shape[1])
        tables = np.full((2, len(sequences), num_pages), PADDING_PAGE, np.int32)
        for row, each in enumerate(placed):
            for table, pages in zip(tables, (each.pages, each.head_pages), strict=True):
                table[row, : len(pages)] = pages[:num_pages]
        columns = [sampling_columns(each.sampling) for each in placed]
        numbers = [each.numbers(width) for each in placed]
        index, *new = self._write(list(sequences), numbers, columns, [*tables])
        # Behind them a slot that is free has no pages.
        for target, own in zip((self.page_table, self.head_page_table), new, strict=True):
            target[:, :num_pages].index_copy_(0, index, own)

    def clear(self, slots: Sequence[int]) -> None:
        """Takes the sequences out of slots."""
        count, width = len(slots), self.open_tokens.shape[1]
        columns = [sampling_columns(_GREEDY)] * count
        (index,) = self._write(slots, [empty_number_row(width)] * count, columns, [])
        for table in (self.page_table, self.head_page_table):
            table.index_fill_(0, index, PADDING_PAGE)

    def set_pages(self, pages: Sequence[NewPage], head_pages: Sequence[NewPage]) -> None:
        """Writes pages that slots have got, as far as rounds reach, with one copy from the host."""
        width = self.page_table.shape[1]
        parts = [
            np.array([each for each in new if each[1] < width], np.int64).reshape(-1, 3)
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
        """Writes slots without waiting: work already queued on the device reads what was there.

        Returns:
            The slots on the device, and `others`, which went there with the same copy.
        """
        as_numbers = np.array(sampling, np.float64).view(np.int64)
        rows = [np.array(numbers, np.int64), as_numbers, *others]
        index, own, columns, *rest = uploaded(
            [np.array(slots, np.int64), *rows], self.numbers.device
        )
        self.numbers.index_copy_(0, index, own)
        self.sampling.index_copy_(0, index, columns.view(torch.float64))
        return [index, *rest]


_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SlotSequence:
    """The part of a sequence that its slot holds.

    Attributes:
        num_tokens: committed.
        pages: the target's, in logical order.
        head_pages: the head's.
    """

    num_tokens: int
    last_token_id: int
    sampling: SamplingParams
    pages: Sequence[int]
    head_pages: Sequence[int]

    def numbers(self, max_open_rows: int) -> list[int]:
        """Returns its row of `RoundState.numbers`."""
        row = _number_row((self.last_token_id,), signed_seed(self.sampling.seed), max_open_rows)
        row[LENGTH], row[ACTIVE] = self.num_tokens, 1
        return row


def empty_number_row(max_open_rows: int) -> list[int]:
    """Returns the numbers of a slot without a sequence."""
    return _number_row((), 0, max_open_rows)


def _number_row(tokens: Sequence[int], seed: int, max_open_rows: int) -> list[int]:
    padding = [0] * (max_open_rows - len(tokens))
    return [_EMPTY_LENGTH, _EMPTY_OPEN, 0, seed, 0, 0, *tokens, *padding]


# Scores and draws of a round's rows from the sampling parameters of their slots.

_MAX_CUT_ROWS = 512


class RoundSampling(enum.Enum):
    """The sampling that the slots of a round need; each kind includes those before it.

    The rule is the coupled one; `LaneSampling` draws for lanes with penalties, bias or bans.
    """

    GREEDY = 0
    DRAWN = 1
    CUT = 2

    @classmethod
    def of(
        cls, params: Iterable[SamplingParams], drafted: Iterable[SamplingParams] = ()
    ) -> RoundSampling:
        """Returns the least kind that draws for all of `params`, and drafts for `drafted` too."""
        kinds = [_kind_of(each) for each in params]
        kinds += [cls.GREEDY if each.is_greedy else cls.DRAWN for each in drafted]
        return max(kinds, key=_rank, default=cls.GREEDY)

    def confidence(self, logits: Tensor, state: RoundState, depth: int) -> Tensor:
        """Returns the head's `coupled_confidence` `[S * N, V]` for its logits `[S * N, V]`.

        Args:
            depth: of the rows; the root's is 0.
        """
        num_rows = len(logits) // state.num_slots
        rows = self._rows(state, num_rows)
        if self is RoundSampling.GREEDY:
            return coupled_confidence(logits, rows, None)
        noise = gumbel_noise(state.seeds, state.drawn_positions + depth, logits.shape[1])
        # Rows of one sequence and level draw the token at one position, so they share their noise.
        return coupled_confidence(logits, rows, noise.repeat_interleave(num_rows, dim=0))

    def draw(self, logits: Tensor, state: RoundState, depths: Tensor) -> Tensor:
        """Returns the target's tokens `[S, T]` for its logits `[S * T, V]` and depths `[S, T]`."""
        positions = state.lengths.unsqueeze(1) + depths
        num_slots, num_rows = depths.shape
        # Cuts sort a row, in several times its memory.
        size = max(_MAX_CUT_ROWS // num_rows, 1) if self is RoundSampling.CUT else num_slots
        drawn = []
        for first in range(0, num_slots, size):
            own = slice(first, min(first + size, num_slots))
            rows = self._rows(state.of(own), num_rows)
            own_logits = logits[own.start * num_rows : own.stop * num_rows]
            drawn.append(draw_tokens(own_logits, rows, positions[own].flatten()))
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


def _rank(kind: RoundSampling) -> int:
    return kind.value


# Sequences on their way into rounds on the device, and what rounds did to them.


@dataclass(frozen=True, slots=True)
class NewLane:
    """A sequence that is to take part.

    Attributes:
        token_ids: committed, at least two.
        pages: the target's, in logical order.
        head_pages: the head's; cover one row a token but the last.
        num_head_rows: the first rows, whose keys and values are in `head_pages` already.
        num_computed: tokens that the target has computed, at least one, and whose features are in
            `feature_rows`. The first round computes the others; None is all but the last.
        num_prompt_tokens: how many of the tokens are the prompt.
        min_length: tokens that there must be before one of `stop_token_ids` may be drawn.
        top_logprobs: alternatives to report for each token; None reports no log probability.
        logprob_temperature: what logits are divided by for them.
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
        """Whether more than temperature and cuts shapes what it draws from."""
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
        """Returns what a slot holds whose first row is the token at `start`.

        Args:
            is_last: the slot is its own. One that computes what comes before draws nothing.
        """
        head_pages = self.head_pages if is_last else ()
        root = self.token_ids[start]
        return SlotSequence(start + 1, root, self.sampling, self.pages, head_pages)


@dataclass(frozen=True, slots=True)
class SequenceRound:
    """The result of a round for one sequence.

    Attributes:
        token_ids: committed, the bonus token last; at least one.
        num_drafted: nodes of its tree.
        logprobs: of each token; empty where none are wanted.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    num_drafted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
