"""Recurrent states of linear attention, beside the paged cache.

The cache holds what each token gave a layer, at the token's slot, like keys and values: so paths
are moved, trees are cut and prefixes are shared as in any other cache. The state after a token
follows from these inputs. A *checkpoint* is the state of all layers after the first L tokens of a
sequence, so that a forward need not begin at the first token.

A checkpoint belongs to no sequence. Every write of a row has a *stamp*, a number that no other
write has, which is stored with the row and moves with it. A checkpoint knows the stamp of its last
token, and holds for a sequence if the row at L - 1 of its pages has this stamp. Rows behind another
write, of a page that was given to others, of a rejected node or of a request that was cancelled,
have other stamps, so a stale state is never found; what is not found is computed anew from the
inputs.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.batch import ForwardBatch
from shared.kv.upload import Array

STAMP_SIZE = 8
"""Numbers of a row that hold its stamp: digits to the base 256, which every dtype has exactly."""
# More causal rows than a chain of candidates has: a part of a prompt, all of which stays.
_MAX_CHAIN_ROWS = 64
# Tokens that are advanced at once, and rows of trees: bounds memory.
_BLOCK_TOKENS, _GROUP_LANES = 64, 64
_MISSING = -1


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of the states of one decoder.

    Attributes:
        num_layers: with states.
        window: see `DeltaShape`.
        first_layer: of the cache, where the first of them has its rows.
        layers_each: of the cache, that hold a row of one of them.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    window: int
    first_layer: int
    layers_each: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return 4 * self.num_layers * self.num_heads * self.key_dim * self.value_dim


@dataclass(frozen=True, slots=True)
class StateBlock:
    """Up to `_BLOCK_TOKENS` tokens of some lanes.

    Attributes:
        lanes: `[N]` int64.
        slots: `[N * (window - 1 + M)]` int64, of the tokens and of those before them.
        is_there: `[N, window - 1 + M]` bool.
        rows: `[N * M]` int64, the forward's row that wants what a token reads; T where none does.
    """

    lanes: Tensor
    slots: Tensor
    is_there: Tensor
    rows: Tensor


@dataclass(frozen=True, slots=True)
class StateGroup:
    """Lanes that start from states of sequences.

    Attributes:
        owners: `[N]` int64, the sequence of each.
    """

    owners: Tensor
    blocks: tuple[StateBlock, ...]


@dataclass(frozen=True, slots=True)
class StatePlan:
    """What one forward does with states, the same in all layers.

    Attributes:
        stamps: `[T, STAMP_SIZE]` int64, of the forward's rows.
        loads: `[B]` int64, the checkpoint of each sequence.
        sequences: what all sequences advance by, before their checkpoints are kept.
        kept: `[K]` int64, sequences whose state is kept.
        places: `[K]` int64, the checkpoints they go to.
        candidates: rows behind the states of sequences, which may not stay.
    """

    stamps: Tensor
    loads: Tensor
    sequences: tuple[StateBlock, ...]
    kept: Tensor
    places: Tensor
    candidates: tuple[StateGroup, ...]
    records: tuple[_Record, ...]


@dataclass(frozen=True, slots=True)
class _Record:
    """A checkpoint that a forward writes."""

    place: int
    length: int
    stamp: int


@dataclass(slots=True)
class _Lane:
    """Tokens that one state advances by.

    Attributes:
        slots: those before, `_MISSING` where there are none, then the tokens.
        rows: of each token, T where no row wants it.
    """

    owner: int
    slots: Array
    rows: Array

    @property
    def num_tokens(self) -> int:
        return len(self.rows)


@dataclass(slots=True)
class _Sequence:
    """One sequence of a batch, on the host.

    Attributes:
        prefix: tokens that all rows see.
        first: logical index of the first row.
        rows: the forward's.
    """

    number: int
    pages: Array
    prefix: int
    first: int
    rows: range
    is_causal: bool
    page_size: int

    @property
    def is_real(self) -> bool:
        """Others fill a batch up, in the padding page."""
        return bool(self.pages[0] != 0)

    @property
    def start(self) -> int:
        """Tokens before the forward's, all of them committed."""
        return self.first if self.is_causal else self.prefix

    @property
    def stays(self) -> bool:
        """Whether all rows do, most likely: one of them is the last committed token, and many are a
        prompt, as the first ones are."""
        is_chain = self.start > 0 and 1 < len(self.rows) <= _MAX_CHAIN_ROWS
        return self.is_causal and not is_chain

    @property
    def end(self) -> int:
        """Tokens behind which the state is kept."""
        return self.first + len(self.rows) if self.stays else self.start

    def slots(self, indices: Array) -> Array:
        """Returns the slots of logical indices; `_MISSING` of negative ones."""
        pages = self.pages[np.maximum(indices, 0) // self.page_size].astype(np.int64)
        slots = pages * self.page_size + indices % self.page_size
        found: Array = np.where(indices < 0, _MISSING, slots)
        return found


class StateStore:
    """Checkpoints, and the plan of each forward; owned by the thread that computes.

    Attributes:
        values: `[num_layers, num_states + 1, num_heads, key_dim, value_dim]` float32; the last is
            the state before the first token, zeros.
    """

    def __init__(self, layout: StateLayout, num_states: int, device: torch.device) -> None:
        size = (layout.num_heads, layout.key_dim, layout.value_dim)
        self.layout = layout
        self.values = torch.zeros((layout.num_layers, num_states + 1, *size), device=device)
        # Of each checkpoint: tokens, 0 without a state; stamp of the last; turn of the last use.
        self._lengths, self._stamps, self._used = np.zeros((3, num_states), np.int64)
        # Rows may come from the pool of another process, whose stamps must not be ours.
        self._next_stamp = 1 + secrets.randbits(62)
        self._turn = 0

    def plan(self, batch: ForwardBatch, read_stamps: Callable[[Tensor], Tensor]) -> StatePlan:
        """Plans a forward, and takes what it will overwrite out of the checkpoints; `keep` enters
        the new ones. Waits for the device, about once a forward.

        Args:
            read_stamps: returns `[N, STAMP_SIZE]` int64 of slots `[N]`.
        """
        self._turn += 1
        sequences, device = _sequences(batch), batch.slots.device
        slots = batch.slots.tolist()
        stamps = range(self._next_stamp, self._next_stamp + len(slots))
        self._next_stamp += len(slots)
        written = dict(zip(slots, stamps, strict=True))
        found = self._find(sequences, written, read_stamps, device)
        kept = self._assign(sequences, found)
        records = tuple(record for _, record in kept)
        # Until they are written.
        self._lengths[[each.place for each in records]] = 0
        none = len(slots)
        lanes = [
            _advancing(each, own.length, none, self.layout.window - 1)
            for each, own in zip(sequences, found, strict=True)
        ]
        candidates = list(_candidates(sequences, batch, none, self.layout.window - 1))
        return StatePlan(
            stamps=_digits(stamps, device),
            loads=_uploaded(
                [len(self._used) if each.place is None else each.place for each in found], device
            ),
            sequences=_blocks(lanes, none, device),
            kept=_uploaded([number for number, _ in kept], device),
            places=_uploaded([each.place for each in records], device),
            candidates=tuple(
                StateGroup(
                    _uploaded([each.owner for each in group], device),
                    _blocks(group, none, device),
                )
                for first in range(0, len(candidates), _GROUP_LANES)
                if (group := candidates[first : first + _GROUP_LANES])
            ),
            records=records,
        )

    def keep(self, plan: StatePlan) -> None:
        """Enters the checkpoints of a forward whose layers have all written them."""
        for each in plan.records:
            self._lengths[each.place] = each.length
            self._stamps[each.place] = each.stamp
            self._used[each.place] = self._turn

    def _find(
        self,
        sequences: Sequence[_Sequence],
        written: dict[int, int],
        read_stamps: Callable[[Tensor], Tensor],
        device: torch.device,
    ) -> list[_Found]:
        """Looks for the longest checkpoint of each sequence.

        Args:
            written: stamps of the forward's rows by slot, which are not in the cache yet.
        """
        slots = np.stack([self._asked(each) for each in sequences])
        wanted = _uploaded(np.maximum(slots, 0).reshape(-1), device)
        stored = np.array(_numbers(read_stamps(wanted)), np.int64).reshape(slots.shape)
        rewritten = np.isin(slots, np.fromiter(written, np.int64))
        is_held = (slots[:, :-1] > 0) & ~rewritten[:, :-1] & self._are_own(stored[:, :-1])
        lengths = np.where(is_held, self._lengths, 0)
        founds = []
        for number, end_slot in enumerate(slots[:, -1].tolist()):
            best = int(lengths[number].argmax())
            length = int(lengths[number, best])
            end_stamp = written.get(end_slot, int(stored[number, -1])) if end_slot > 0 else 0
            founds.append(_Found(best if length else None, length, end_stamp))
        return founds

    def _are_own(self, stamps: Array) -> Array:
        """Whether a row's stamp `[B, S]` is that of the checkpoint."""
        own: Array = stamps == self._stamps
        return own

    def _asked(self, each: _Sequence) -> Array:
        """Returns the slots of the last token of every checkpoint that may be one of the sequence,
        and of its new one; `_MISSING` elsewhere."""
        lengths = np.where(self._lengths <= each.start, self._lengths, 0)
        slots = each.slots(np.append(lengths, each.end) - 1)
        return slots if each.is_real else np.full_like(slots, _MISSING)

    def _assign(
        self, sequences: Sequence[_Sequence], found: Sequence[_Found]
    ) -> list[tuple[int, _Record]]:
        """Gives sequences, by their number, a checkpoint to write: their own, or the one that was
        not used for the longest time. One that finds none keeps nothing."""
        used = {each.place for each in found if each.place is not None}
        self._used[list(used)] = self._turn
        free = iter([place for place in self._used.argsort().tolist() if place not in used])
        taken, records = set[int](), []
        for each, own in zip(sequences, found, strict=True):
            if own.end_stamp == 0:
                continue
            place = own.place if own.place not in taken else None
            place = next(free, None) if place is None else place
            if place is not None:
                taken.add(place)
                records.append((each.number, _Record(place, each.end, own.end_stamp)))
        return records


@dataclass(frozen=True, slots=True)
class _Found:
    """The checkpoint of a sequence, none where None, and the stamp of the last token that its new
    one holds."""

    place: int | None
    length: int
    end_stamp: int


def _sequences(batch: ForwardBatch) -> list[_Sequence]:
    starts, lengths = batch.query_starts.tolist(), batch.kv_lengths.tolist()
    prefixes, are_causal = batch.prefix_lengths.tolist(), batch.is_causal.tolist()
    tables = batch.page_table.cpu().numpy()
    return [
        _Sequence(
            number,
            tables[number],
            prefixes[number],
            lengths[number] - (stop - start),
            range(start, stop),
            are_causal[number],
            batch.page_size,
        )
        for number, (start, stop) in enumerate(itertools.pairwise(starts))
    ]


def _advancing(each: _Sequence, length: int, none: int, history: int) -> _Lane:
    """Returns the tokens from a checkpoint to what is kept."""
    indices = np.arange(length - history, each.end)
    rows = np.full(each.end - length, none, np.int64)
    if each.stays:
        rows[each.first - length :] = each.rows
    return _Lane(each.number, each.slots(indices), rows)


def _candidates(
    sequences: Sequence[_Sequence], batch: ForwardBatch, none: int, history: int
) -> Iterator[_Lane]:
    """Yields the rows that may not stay: a chain as one lane, of a tree the path of each row."""
    mask = None
    for each in sequences:
        if each.stays:
            continue
        before = np.arange(each.start - history, each.start)
        if each.is_causal:
            indices = np.arange(each.start, each.first + len(each.rows))
            yield _Lane(
                each.number, each.slots(np.concatenate((before, indices))), np.array(each.rows)
            )
            continue
        if mask is None:
            assert batch.tail_mask is not None, "rows that are not causal have a mask"
            mask = batch.tail_mask.cpu().numpy()
        for row in each.rows:
            own = each.first + row - each.rows.start - each.prefix
            path = np.append(np.flatnonzero(mask[row, :own]), own) + each.prefix
            rows = np.full(len(path), none, np.int64)
            rows[-1] = row
            yield _Lane(each.number, each.slots(np.concatenate((before, path))), rows)


def _blocks(lanes: Sequence[_Lane], none: int, device: torch.device) -> tuple[StateBlock, ...]:
    """Cuts lanes into blocks; one that has ended is in no further block."""
    blocks = []
    longest = max((lane.num_tokens for lane in lanes), default=0)
    for first in range(0, longest, _BLOCK_TOKENS):
        alive = [number for number, lane in enumerate(lanes) if lane.num_tokens > first]
        size = min(_BLOCK_TOKENS, longest - first)
        history = len(lanes[0].slots) - lanes[0].num_tokens
        slots = np.full((len(alive), history + size), _MISSING, np.int64)
        rows = np.full((len(alive), size), none, np.int64)
        for line, number in enumerate(alive):
            own = lanes[number].slots[first : first + history + size]
            slots[line, : len(own)] = own
            wanted = lanes[number].rows[first : first + size]
            rows[line, : len(wanted)] = wanted
        blocks.append(
            StateBlock(
                _uploaded(alive, device),
                _uploaded(np.maximum(slots, 0).reshape(-1), device),
                torch.from_numpy(slots >= 0).to(device),
                _uploaded(rows.reshape(-1), device),
            )
        )
    return tuple(blocks)


def _uploaded(numbers: Sequence[int] | Array, device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(numbers, np.int64)).to(device)


def _digits(stamps: range, device: torch.device) -> Tensor:
    numbers = np.arange(stamps.start, stamps.stop, dtype=np.int64)
    return torch.from_numpy((numbers[:, None] >> 8 * np.arange(STAMP_SIZE)) & 255).to(device)


def _numbers(digits: Tensor) -> list[int]:
    """Returns the stamps of `[N, STAMP_SIZE]`."""
    numbers = digits.cpu().numpy().astype(np.int64) << 8 * np.arange(STAMP_SIZE)
    stamps: list[int] = numbers.sum(1).tolist()
    return stamps
