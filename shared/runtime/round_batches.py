"""The forwards of a speculative round as batches of fixed shapes, laid out on the device.

Every sequence takes the same number of rows, so only contents change from round to round, and
tensors that depend only on the number of rows are made once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from shared.kernels.launch import empties
from shared.kernels.split_plan import MAX_PLAIN_ROWS
from shared.kv.batch import ForwardBatch
from shared.kv.upload import uploaded
from shared.runtime.round_state import RoundState
from shared.speculation.tree import NO_TOKEN, Beam, TreeRows, rows_of_parents
from shared.tokens import TreeShape

WALK_TOKEN, WALK_PARENT, WALK_LINE = range(3)
"""Columns of `WalkedTree.numbers`; the rows on the path take the rest."""
MAX_PENDING_ROUNDS = 2
"""Rounds that may be launched before the host reads the first of them."""


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Fixed sizes of a round.

    Attributes:
        tree: shape of the trees, without levels and children that no tree could keep.
        num_tree_rows: T, the root and the nodes.
        max_kv_length: longest sequence, the rows of a round included.
        num_outcomes: B, verdicts of a lane that the draft may prepare chains for; 0 for none.
        block_size: rows that the draft computes at once, from the root on; 0 if it grows trees
            level by level.
    """

    tree: TreeShape
    num_tree_rows: int
    max_kv_length: int
    num_outcomes: int = 0
    block_size: int = 0

    @classmethod
    def of(
        cls,
        tree: TreeShape,
        *,
        draft_vocab_size: int,
        max_context_tokens: int,
        num_outcomes: int = 0,
        block_size: int = 0,
    ) -> RoundShape:
        """Returns the sizes of rounds over sequences of up to `max_context_tokens`.

        Args:
            num_outcomes: verdicts that a draft can prepare chains for; ignored but by short chains.
        """
        steps = min(tree.num_steps, tree.max_node_count)
        topk = min(tree.topk, draft_vocab_size)
        grown = TreeShape(steps, topk, tree.num_draft_tokens)
        num_rows = 1 + min(grown.max_node_count, _num_candidates(grown))
        # The draft computes committed tokens and the verified chain as one run of rows.
        is_short = topk == 1 and 2 * steps + 1 <= MAX_PLAIN_ROWS
        outcomes = num_outcomes if is_short else 0
        spare = max(num_rows, (steps - 1) * topk + 1, steps * (1 + outcomes), block_size)
        # Further rounds may be under way when the host learns that a sequence has ended.
        spare += MAX_PENDING_ROUNDS * (steps + 1)
        return cls(grown, num_rows, max_context_tokens + spare, outcomes, block_size)

    @property
    def num_candidates(self) -> int:
        """Number of scored nodes, of which a tree keeps the best."""
        return _num_candidates(self.tree)

    @property
    def max_committed(self) -> int:
        """Most tokens that a round commits to one sequence."""
        return self.tree.num_steps + 1

    def num_pages(self, page_size: int) -> int:
        """Returns the number of pages of the longest sequence."""
        return -(-self.max_kv_length // page_size)

    def num_kv_tokens(self, length: int) -> int:
        """Returns how many tokens the target's pages must cover for a round at `length`."""
        return length - 1 + self.num_tree_rows

    def num_head_kv_tokens(self, length: int) -> int:
        """Returns how many rows the draft's pages must cover for a round at `length`. A language
        model has a row more than a head."""
        steps, outcomes = self.tree.num_steps, self.num_outcomes
        num_ahead = steps * (1 + outcomes) if outcomes else 0
        return length + max((steps - 1) * self.tree.topk, num_ahead, self.block_size - 1)

    @property
    def is_chain(self) -> bool:
        """Whether the tree needs no mask: kernels take it as one short causal run of rows."""
        return self.tree.topk == 1 and self.num_tree_rows <= MAX_PLAIN_ROWS


def _num_candidates(tree: TreeShape) -> int:
    return tree.topk + (tree.num_steps - 1) * tree.topk**2


@dataclass(frozen=True, slots=True)
class SizedShape:
    """A round shape with its batch size.

    Attributes:
        max_sequences: most lanes of a round.
    """

    shape: RoundShape
    max_sequences: int


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Sizes of a `RoundState` for rounds of several shapes.

    Attributes:
        num_slots: S.
        max_open_rows: W, most tokens that a round commits to one sequence.
        num_pages: P, pages of the longest sequence.
    """

    num_slots: int
    max_open_rows: int
    num_pages: int

    @classmethod
    def of(cls, shapes: Sequence[SizedShape], page_size: int) -> StateSizes:
        """Returns sizes that hold rounds of every shape."""
        return cls(
            max(sized.max_sequences for sized in shapes),
            max(sized.shape.max_committed for sized in shapes),
            max(sized.shape.num_pages(page_size) for sized in shapes),
        )

    def empty_state(self, device: torch.device) -> RoundState:
        """Returns a state without sequences, for a head of one layer."""
        return RoundState.empty(
            self.num_slots,
            max_open_rows=self.max_open_rows,
            num_pages=self.num_pages,
            device=device,
        )


def state_of_shape(state: RoundState, sized: SizedShape) -> RoundState:
    """Returns the view of a state for rounds of one shape."""
    return state.first(sized.max_sequences).narrowed(sized.shape.max_committed)


@dataclass(frozen=True, slots=True)
class RoundTree:
    """Trees, and their rows as a batch for the target, the roots included."""

    rows: TreeRows
    batch: ForwardBatch


@dataclass(frozen=True, slots=True)
class _FixedRows:
    """The constant inputs of B sequences of R rows each."""

    query_starts: Tensor
    is_causal: Tensor
    logit_rows: Tensor


class RoundBatches:
    """Lays out the rows of a round over one state, in plain torch."""

    def __init__(self, shape: RoundShape, page_size: int) -> None:
        self.shape = shape
        self.page_size = page_size
        self._fixed: dict[tuple[int, int, bool], _FixedRows] = {}

    def of_open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        """Returns the head's rows for the tokens that the last round committed, and the slots
        `[S * W]` int64 of the features that these rows read.

        A sequence with fewer than W open tokens is filled up with rows in the padding page.
        """
        num_rows = state.open_tokens.shape[1]
        starts = state.lengths - 1 - state.num_open
        steps = torch.arange(num_rows, device=starts.device)
        indices = starts.unsqueeze(1) + steps
        is_open = steps < state.num_open.unsqueeze(1)
        first_rows = torch.arange(state.num_slots, device=starts.device) * num_rows
        batch = self.fixed(
            token_ids=torch.where(is_open, state.open_tokens, 0),
            positions=indices,
            slots=torch.where(is_open, self._slots(state.head_page_table, indices), 0),
            kv_lengths=(starts + num_rows).int(),
            prefix_lengths=starts.int(),
            page_table=state.head_page_table,
            tail_mask=None,
            logit_rows=first_rows + state.num_open - 1,
        )
        return batch, torch.where(is_open, self._slots(state.page_table, indices), 0).flatten()

    def of_beam(self, state: RoundState, beam: Beam, level: int) -> ForwardBatch:
        """Returns the head's rows of one tree level, behind the rows of the levels before.

        Args:
            level: 0 for the children of the root.
        """
        num_rows = beam.token_ids.shape[1]
        bases = state.lengths - 1
        starts = bases + level * num_rows
        indices = starts.unsqueeze(1) + torch.arange(num_rows, device=bases.device)
        return self.fixed(
            token_ids=beam.token_ids,
            positions=(bases + level).unsqueeze(1).expand_as(indices),
            slots=self._slots(state.head_page_table, indices),
            kv_lengths=(starts + num_rows).int(),
            prefix_lengths=bases.int(),
            page_table=state.head_page_table,
            # A chain is causal.
            tail_mask=None if num_rows == 1 else beam.visible.flatten(0, 1),
        )

    def of_blocks(
        self,
        roots: Tensor,
        positions: Tensor,
        page_table: Tensor,
        mask_token_id: int,
    ) -> ForwardBatch:
        """Returns blocks whose rows see each other and all earlier tokens.

        The rows that score the levels of a tree have logits, level by level.

        Args:
            roots, positions: `[S]` int64, last committed tokens, which open the blocks.
            page_table: the draft's page table.
        """
        num_slots, num_levels = len(roots), self.shape.tree.num_steps
        block_size = self.shape.block_size
        rows = torch.arange(block_size, device=roots.device)
        indices = positions.unsqueeze(1) + rows
        first_rows = torch.arange(num_slots, device=roots.device) * block_size
        visible = torch.ones(
            (num_slots * block_size, block_size), dtype=torch.bool, device=roots.device
        )
        return self.fixed(
            token_ids=torch.where(rows == 0, roots.unsqueeze(1), mask_token_id),
            positions=indices,
            slots=self._slots(page_table, indices),
            kv_lengths=(positions + block_size).int(),
            prefix_lengths=positions.int(),
            page_table=page_table,
            tail_mask=visible,
            logit_rows=(first_rows + rows[1 : num_levels + 1].unsqueeze(1)).flatten(),
        )

    def earlier(self, batch: ForwardBatch, page_table: Tensor, count: int) -> ForwardBatch:
        """Returns open rows moved `count` places back; rows before index 0 use the padding page."""
        if not count:
            return batch
        positions = batch.positions - count
        is_real = (positions >= 0) & (batch.slots >= self.page_size)
        places = positions.clamp_min(0)
        slots = self._slots(page_table, places.view(len(page_table), -1)).flatten()
        return replace(
            batch,
            positions=places,
            slots=torch.where(is_real, slots, 0),
            kv_lengths=batch.kv_lengths - count,
            prefix_lengths=(batch.prefix_lengths - count).clamp_min(0),
        )

    def of_runs(self, token_ids: Tensor, starts: Tensor, page_table: Tensor) -> ForwardBatch:
        """Returns runs of consecutive rows of the draft.

        Args:
            token_ids: `[S, R]` int64.
            starts: `[S]` int64, the first row of each run; rows before 0 use the padding page.
        """
        num_rows = token_ids.shape[1]
        indices = starts.unsqueeze(1) + torch.arange(num_rows, device=starts.device)
        places = indices.clamp_min(0)
        return self.fixed(
            token_ids=token_ids,
            positions=places,
            slots=torch.where(indices >= 0, self._slots(page_table, places), 0),
            kv_lengths=(starts + num_rows).int(),
            prefix_lengths=starts.clamp_min(0).int(),
            page_table=page_table,
            tail_mask=None,
        )

    def of_branches(
        self, state: RoundState, depths: Tensor, token_ids: Tensor, level: int, num_nodes: int
    ) -> ForwardBatch:
        """Returns the rows of one level of chains that branch off a computed chain, behind the rows
        of the levels before.

        Args:
            depths: `[S, B]` int64, how many nodes of the chain come before each branch.
            token_ids: `[S, B]` int64.
            level: 0 for the first tokens of the branches.
            num_nodes: nodes of the chain, whose rows come before the rows of the branches.
        """
        count = depths.shape[1]
        bases = state.lengths - 1
        starts = bases + num_nodes + level * count
        branches = torch.arange(count, device=depths.device)
        indices = starts.unsqueeze(1) + branches
        columns = torch.arange(num_nodes * (1 + count), device=depths.device)
        row = columns - num_nodes
        is_above = (row % count == branches.unsqueeze(1)) & (row >= 0) & (row < (level + 1) * count)
        is_before = columns < depths.unsqueeze(2)
        return self.fixed(
            token_ids=token_ids,
            positions=bases.unsqueeze(1) + depths + level,
            slots=self._slots(state.head_page_table, indices),
            kv_lengths=(starts + count).int(),
            prefix_lengths=bases.int(),
            page_table=state.head_page_table,
            tail_mask=(is_before | is_above).flatten(0, 1),
        )

    def of_walks(self, state: RoundState, walks: Tensor) -> list[tuple[ForwardBatch, Tensor]]:
        """Returns the rows of each level of given trees as `of_beam` lays them out, and for each
        row the index `[S * K]` int64 of the row in the level before whose state it reads.

        Args:
            walks: `[S, L * K, 2 + L]` int64, see `WalkedTree.numbers`.
        """
        num_slots, num_rows, width = walks.shape
        num_levels = width - WALK_LINE
        size = (num_slots, num_levels, num_rows // num_levels)
        levels = torch.arange(num_levels, device=walks.device)
        rows = torch.arange(num_rows, device=walks.device)
        bases = state.lengths - 1
        nodes = walks.view(*size, width).transpose(0, 1)
        token_ids = nodes[..., WALK_TOKEN]
        slots = self._slots(state.head_page_table, bases.unsqueeze(1) + rows)
        slots = slots.view(size).transpose(0, 1)
        positions = (bases + levels.unsqueeze(1)).unsqueeze(2).expand_as(slots)
        kv_lengths = (bases + (levels.unsqueeze(1) + 1) * size[2]).int()
        prefix_lengths = bases.int()
        # The root has one row in each slot, a level has K.
        first_rows = torch.arange(num_slots, device=walks.device) * size[2]
        parents = nodes[..., WALK_PARENT] + (first_rows * (levels > 0).unsqueeze(1)).unsqueeze(2)
        parents[:1] += torch.arange(num_slots, device=walks.device).view(1, -1, 1)
        # Kernels need contiguous tensors, and with one row in each level this would be a view.
        parents = parents.contiguous()
        visible = (nodes[..., WALK_LINE:].unsqueeze(4) == rows).any(3)
        return [
            (
                self.fixed(
                    token_ids=token_ids[level],
                    positions=positions[level],
                    slots=slots[level],
                    kv_lengths=kv_lengths[level],
                    prefix_lengths=prefix_lengths,
                    page_table=state.head_page_table,
                    tail_mask=None if size[2] == 1 else visible[level].flatten(0, 1),
                ),
                parents[level].flatten(),
            )
            for level in range(num_levels)
        ]

    def of_trees(self, state: RoundState, tree: TreeRows) -> RoundTree:
        """Returns the trees with their rows as a batch for the target."""
        bases = (state.lengths - 1).unsqueeze(1)
        num_rows = self.shape.num_tree_rows
        indices = bases + torch.arange(num_rows, device=bases.device)
        batch = self.fixed(
            token_ids=tree.token_ids.clamp_min(0),
            positions=bases + tree.depths,
            slots=self._slots(state.page_table, indices),
            kv_lengths=(bases.squeeze(1) + num_rows).int(),
            prefix_lengths=bases.squeeze(1).int(),
            page_table=state.page_table,
            tail_mask=None if self.shape.is_chain else tree.visible.flatten(0, 1),
        )
        return RoundTree(tree, batch)

    def fixed(
        self, *, token_ids: Tensor, positions: Tensor, slots: Tensor, kv_lengths: Tensor,
        prefix_lengths: Tensor, page_table: Tensor, tail_mask: Tensor | None,
        logit_rows: Tensor | None = None,
    ) -> ForwardBatch:  # fmt: skip
        """Packs B sequences of R rows each: `token_ids`, `positions` and `slots` are `[B, R]`."""
        batch_size, num_rows = token_ids.shape
        rows = self._fixed_rows(batch_size, num_rows, tail_mask is None, token_ids.device)
        # Kernels need contiguous tensors, and one sequence would give a view of any strides.
        token_ids, positions, slots = (
            tensor.flatten().contiguous() for tensor in (token_ids, positions, slots)
        )
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=rows.query_starts,
            kv_lengths=kv_lengths,
            prefix_lengths=prefix_lengths,
            page_table=page_table,
            tail_mask=None if tail_mask is None else tail_mask.contiguous(),
            is_causal=rows.is_causal,
            logit_rows=rows.logit_rows if logit_rows is None else logit_rows,
            # Causal runs as long as a prompt chunk use the chunk kernel; trees never do.
            max_query_length=1 if tail_mask is not None else num_rows,
            max_kv_length=self.shape.max_kv_length,
            page_size=self.page_size,
        )

    def _fixed_rows(
        self, batch_size: int, num_rows: int, is_causal: bool, device: torch.device
    ) -> _FixedRows:
        key = (batch_size, num_rows, is_causal)
        rows = self._fixed.get(key)
        if rows is None:
            starts = torch.arange(batch_size + 1, dtype=torch.int32, device=device) * num_rows
            rows = _FixedRows(
                query_starts=starts,
                is_causal=torch.full((batch_size,), is_causal, device=device),
                logit_rows=torch.arange(batch_size * num_rows, device=device),
            )
            # Tensors that are created in a capture are undefined until its graph runs.
            if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
                self._fixed[key] = rows
        return rows

    def _slots(self, page_table: Tensor, indices: Tensor) -> Tensor:
        """Returns the pool slots `[B, R]` of logical indices `[B, R]`. Indices past the page table
        fall into its last page."""
        pages = (indices // self.page_size).clamp_max(page_table.shape[1] - 1)
        slots = page_table.gather(1, pages).long() * self.page_size
        return slots + indices % self.page_size


@dataclass(frozen=True, slots=True)
class TreeTensors:
    """The tensors of S trees of T rows that a kernel writes; see `TreeRows` and `ForwardBatch`.

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
    def empty(cls, num_slots: int, num_rows: int, device: torch.device) -> TreeTensors:
        """Returns uninitialised tensors for a kernel to write."""
        wide = empties(6, (num_slots, num_rows), torch.int64, device)
        token_ids, parents, depths, batch_tokens, positions, slots = wide
        visible = torch.empty((num_slots, num_rows, num_rows), dtype=torch.bool, device=device)
        lengths, prefixes = empties(2, (num_slots,), torch.int32, device)
        return cls(
            *(token_ids, parents, depths, visible),
            *(batch_tokens, positions, slots, lengths, prefixes),
        )

    def laid_out(self, page_table: Tensor, batches: RoundBatches) -> RoundTree:
        """Returns the trees, once a kernel has written them."""
        batch = batches.fixed(
            token_ids=self.batch_tokens,
            positions=self.positions,
            slots=self.slots,
            kv_lengths=self.kv_lengths,
            prefix_lengths=self.prefix_lengths,
            page_table=page_table,
            tail_mask=None if batches.shape.is_chain else self.visible.flatten(0, 1),
        )
        return RoundTree(TreeRows(self.token_ids, self.parents, self.depths, self.visible), batch)


# Prompt tokens that slots compute in place of trees, in the forward of a round.
#
# The uncomputed end of a prompt joins a round instead of taking a step of its own. Each chunk of it
# is a chain in a slot, whose nodes are accepted whatever the target draws. The last chunk is in the
# sequence's own slot, and its last row draws the first output token.


def cut(token_ids: Sequence[int], size: int) -> list[Sequence[int]]:
    """Returns chunks of `size` tokens; the last one has the remaining tokens, at least one."""
    return [token_ids[first : first + size] for first in range(0, len(token_ids), size)]


@dataclass(frozen=True, slots=True, eq=False)
class PromptChunks:
    """K slots and their chunks, T rows each.

    Attributes:
        slots: `[K]` int64.
        token_ids: `[K, T]` int64, -1 behind a chunk.
        num_kept: rows of a tree that a slot can commit.
    """

    slots: Tensor
    token_ids: Tensor
    num_kept: int

    @classmethod
    def of(
        cls, chunks: Mapping[int, Sequence[int]], shape: RoundShape, device: torch.device
    ) -> PromptChunks:
        """Lays out chunks by slot, none longer than the tokens that a round of `shape` commits."""
        tokens = np.full((len(chunks), shape.num_tree_rows), NO_TOKEN, np.int64)
        for row, chunk in zip(tokens, chunks.values(), strict=True):
            row[: len(chunk)] = chunk
        slots, token_ids = uploaded([np.array(list(chunks), np.int64), tokens], device)
        return cls(slots, token_ids, shape.max_committed)

    def replace(self, tree: RoundTree, state: RoundState) -> None:
        """Overwrites the trees in the slots of the chunks."""
        num_rows, rows, batch = self.token_ids.shape[1], tree.rows, tree.batch
        steps = torch.arange(num_rows, device=self.slots.device)
        # Rows that a slot cannot commit become children of the root.
        parents = torch.where(steps < self.num_kept, steps - 1, 0).clamp_min(0)
        chain = rows_of_parents(
            self.token_ids, parents.expand_as(self.token_ids), self.num_kept - 1
        )
        for tensor, new in (
            (rows.token_ids, chain.token_ids),
            (rows.parents, chain.parents),
            (rows.depths, chain.depths),
            (rows.visible, chain.visible),
        ):
            tensor.index_copy_(0, self.slots, new)
        bases = state.lengths.index_select(0, self.slots).unsqueeze(1) - 1
        self._write(batch.token_ids, chain.token_ids.clamp_min(0))
        self._write(batch.positions, bases + chain.depths)
        if batch.tail_mask is not None:
            batch.tail_mask.view_as(rows.visible).index_copy_(0, self.slots, chain.visible)
        if self.num_kept < num_rows:
            # The sequence's next slot may compute the tokens at the places behind.
            places = batch.slots.view(-1, num_rows).index_select(0, self.slots)
            self._write(batch.slots, torch.where(steps < self.num_kept, places, 0))

    def accept(self, drawn: Tensor) -> None:
        """Overwrites the draw of each row of a chunk but the last by the prompt token after it.

        Args:
            drawn: `[S, T]` int64, written.
        """
        following = self.token_ids.roll(-1, dims=1)
        following[:, -1] = NO_TOKEN
        own = drawn.index_select(0, self.slots)
        drawn.index_copy_(0, self.slots, torch.where(following == NO_TOKEN, own, following))

    def _write(self, flat: Tensor, rows: Tensor) -> None:
        flat.view(-1, rows.shape[1]).index_copy_(0, self.slots, rows.to(flat.dtype))
