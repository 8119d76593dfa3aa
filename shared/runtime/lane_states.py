"""Recurrent states of the lanes of rounds, whose forwards are planned on the device.

A lane has a checkpoint of its own, which no other sequence finds. A forward first advances it by
the tokens that the round before committed, and then computes the paths from it to all leaves of the
tree, see `StateInputs`. All sizes are fixed, so that a CUDA graph can do it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shared.kernels.delta_layer import NOWHERE, DeltaLanes
from shared.kv.leases import PADDING_PAGE
from shared.kv.pool import KvPool
from shared.kv.state_plan import StateInputs
from shared.kv.upload import uploaded_numbers
from shared.models.decoder import Decoder
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_state import NewLane, RoundState
from shared.speculation.tree import NO_TOKEN


class LaneStates:
    """The states of all slots of one `RoundState`. Owned by the thread that queues rounds."""

    def __init__(self, decoder: Decoder, pool: KvPool, state: RoundState) -> None:
        assert pool.states is not None
        self._decoder, self._pool, self._store, self._state = decoder, pool, pool.states, state
        device = pool.device
        # Checkpoint of each slot, and the number of tokens that it holds.
        self._places = torch.full((state.num_slots,), NOWHERE, device=device)
        self._held = torch.zeros_like(self._places)
        self._next_stamp = torch.tensor([1 + secrets.randbits(62)], device=device)
        self._taken: dict[int, int] = {}

    def join(self, lanes: Mapping[int, NewLane]) -> None:
        """Gives lanes, by slot, checkpoints of all but their last tokens; waits for the device."""
        assert not any(lane.reads_prompt for lane in lanes.values()), "rows without a state"
        slots, numbers = list(lanes), [len(lane.token_ids) - 1 for lane in lanes.values()]
        taken = dict.fromkeys(slots, NOWHERE)
        # A checkpoint that two lanes start from is free once both have their own.
        while left := [slot for slot in slots if taken[slot] == NOWHERE]:
            starts = [(lanes[slot].pages, len(lanes[slot].token_ids) - 1) for slot in left]
            plan, places = self._pool.lend_states(starts)
            assert (places != NOWHERE).any(), "more lanes than states"
            self._decoder.advance_states(self._pool, plan.upload(self._device))
            taken |= dict(zip(left, places.tolist(), strict=True))
        self._taken |= taken
        columns = uploaded_numbers([slots, [taken[slot] for slot in slots], numbers], self._device)
        self._places.index_copy_(0, columns[0], columns[1])
        self._held.index_copy_(0, columns[0], columns[2])

    def leave(self, slots: Sequence[int]) -> None:
        """Gives back the checkpoints of slots, before their pages are cleared: the stamps of the
        tokens that they hold now identify them. Waits for nothing."""
        own = [slot for slot in slots if slot in self._taken]
        if not own:
            return
        places = [self._taken.pop(slot) for slot in own]
        index, targets = uploaded_numbers([own, places], self._device)
        held = self._held.index_select(0, index)
        tables = self._state.page_table.index_select(0, index)
        last = self._pool_slots(tables, (held - 1).unsqueeze(1)).flatten()
        self._store.give_back(places, targets, held, self._pool.read_stamps(last))
        self._places.index_fill_(0, index, NOWHERE)

    @contextmanager
    def advancing(self, tree: RoundTree, num_levels: int) -> Iterator[StateInputs]:
        """Plans how the forward of trees, which the body runs, advances the states of its slots.

        Args:
            num_levels: most rows of a path, the root's included.
        """
        batch, num_slots = tree.batch, len(tree.rows.token_ids)
        places, held = self._places[:num_slots], self._held[:num_slots]
        start = batch.prefix_lengths.long()
        # A graph may be captured over empty slots while other slots have lanes.
        is_real = (places != NOWHERE) & (batch.page_table[:, 0] != PADDING_PAGE)
        stamps = self._next_stamp + torch.arange(len(batch.slots), device=self._device)
        self._next_stamp.add_(len(batch.slots))
        sequences, before = self._committed(tree, places, held, start, is_real)
        candidates, paths = self._paths(tree, places, start, is_real, num_levels)
        candidates[:, 2] += len(before)
        all_places = torch.cat((before, paths))
        is_moved = is_real & (start > held)
        is_leaf = _leaves(tree) & is_real.unsqueeze(1)
        yield StateInputs(
            stamps,
            _front(sequences, is_moved, all_places),
            _front(candidates, is_leaf.flatten(), all_places),
            prompts=None,
        )
        held.copy_(torch.where(is_real, start, held))

    def _committed(
        self, tree: RoundTree, places: Tensor, held: Tensor, start: Tensor, is_real: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns table and places of the committed tokens between the states and the trees."""
        history, most = self._history, self._state.open_tokens.shape[1]
        size = history + most
        indices = (held - history).unsqueeze(1) + torch.arange(size, device=self._device)
        is_there = (indices >= 0) & (indices < start.unsqueeze(1)) & is_real.unsqueeze(1)
        slots = self._pool_slots(tree.batch.page_table, indices.clamp_min(0))
        slots = torch.where(is_there, slots, NOWHERE)
        firsts = torch.arange(len(places), device=self._device) * size
        table = torch.stack((places, places, firsts, start - held), dim=1)
        return table, torch.stack((slots, torch.full_like(slots, NOWHERE)), dim=2).flatten(0, 1)

    def _paths(
        self, tree: RoundTree, places: Tensor, start: Tensor, is_real: Tensor, num_levels: int
    ) -> tuple[Tensor, Tensor]:
        """Returns table and places of the path to each row. Paths that share nodes write the same
        bits for them."""
        rows, history = tree.rows, self._history
        num_slots, num_rows = rows.token_ids.shape
        numbers = torch.arange(num_rows, device=self._device)
        # One extra column collects the rows that a row does not see.
        levels = torch.where(rows.visible, rows.depths.unsqueeze(1), num_levels)
        path = torch.full((num_slots, num_rows, num_levels + 1), NOWHERE, device=self._device)
        path = path.scatter(2, levels, numbers.expand_as(levels))[:, :, :num_levels]
        is_node = path != NOWHERE
        firsts = (torch.arange(num_slots, device=self._device) * num_rows).view(-1, 1, 1)
        read = torch.where(is_node, path + firsts, NOWHERE)
        slots = tree.batch.slots.index_select(0, read.clamp_min(0).flatten()).view_as(read)
        slots = torch.where(is_node, slots, NOWHERE)
        indices = start.unsqueeze(1) + torch.arange(-history, 0, device=self._device)
        above = self._pool_slots(tree.batch.page_table, indices.clamp_min(0))
        above = torch.where((indices >= 0) & is_real.unsqueeze(1), above, NOWHERE)
        above = above.unsqueeze(1).expand(-1, num_rows, -1)
        lines = (
            torch.cat((above, slots), dim=2),
            torch.cat((torch.full_like(above, NOWHERE), read), dim=2),
        )
        size, count = history + num_levels, num_slots * num_rows
        table = torch.stack(
            (
                places.unsqueeze(1).expand(-1, num_rows).reshape(-1),
                torch.full((count,), NOWHERE, device=self._device),
                torch.arange(count, device=self._device) * size,
                rows.depths.flatten() + 1,
            ),
            dim=1,
        )
        return table, torch.stack(lines, dim=3).view(-1, 2)

    def _pool_slots(self, page_table: Tensor, indices: Tensor) -> Tensor:
        """Returns the pool's slots `[B, R]` of logical indices, none of them negative."""
        size = self._pool.page_size
        pages = page_table.gather(1, (indices // size).clamp_max(page_table.shape[1] - 1))
        return pages.long() * size + indices % size

    @property
    def _history(self) -> int:
        return self._store.layout.window - 1

    @property
    def _device(self) -> torch.device:
        return self._pool.device


def _leaves(tree: RoundTree) -> Tensor:
    """Returns which rows `[S, T]` have no children; at least the root of an empty tree."""
    is_node = tree.rows.token_ids != NO_TOKEN
    is_node[:, 0] = True
    num_below = (tree.rows.visible & is_node.unsqueeze(2)).sum(dim=1)
    return is_node & (num_below == 1)


def _front(table: Tensor, is_used: Tensor, places: Tensor) -> DeltaLanes:
    """Returns the lanes of a table, those in use first."""
    targets = torch.where(is_used, is_used.cumsum(0) - 1, len(table))
    ordered = torch.zeros((len(table) + 1, table.shape[1]), dtype=table.dtype, device=table.device)
    ordered.index_copy_(0, targets, table)
    return DeltaLanes(ordered[:-1], is_used.sum(0, keepdim=True), places)
