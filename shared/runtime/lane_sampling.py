"""Sampling that only some lanes use: penalties, bias, masks, a minimum length, log probabilities.

`RoundSampling` draws for all lanes at once. The rows of *shaped* lanes, those with penalties, bias,
bans or a minimum length, are drawn once more on their own by the same `draw_tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kv.upload import uploaded, uploaded_numbers
from shared.runtime.host_copy import HostCopy, PinnedMemory
from shared.runtime.round_state import LENGTH, NewLane, RoundState
from shared.speculation.distributions import packed_logprobs, unpacked_logprobs
from shared.speculation.row_sampling import (
    RowSampling,
    TokenCounts,
    TreeMasks,
    histogram,
    mask_logits,
    row_sampling,
    uploaded_tensor,
)
from shared.speculation.tree import NO_TOKEN, TreeRows
from shared.speculation.verify import draw_tokens
from shared.tokens import TokenLogprobs, TokenTree

# Masked lanes, whose draws the host restricts: copies of their trees, and the masks of their rows.
#
# Grammars run on the host. It gets the trees as soon as they have grown, and computes the masks of
# their rows while the target computes the rows.


@dataclass(frozen=True, slots=True)
class LaneTree:
    """The tree of one lane.

    Attributes:
        rows: row of the root, then of each node; the tree may have fewer nodes than rows.
    """

    tree: TokenTree
    rows: Sequence[int]

    @classmethod
    def of(cls, token_ids: Sequence[int], parents: Sequence[int] | None) -> LaneTree:
        """Args:
        token_ids: tokens of all rows, the root's first; -1 where there is no node.
        parents: the row of each row's parent; None for a chain.
        """
        rows = [0, *(row for row in range(1, len(token_ids)) if token_ids[row] != NO_TOKEN)]
        tokens = tuple(token_ids[row] for row in rows[1:])
        if parents is None:
            return cls(TokenTree.chain(tokens), rows)
        nodes = {row: node for node, row in enumerate(rows, -1)}
        above = tuple(nodes[parents[row]] if parents[row] else None for row in rows[1:])
        return cls(TokenTree(tokens, above), rows)


@dataclass(frozen=True, slots=True)
class LaneMasks:
    """Masks of the trees of some lanes.

    Attributes:
        rows: rows of the trees, by lane, in the order of `masks`.
    """

    rows: Mapping[int, Sequence[int]]
    masks: TreeMasks


class TreeCopies:
    """Copies the trees of one round at a time to the host.

    Args:
        max_rows: most rows of all trees of a round together.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._memory: list[PinnedMemory | None] = [None, None]
        if device.type == "cuda":
            self._memory = [PinnedMemory(max_rows, torch.int64) for _ in range(2)]
        self._tokens: HostCopy | None = None
        self._parents: HostCopy | None = None

    def queue(self, trees: TreeRows, *, are_chains: bool) -> None:
        """Queues the copy of all trees."""
        tokens, parents = self._memory
        self._tokens = HostCopy(trees.token_ids, tokens)
        self._parents = None if are_chains else HostCopy(trees.parents, parents)

    def read(self, slots: Sequence[int]) -> list[LaneTree]:
        """Waits for the last queued copy; returns the trees of some slots."""
        assert self._tokens is not None, "nothing was queued"
        tokens = self._tokens.read()
        parents = None if self._parents is None else self._parents.read()
        return [
            LaneTree.of(tokens[slot].tolist(), None if parents is None else parents[slot].tolist())
            for slot in slots
        ]


@dataclass(frozen=True, slots=True)
class AppliedMasks:
    """Logits in which forbidden tokens are masked.

    Attributes:
        barred: `[K]` int64, rows that must not draw.
        raw: rows with log probabilities, and their raw logits; None for none.
    """

    logits: Tensor
    barred: Tensor
    raw: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls, logits: Tensor, masks: LaneMasks, num_rows: int, scored: Sequence[int]
    ) -> AppliedMasks:
        """Applies masks in place.

        Args:
            logits: `[S * T, V]`.
            masks: by slot.
            num_rows: T.
            scored: slots of requests that want log probabilities.
        """
        own = [slot * num_rows + row for slot, rows in masks.rows.items() for row in rows]
        rows = np.array(own, np.int64)
        # A root draws in any case: if no token is allowed after it, its sequence ends.
        is_barred = ~masks.masks.is_open & (rows % num_rows > 0)
        scored_rows = [slot * num_rows + row for slot in scored for row in range(num_rows)]
        arrays = (rows, rows[is_barred], np.array(scored_rows, np.int64))
        places, barred, kept = uploaded(arrays, logits.device)
        raw = (kept, logits.index_select(0, kept)) if scored_rows else None
        mask_logits(logits, places, masks.masks.words)
        return cls(logits, barred, raw)

    def drawn(self, tokens: Tensor) -> None:
        """Restores raw logits after the rows have drawn, and removes the draws of barred rows.

        Args:
            tokens: `[S, T]` int64; -1 is written where a row must not draw.
        """
        if len(self.barred):
            tokens.view(-1).index_fill_(0, self.barred, NO_TOKEN)
        if self.raw is not None:
            self.logits.index_copy_(0, *self.raw)


_MAX_ROWS = 256
"""Most rows drawn at once: each takes a few numbers for every token of the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """P of the shaped lanes, with the sampling parameters of their rows.

    Attributes:
        slots: `[P]` int64.
        sampling: of P * T rows, without the bans of a minimum length.
        places: rows of the lanes in `_LaneCounts`; None if no lane of the group has penalties.
        bans: rows `[N]`, token ids `[N]`, and the length `[N]` from which on each token may be
            drawn; None for none.
    """

    slots: Tensor
    sampling: RowSampling
    places: Tensor | None
    bans: tuple[Tensor, Tensor, Tensor] | None


@dataclass(frozen=True, slots=True)
class QueuedLogprobs:
    """Log probabilities on their way to the host, W rows for each lane.

    Attributes:
        num_top: number of alternatives by slot, in the order of the rows.
    """

    packed: HostCopy
    num_top: Mapping[int, int]

    def read(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Waits for the device; returns the log probabilities of each lane's rows by slot."""
        packed = self.packed.read()
        width = len(packed) // len(self.num_top)
        counts = [count for count in self.num_top.values() for _ in range(width)]
        logprobs = unpacked_logprobs(packed, counts)
        return {
            slot: logprobs[place * width : (place + 1) * width]
            for place, slot in enumerate(self.num_top)
        }


class LaneSampling:
    """The shaped lanes of one state. T is the rows of each tree, which may differ by round."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shaped: dict[int, NewLane] = {}
        self._num_top: dict[int, int] = {}
        self._temperatures: dict[int, float] = {}
        # By number of tree rows; emptied when a shaped lane joins or leaves.
        self._groups: dict[int, list[_Group]] = {}
        self._counts = _LaneCounts(device)

    def join(self, slot: int, new_lane: NewLane) -> None:
        """Registers a sequence that has got a lane."""
        if new_lane.top_logprobs is not None:
            self._num_top[slot] = new_lane.top_logprobs
            self._temperatures[slot] = new_lane.logprob_temperature
        if new_lane.is_shaped:
            self._shaped[slot] = new_lane
            self._groups.clear()
        if new_lane.sampling.has_penalties:
            self._counts.join(slot, new_lane)

    def leave(self, slot: int) -> None:
        """Removes the sequence of a lane."""
        self._num_top.pop(slot, None)
        self._counts.leave(slot)
        if self._shaped.pop(slot, None) is not None:
            self._groups.clear()

    def masked(self, logits: Tensor, masks: LaneMasks, num_rows: int) -> AppliedMasks:
        """Applies masks to `logits` `[S * T, V]` in place; see `AppliedMasks.drawn`.

        Args:
            masks: by slot.
            num_rows: T.
        """
        scored = [slot for slot in self._num_top if slot in masks.rows]
        return AppliedMasks.of(logits, masks, num_rows, scored)

    def redraw(self, drawn: Tensor, logits: Tensor, state: RoundState, tree: TreeRows) -> None:
        """Draws the rows of shaped lanes anew.

        Args:
            drawn: `[S, T]` int64, written.
            logits: `[S * T, V]` of any float type.
        """
        if not self._shaped:
            return
        num_rows = drawn.shape[1]
        if num_rows not in self._groups:
            self._counts.stack(logits.shape[1])
            slots, size = sorted(self._shaped), max(_MAX_ROWS // num_rows, 1)
            self._groups[num_rows] = [
                self._group(slots[first : first + size], num_rows)
                for first in range(0, len(slots), size)
            ]
        for group in self._groups[num_rows]:
            self._redraw(group, drawn, logits, state, tree)

    def committed(self, result: Tensor, first_column: int) -> None:
        """Counts the tokens that a round commits, before the next round draws.

        Args:
            result: `[S, C]` int64: column 0 counts committed tokens, which begin at `first_column`.
        """
        self._counts.committed(result, first_column)

    def logprobs(self, logits: Tensor, rows: Tensor, tokens: Tensor) -> QueuedLogprobs | None:
        """Queues the log probabilities of lanes whose requests want them; None if no lane's does.

        Args:
            rows: `[S, W]` int64, the row that draws each committed token.
            tokens: `[S, W]` int64, the committed tokens, then undefined values.
        """
        num_top = {slot: count for slot, count in self._num_top.items() if slot < len(rows)}
        if not num_top:
            return None
        slots = uploaded_numbers(list(num_top), self._device)
        own_rows = rows.index_select(0, slots).flatten()
        own_tokens = tokens.index_select(0, slots).flatten()
        scaled = self._scaled(logits.index_select(0, own_rows), list(num_top), rows.shape[1])
        packed = packed_logprobs(scaled, own_tokens, max(num_top.values()))
        return QueuedLogprobs(HostCopy(packed), num_top)

    def _scaled(self, logits: Tensor, slots: Sequence[int], width: int) -> Tensor:
        """Returns logits over each lane's log-probability temperature, `width` rows a lane."""
        temperatures = [self._temperatures[slot] for slot in slots]
        if all(temperature == 1.0 for temperature in temperatures):
            return logits
        column = uploaded_tensor(torch.tensor(temperatures).repeat_interleave(width), self._device)
        return logits.to(torch.float32) / column.unsqueeze(1)

    def _redraw(
        self, group: _Group, drawn: Tensor, logits: Tensor, state: RoundState, tree: TreeRows
    ) -> None:
        num_rows = drawn.shape[1]
        steps = torch.arange(num_rows, device=self._device)
        rows = (group.slots.unsqueeze(1) * num_rows + steps).flatten()
        depths = tree.depths.index_select(0, group.slots)
        lengths = state.numbers[:, LENGTH].index_select(0, group.slots).unsqueeze(1)
        positions = (lengths + depths).flatten()
        counts = None
        if group.places is not None:
            tokens = tree.token_ids.index_select(0, group.slots)
            seen = tree.visible.index_select(0, group.slots)
            counts = self._counts.of_rows(group.places, tokens, seen)
        sampling = group.sampling
        if group.bans is not None:
            places, token_ids, lengths = group.bans
            is_early = positions.index_select(0, places) < lengths
            sampling = sampling.also_banning(
                places, token_ids, torch.where(is_early, -math.inf, 0.0)
            )
        tokens = draw_tokens(logits.index_select(0, rows), sampling, positions, counts)
        drawn.view(-1).index_copy_(0, rows, tokens)

    def _group(self, slots: Sequence[int], num_rows: int) -> _Group:
        lanes = [self._shaped[slot] for slot in slots]
        sampling = row_sampling(
            [lane.sampling for lane in lanes], [num_rows] * len(lanes), device=self._device
        )
        has_counts = sampling.penalties is not None
        return _Group(
            uploaded_numbers(slots, self._device),
            sampling,
            uploaded_numbers(self._counts.places(slots), self._device) if has_counts else None,
            self._bans(lanes, num_rows),
        )

    def _bans(self, own: Sequence[NewLane], num_rows: int) -> tuple[Tensor, Tensor, Tensor] | None:
        triples = [
            (place * num_rows + row, token_id, lane.min_length)
            for place, lane in enumerate(own)
            for row in range(num_rows)
            for token_id in sorted(lane.stop_token_ids)
            if lane.min_length > len(lane.token_ids)
        ]
        if not triples:
            return None
        rows, tokens, lengths = uploaded_numbers(list(zip(*triples, strict=True)), self._device)
        return rows, tokens, lengths


class _LaneCounts:
    """Token counts of the lanes with penalties."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._new: dict[int, NewLane] = {}
        self._places: dict[int, int] = {}
        self._output = torch.zeros(0, 0, device=device)
        self._in_prompt = torch.zeros(0, 0, dtype=torch.bool, device=device)
        self._slots = torch.zeros(0, dtype=torch.int64, device=device)

    def join(self, slot: int, new_lane: NewLane) -> None:
        self._new[slot] = new_lane

    def leave(self, slot: int) -> None:
        self._new.pop(slot, None)
        self._places.pop(slot, None)

    def places(self, slots: Sequence[int]) -> list[int]:
        """Returns the row of each lane; without penalties any row, because nothing reads it."""
        return [self._places.get(slot, 0) for slot in slots]

    def stack(self, vocab_size: int) -> None:
        """Adds rows for the lanes that joined, and drops the rows of lanes that left."""
        kept = list(self._places)
        if not (self._new or len(kept) < len(self._slots)):
            return
        new = self._new.values()
        output = histogram([lane.output_token_ids for lane in new], vocab_size, self._device)
        prompts = histogram([lane.prompt_token_ids for lane in new], vocab_size, self._device)
        in_prompt = prompts > 0
        if kept:
            index = uploaded_numbers([self._places[slot] for slot in kept], self._device)
            output = torch.cat((self._output.index_select(0, index), output))
            in_prompt = torch.cat((self._in_prompt.index_select(0, index), in_prompt))
        self._output, self._in_prompt = output, in_prompt
        slots = [*kept, *self._new]
        self._places = {slot: place for place, slot in enumerate(slots)}
        self._slots = uploaded_numbers(slots, self._device)
        self._new = {}

    def committed(self, result: Tensor, first_column: int) -> None:
        """See `LaneSampling.committed`."""
        if not len(self._slots):
            return
        # The slot of a lane that has left since may be beyond the slots of this round.
        own = result.index_select(0, self._slots.clamp_max(len(result) - 1))
        tokens = own[:, first_column:]
        steps = torch.arange(tokens.shape[1], device=self._device)
        is_counted = (steps < own[:, :1]).to(self._output.dtype)
        self._output.scatter_add_(1, tokens, is_counted)

    def of_rows(self, places: Tensor, tokens: Tensor, seen: Tensor) -> TokenCounts:
        """Returns the counts `[P * T, V]` of each row: those of its lane and of its path's nodes.

        Args:
            tokens: `[P, T]` int64, the roots first, negative where there is no node.
            seen: `[P, T, T]` bool, each row's ancestors and itself.
        """
        num_rows = tokens.shape[1]
        output = self._output.index_select(0, places).repeat_interleave(num_rows, dim=0)
        # The root is committed, so it is counted already.
        on_path = (seen & (tokens >= 0).unsqueeze(1)).to(output.dtype)
        on_path[:, :, 0] = 0.0
        index = tokens.clamp_min(0).unsqueeze(1).expand_as(on_path)
        output.scatter_add_(1, index.flatten(0, 1), on_path.flatten(0, 1))
        in_prompt = self._in_prompt.index_select(0, places).repeat_interleave(num_rows, dim=0)
        return TokenCounts(output, in_prompt | (output > 0))
