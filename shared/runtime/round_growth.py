"""Launches the growth of a round's trees on CUDA, and holds what passes between its kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from shared.kernels.launch import dependent_launch, empties
from shared.kv.batch import ForwardBatch
from shared.runtime.round_batches import RoundBatches, RoundTree
from shared.runtime.round_growth_jit import grow_level
from shared.runtime.round_layout_jit import finish_trees, lay_open_rows
from shared.runtime.round_scores import FusedScores, num_warps_for
from shared.runtime.round_state import LENGTH, OPEN, TAIL, RoundState
from shared.runtime.tree_draft import ScoredRows
from shared.speculation.tree import TreeRows


@dataclass(frozen=True, slots=True)
class UnwrittenTrees:
    """Output tensors for S trees of T rows; see `TreeRows` and `ForwardBatch`.

    Attributes:
        batch_tokens, positions, slots: `[S, T]` int64.
        kv_lengths, prefix_lengths: `[S]` int32.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    visible: Tensor
    batch_tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_lengths: Tensor
    prefix_lengths: Tensor

    @classmethod
    def of(cls, num_slots: int, num_rows: int, device: torch.device) -> UnwrittenTrees:
        wide = empties(6, (num_slots, num_rows), torch.int64, device)
        token_ids, parents, depths, batch_tokens, positions, slots = wide
        visible = torch.empty((num_slots, num_rows, num_rows), dtype=torch.bool, device=device)
        lengths, prefixes = empties(2, (num_slots,), torch.int32, device)
        return cls(
            *(token_ids, parents, depths, visible),
            *(batch_tokens, positions, slots, lengths, prefixes),
        )

    def written(self, state: RoundState, batches: RoundBatches) -> RoundTree:
        """Returns the trees, which a kernel has written by now."""
        batch = batches.fixed(
            token_ids=self.batch_tokens,
            positions=self.positions,
            slots=self.slots,
            kv_lengths=self.kv_lengths,
            prefix_lengths=self.prefix_lengths,
            page_table=state.page_table,
            tail_mask=None if batches.shape.is_chain else self.visible.flatten(0, 1),
        )
        return RoundTree(TreeRows(self.token_ids, self.parents, self.depths, self.visible), batch)


# Pairs of nodes that are compared at once.
_COMPARED = 4096


class FusedGrowth:
    """See `Growth`. Where choices are looked for, the leaves' level is computed as well."""

    def __init__(self, state: RoundState, batches: RoundBatches, scores: FusedScores) -> None:
        tree, device = batches.shape.tree, state.numbers.device
        self._state, self._batches, self._shape = state, batches, batches.shape
        self.scores = scores
        self._level = 0
        self._num_levels = tree.num_steps if scores.num_choices else tree.num_steps - 1
        num_beams = max(self._num_levels, 1) * state.num_slots * tree.topk
        self._num_candidates = batches.shape.num_candidates

        def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        found = (state.num_slots, self._num_candidates)
        self._tokens, self._parents, self._rows = (empty(*found) for _ in range(3))
        self._paths = empty(*found, dtype=torch.float32)
        self._selected, self._beam_paths = empty(num_beams), empty(num_beams, dtype=torch.float32)
        width = max(self._num_levels, 1) * tree.topk
        self._visible = empty(num_beams, width, dtype=torch.bool)
        wide = [empty(num_beams, dtype=torch.int64) for _ in range(4)]
        self._parent_rows, self._token_ids, self._positions, self._slots = wide
        self._kv_lengths = empty(max(self._num_levels, 1), state.num_slots)
        self._prefix_lengths = empty(state.num_slots)

    def add(self, logits: Tensor) -> None:
        """See `Growth.add`."""
        state, tree, scored = self._state, self._shape.tree, self.scores.best(logits)
        rows = len(logits) // state.num_slots
        (num_lists, list_size), num_blocks = scored.keys.shape[1:], scored.maxima.shape[1]
        block_rows, block_children = map(triton.next_power_of_2, (rows, rows * tree.topk))
        lanes = triton.next_power_of_2(max(num_lists, tree.topk))
        level, first = self._level, 0 if self._level == 0 else tree.topk
        first += max(level - 1, 0) * tree.topk**2
        grow_level[(state.num_slots,)](
            scored.keys, num_lists, list_size, scored.maxima, scored.sums, num_blocks,
            self._tokens, self._parents, self._paths,
            self._selected, self._beam_paths, self._visible, self._parent_rows,
            self._token_ids, self._positions, self._slots, self._kv_lengths, self._prefix_lengths,
            state.numbers, state.head_page_table, level, first, self._num_candidates,
            state.numbers.stride(0), state.head_page_table.stride(0),
            ROWS=rows, TOPK=tree.topk, NUM_LEVELS=max(self._num_levels, 1),
            IS_LAST=level == self._num_levels,
            LENGTH=LENGTH, PAGE_SIZE=self._batches.page_size,
            BLOCK_ROWS=block_rows, BLOCK_TOPK=triton.next_power_of_2(tree.topk),
            LANES=lanes, BLOCKS=triton.next_power_of_2(num_blocks),
            BLOCK_CHILDREN=block_children, CHUNK=_chunk(block_children),
            BLOCK_VISIBLE=triton.next_power_of_2(self._visible.shape[1]),
            num_warps=num_warps_for(block_rows * lanes),
            **dependent_launch(logits.device, state.num_slots),
        )  # fmt: skip
        self._level += 1

    def beam(self) -> tuple[ForwardBatch, Tensor]:
        """See `Growth.beam`."""
        level, tree = self._level - 1, self._shape.tree
        size = (self._state.num_slots, tree.topk)
        rows = slice(level * size[0] * size[1], (level + 1) * size[0] * size[1])
        batch = self._batches.fixed(
            token_ids=self._token_ids[rows].view(size),
            positions=self._positions[rows].view(size),
            slots=self._slots[rows].view(size),
            kv_lengths=self._kv_lengths[level],
            prefix_lengths=self._prefix_lengths,
            page_table=self._state.head_page_table,
            tail_mask=None if tree.topk == 1 else self._visible[rows],
        )
        return batch, self._parent_rows[rows]

    def scored(self) -> ScoredRows:
        """See `Growth.scored`."""
        tree, paths = self._finish()
        return ScoredRows(tree.rows, paths, self._beams())

    def finish(self) -> RoundTree:
        """See `Growth.finish`."""
        return self._finish()[0]

    def _beams(self) -> Tensor:
        """Returns the nodes that were computed, see `ScoredRows`."""
        num_slots, topk = self._state.num_slots, self._shape.tree.topk
        num_beams = self._num_levels * num_slots * topk
        size = (self._num_levels, num_slots, topk)
        # A level's rows lie sequence by sequence; all of the first hang off the root.
        parents = self._parent_rows[:num_beams].view(size) % topk
        parents[:1].zero_()
        return torch.stack((self._token_ids[:num_beams].view(size), parents)).transpose(1, 2)

    def _finish(self) -> tuple[RoundTree, Tensor]:
        """Returns also the score `[S, T]` float32 of each node's path; the root's is 0."""
        state, shape, device = self._state, self._shape, self._tokens.device
        num_slots, num_rows = state.num_slots, shape.num_tree_rows
        tree = UnwrittenTrees.of(num_slots, num_rows, device)
        paths = torch.empty((num_slots, num_rows), device=device)
        block_candidates = triton.next_power_of_2(self._num_candidates)
        finish_trees[(num_slots,)](
            self._tokens, self._parents, self._paths, self._rows,
            tree.token_ids, tree.parents, tree.depths, paths, tree.visible,
            tree.batch_tokens, tree.positions, tree.slots, tree.kv_lengths, tree.prefix_lengths,
            state.numbers, state.page_table, state.numbers.stride(0), state.page_table.stride(0),
            NUM_CANDIDATES=self._num_candidates, NUM_ROWS=num_rows, MAX_DEPTH=shape.tree.num_steps,
            LENGTH=LENGTH, OPEN=OPEN, TAIL=TAIL, PAGE_SIZE=self._batches.page_size,
            BLOCK_CANDIDATES=block_candidates, CHUNK=_chunk(block_candidates),
            BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=8,
            **dependent_launch(device, num_slots),
        )  # fmt: skip
        return tree.written(state, self._batches), paths


def _chunk(num_nodes: int) -> int:
    """Returns with how many nodes each of a power of two is compared at once."""
    return min(num_nodes, max(_COMPARED // num_nodes, 1))


def lay_out_open_rows(state: RoundState, batches: RoundBatches) -> tuple[ForwardBatch, Tensor]:
    """Returns what `RoundBatches.of_open_rows` returns, in one launch."""
    num_slots, num_rows = state.open_tokens.shape
    device = state.numbers.device
    wide = empties(4, (num_slots, num_rows), torch.int64, device)
    token_ids, positions, slots, feature_slots = wide
    lengths, prefixes = empties(2, (num_slots,), torch.int32, device)
    last_rows = torch.empty(num_slots, dtype=torch.int64, device=device)
    lay_open_rows[(num_slots,)](
        state.numbers, state.head_page_table, state.page_table,
        token_ids, positions, slots, feature_slots, lengths, prefixes, last_rows,
        state.numbers.stride(0), state.head_page_table.stride(0), state.page_table.stride(0),
        NUM_ROWS=num_rows, LENGTH=LENGTH, OPEN=OPEN, TAIL=TAIL, PAGE_SIZE=batches.page_size,
        BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=1,
        **dependent_launch(device, num_slots),
    )  # fmt: skip
    batch = batches.fixed(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        kv_lengths=lengths,
        prefix_lengths=prefixes,
        page_table=state.head_page_table,
        tail_mask=None,
        logit_rows=last_rows,
    )
    return batch, feature_slots.flatten()
