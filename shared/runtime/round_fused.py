"""The parts of a round on CUDA, in a few launches each: grow, select or read the trees, then verify
and commit. The kernels are in `round_jit`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from shared.kernels.fused_triton import parts_of
from shared.kernels.launch import dependent_launch, empties
from shared.kernels.linear import LinearWeight, linear_partials
from shared.kernels.pointwise import total_of
from shared.kv.batch import ForwardBatch
from shared.layers.attention import ForwardContext, plan_for
from shared.models.decoder import DecoderOutput
from shared.models.heads.head import HeadRows, SplitHeadLayer
from shared.runtime import round_selection as prepared
from shared.runtime.round_batches import RoundBatches, RoundTree, TreeTensors
from shared.runtime.round_jit import (
    accept_trees,
    choose_tokens,
    finish_trees,
    gather_parts,
    grow_level,
    lay_open_rows,
    mend_trees,
    move_path,
    score_blocks,
    select_trees,
    store_rows,
)
from shared.runtime.round_selection import RoundSelection
from shared.runtime.round_state import (
    ACTIVE,
    ENDED,
    LENGTH,
    OFFSET,
    OPEN,
    SEED,
    TAIL,
    RoundSampling,
    RoundState,
)
from shared.runtime.round_verification import (
    RESULT_COUNTS,
    CommittedRound,
    RoundVerification,
)
from shared.runtime.tree_draft import (
    BlockDraft,
    DecoderDraft,
    DraftCode,
    Growth,
    LayeredDraft,
    RoundDraft,
    ScoredRows,
)
from shared.speculation.draw_triton import fused_draw
from shared.speculation.tree import NO_TOKEN, Children, TreeRows
from shared.tokens import TreeShape

_MOVED_ELEMENTS = 1024
_STORED_ELEMENTS = 1024
_GATHERED_PARTS = 4


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundVerification(RoundVerification):
    """Acceptance, KV moves and features in a few launches.

    Attributes:
        projection_weight: the features' projection, prepared for products of few rows.
    """

    projection_weight: LinearWeight | None = field(init=False)

    def __post_init__(self) -> None:
        projection, weight = None if self.features is None else self.features.projection, None
        if projection is not None:
            weight = LinearWeight.prepare(projection.to(self.decoder.dtype))
        object.__setattr__(self, "projection_weight", weight)

    def draw(
        self, logits: Tensor, state: RoundState, tree: TreeRows, sampling: RoundSampling
    ) -> Tensor:
        if sampling is RoundSampling.GREEDY:
            return fused_draw(logits, None, tree.depths.flatten()).view(tree.depths.shape)
        return sampling.draw(logits, state, tree.depths)

    def finish(
        self, state: RoundState, tree: RoundTree, output: DecoderOutput, drawn: Tensor
    ) -> CommittedRound:
        num_slots, width = state.num_slots, self.shape.max_committed
        num_rows, device = self.shape.num_tree_rows, drawn.device
        rows, sources, targets = empties(3, (num_slots * width,), torch.int64, device)
        result = torch.empty((num_slots, RESULT_COUNTS + width), dtype=torch.int64, device=device)
        accept_trees[(num_slots,)](
            drawn, tree.rows.token_ids, tree.rows.parents, tree.rows.visible, tree.batch.slots,
            state.numbers, result, rows, sources, targets, state.numbers.stride(0),
            NUM_ROWS=num_rows, WIDTH=width, RESULT_COUNTS=RESULT_COUNTS,
            LENGTH=LENGTH, OPEN=OPEN, ACTIVE=ACTIVE, ENDED=ENDED, TAIL=TAIL,
            BLOCK_ROWS=triton.next_power_of_2(num_rows),
            BLOCK_WIDTH=triton.next_power_of_2(width), num_warps=4,
            **dependent_launch(device, num_slots),
        )  # fmt: skip
        self._move(num_slots, width, sources, targets)
        self._store_features(output, rows, targets)
        return CommittedRound(result, rows.view(num_slots, width))

    def _logits(self, hidden: Tensor) -> Tensor:
        # In the decoder's dtype, because the kernels widen logits as they read them.
        return self.decoder.logits(hidden, self.decoder.dtype)

    def _move(self, num_slots: int, width: int, sources: Tensor, targets: Tensor) -> None:
        sources, targets = self.pool.own_slots(sources), self.pool.own_slots(targets)
        storage = self.pool.storage.flatten(0, 1)
        if self.pool.layout.is_e4m3:
            storage = storage.view(torch.uint8)
        token_size = storage[0, 0].numel()
        block = min(_MOVED_ELEMENTS, triton.next_power_of_2(token_size))
        move_path[(num_slots, len(storage), triton.cdiv(token_size, block))](
            storage, sources, targets, storage.stride(0), WIDTH=width, TOKEN_SIZE=token_size,
            BLOCK_WIDTH=triton.next_power_of_2(width), BLOCK_SIZE=block, num_warps=4,
            **dependent_launch(storage.device, len(sources)),
        )  # fmt: skip

    def _join(self, parts: list[Tensor], rows: Tensor) -> Tensor:
        size = parts[0].shape[1]
        joined = parts[0].new_empty((len(rows), len(parts) * size))
        assert all(part.is_contiguous() for part in parts)
        for start in range(0, len(parts), _GATHERED_PARTS):
            sources = parts[start : start + _GATHERED_PARTS]
            padded = (*sources, *sources[:1] * (_GATHERED_PARTS - len(sources)))
            gather_parts[(len(rows), len(sources))](
                *padded, rows, joined, start,
                NUM_PARTS=len(parts), SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=4,
                **dependent_launch(joined.device, len(rows)),
            )  # fmt: skip
        return joined

    def _project(
        self, joined: Tensor, projection: Tensor | None, feature_rows: Tensor, slots: Tensor
    ) -> None:
        weight = self.projection_weight
        rows = joined if weight is None else linear_partials(joined, weight)
        source, num_parts = parts_of(rows)
        size = feature_rows.shape[1]
        assert feature_rows.is_contiguous()
        store_rows[(len(slots), triton.cdiv(size, _STORED_ELEMENTS))](
            source, joined, slots, feature_rows,
            NUM_PARTS=num_parts, SIZE=size, BLOCK=_STORED_ELEMENTS, num_warps=4,
            **dependent_launch(joined.device, len(slots)),
        )  # fmt: skip


# Search of the best tokens after rows on CUDA, level by level.

_BLOCK = 1024
# Lists of keys for each warp: the threads of one warp find a maximum without a barrier.
_LISTS_A_WARP = 32
_MAX_WARPS = 8
# Noise takes more work than the search.
_SEARCH_WARPS = 1
_NOISE_WARPS = 4


@dataclass(frozen=True, slots=True)
class BestTokens:
    """The best next tokens of R rows.

    Attributes:
        keys: `[R, L, K]` int64, L lists of K tokens, best first; they hold the K best of the row.
        maxima: `[R, N]` float32, highest logit of each of N blocks of the vocabulary.
        sums: `[R, N]` float32, sum of exp(logit - maximum) of each block.
    """

    keys: Tensor
    maxima: Tensor
    sums: Tensor


class FusedScores:
    """See `Scores`.

    Args:
        token_map: `[Vd]` int64, the target's id of each of the head's tokens; None when equal.
        num_choices: see `TreeDraft`; 0 finds a tree's children.
    """

    def __init__(
        self,
        state: RoundState,
        tree: TreeShape,
        sampling: RoundSampling,
        token_map: Tensor | None,
        num_choices: int,
    ) -> None:
        self._state, self._topk, self.num_choices = state, tree.topk, num_choices
        self._has_draws, self._token_map = sampling is not RoundSampling.GREEDY, token_map
        self._level = self._num_rows = 0
        size = (state.num_slots, 1 + tree.num_steps * tree.topk, num_choices)
        device = state.numbers.device
        self._tokens = torch.empty(size, dtype=torch.int32, device=device)
        self._scores = torch.empty(size, dtype=torch.float32, device=device)

    def add(self, logits: Tensor) -> None:
        self.best(logits)

    def choices(self) -> Children:
        return Children(self._tokens, self._scores)

    def best(self, logits: Tensor) -> BestTokens:
        """Finds the best tokens after the rows of the next level, `[S * N, Vd]`."""
        state, width = self._state, self.num_choices
        assert logits.is_contiguous()
        num_rows, vocab_size = logits.shape
        rows = num_rows // state.num_slots
        num_blocks = triton.cdiv(vocab_size, _BLOCK)
        num_keys, device = width or self._topk, logits.device
        keys = torch.empty((num_rows, num_blocks, num_keys), dtype=torch.int64, device=device)
        maxima, sums = empties(2, (num_rows, num_blocks), torch.float32, device)
        token_map = self._token_map
        score_blocks[(num_rows, num_blocks)](
            logits, logits if token_map is None else token_map, state.numbers, state.sampling,
            keys, maxima, sums,
            self._level, state.numbers.stride(0), vocab_size, num_blocks,
            ROWS=rows, TOPK=num_keys, HAS_MAP=token_map is not None, HAS_DRAWS=self._has_draws,
            LENGTH=LENGTH, SEED=SEED, OFFSET=OFFSET, BLOCK=_BLOCK,
            num_warps=_NOISE_WARPS if self._has_draws else _SEARCH_WARPS,
            **dependent_launch(device, num_rows),
        )  # fmt: skip
        self._level += 1
        if not width:
            return BestTokens(keys, maxima, sums)
        best = torch.empty((num_rows, 1, width), dtype=torch.int64, device=device)
        lanes = triton.next_power_of_2(max(num_blocks, width))
        choose_tokens[(num_rows,)](
            keys, maxima, sums, best, self._tokens, self._scores,
            num_blocks, self._num_rows, self._tokens.shape[1],
            ROWS=rows, WIDTH=width, LANES=lanes,
            BLOCKS=triton.next_power_of_2(num_blocks), num_warps=num_warps_for(lanes),
            **dependent_launch(device, num_rows),
        )  # fmt: skip
        self._num_rows += rows
        return BestTokens(best, maxima, sums)


def num_warps_for(num_lists: int) -> int:
    """Returns the warps of a program that searches the best keys of `num_lists` lists."""
    return min(max(num_lists // _LISTS_A_WARP, 1), _MAX_WARPS)


# Growth of a round's trees on CUDA, with the buffers between its kernels.


# Pairs of nodes that are compared at once.
_COMPARED_PAIRS = 4096


class FusedGrowth(Growth):
    """Growth in a few launches. With choices, the level of the leaves is computed, too."""

    def __init__(self, state: RoundState, batches: RoundBatches, scores: FusedScores) -> None:
        tree, device = batches.shape.tree, state.numbers.device
        self._state, self._batches, self._shape = state, batches, batches.shape
        self.scores, self._best_tokens = scores, scores.best
        self._level = 0
        self._num_levels = tree.num_steps if scores.num_choices else tree.num_steps - 1
        num_beams = max(self._num_levels, 1) * state.num_slots * tree.topk
        self._num_candidates = batches.shape.num_candidates

        def empty(*sizes: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(sizes, dtype=dtype, device=device)

        size = (state.num_slots, self._num_candidates)
        self._tokens, self._parents, self._rows = (empty(*size) for _ in range(3))
        self._paths = empty(*size, dtype=torch.float32)
        self._selected, self._beam_paths = empty(num_beams), empty(num_beams, dtype=torch.float32)
        width = max(self._num_levels, 1) * tree.topk
        self._visible = empty(num_beams, width, dtype=torch.bool)
        wide = [empty(num_beams, dtype=torch.int64) for _ in range(4)]
        self._parent_rows, self._token_ids, self._positions, self._slots = wide
        self._kv_lengths = empty(max(self._num_levels, 1), state.num_slots)
        self._prefix_lengths = empty(state.num_slots)

    def add(self, logits: Tensor) -> None:
        state, tree, best = self._state, self._shape.tree, self._best_tokens(logits)
        rows = len(logits) // state.num_slots
        (num_lists, list_size), num_blocks = best.keys.shape[1:], best.maxima.shape[1]
        block_rows, block_children = map(triton.next_power_of_2, (rows, rows * tree.topk))
        lanes = triton.next_power_of_2(max(num_lists, tree.topk))
        level, first = self._level, 0 if self._level == 0 else tree.topk
        first += max(level - 1, 0) * tree.topk**2
        grow_level[(state.num_slots,)](
            best.keys, num_lists, list_size, best.maxima, best.sums, num_blocks,
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
        tree, paths = self._finish()
        return ScoredRows(tree.rows, paths, self._computed())

    def finish(self) -> RoundTree:
        return self._finish()[0]

    def _computed(self) -> Tensor:
        """Returns the computed nodes, see `ScoredRows.beams`."""
        num_slots, topk = self._state.num_slots, self._shape.tree.topk
        num_beams = self._num_levels * num_slots * topk
        size = (self._num_levels, num_slots, topk)
        # A level's rows lie sequence by sequence; the parent of all in the first is the root.
        parents = self._parent_rows[:num_beams].view(size) % topk
        parents[:1].zero_()
        return torch.stack((self._token_ids[:num_beams].view(size), parents)).transpose(1, 2)

    def _finish(self) -> tuple[RoundTree, Tensor]:
        """Returns the trees, and the path scores `[S, T]` float32 of their rows."""
        state, shape, device = self._state, self._shape, self._tokens.device
        num_slots, num_rows = state.num_slots, shape.num_tree_rows
        tree = TreeTensors.empty(num_slots, num_rows, device)
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
        return tree.laid_out(state.page_table, self._batches), paths


def _chunk(num_nodes: int) -> int:
    """Returns with how many other nodes each of `num_nodes` nodes is compared at once."""
    return min(num_nodes, max(_COMPARED_PAIRS // num_nodes, 1))


def lay_out_open_rows(state: RoundState, batches: RoundBatches) -> tuple[ForwardBatch, Tensor]:
    """See `RoundBatches.of_open_rows`; in one launch."""
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


def read_trees_fused(
    trees: Tensor, state: RoundState, batches: RoundBatches, vocab_size: int
) -> RoundTree:
    """See `read_trees`; in one launch."""
    num_slots, num_rows = state.num_slots, batches.shape.num_tree_rows
    tree = TreeTensors.empty(num_slots, num_rows, state.numbers.device)
    mend_trees[(num_slots,)](
        trees, vocab_size,
        tree.token_ids, tree.parents, tree.depths, tree.visible,
        tree.batch_tokens, tree.positions, tree.slots, tree.kv_lengths, tree.prefix_lengths,
        state.numbers, state.page_table, state.numbers.stride(0), state.page_table.stride(0),
        LENGTH=LENGTH, OPEN=OPEN, TAIL=TAIL, NO_TOKEN=NO_TOKEN, PAGE_SIZE=batches.page_size,
        NUM_ROWS=num_rows, MAX_DEPTH=batches.shape.tree.num_steps,
        IS_CHAIN=batches.shape.tree.topk == 1,
        BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=4,
    )  # fmt: skip
    return tree.laid_out(state.page_table, batches)


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundSelection(RoundSelection):
    """`RoundSelection` in one launch, one program for each slot."""

    def grow(self, state: RoundState, sampling: RoundSampling) -> RoundTree:
        num_slots, num_rows = state.num_slots, self.batches.shape.num_tree_rows
        tree = TreeTensors.empty(num_slots, num_rows, state.numbers.device)
        trees = self.block.trees(num_rows)
        select_trees[(num_slots,)](
            self.block.slots, trees,
            tree.token_ids, tree.parents, tree.depths, tree.visible,
            tree.batch_tokens, tree.positions, tree.slots, tree.kv_lengths, tree.prefix_lengths,
            state.numbers, state.page_table, state.numbers.stride(0), state.page_table.stride(0),
            FIRST=prepared.FIRST, COUNT=prepared.COUNT,
            FENCE=prepared.LENGTH, WANTED_ROW=prepared.ENDED, WANTED_BONUS=prepared.BONUS,
            TREE=prepared.TREE, NUM_COLUMNS=trees.shape[1], ANY=prepared.ANY, NO_TOKEN=NO_TOKEN,
            LENGTH=LENGTH, OPEN=OPEN, ACTIVE=ACTIVE, ENDED=ENDED, TAIL=TAIL,
            PAGE_SIZE=self.batches.page_size,
            NUM_ROWS=num_rows, MAX_DEPTH=self.batches.shape.tree.num_steps,
            BLOCK_TREES=triton.next_power_of_2(prepared.MAX_PREPARED),
            BLOCK_ROWS=triton.next_power_of_2(num_rows), num_warps=4,
        )  # fmt: skip
        return tree.laid_out(state.page_table, self.batches)


# CUDA code shared by all kinds of drafts.


class FusedCode(DraftCode):
    """The code around the forwards, in a few launches.

    The draft's scores ignore top-k, top-p and min-p, which cost more than they gain.
    """

    __slots__ = ()

    def open_rows(self, state: RoundState) -> tuple[ForwardBatch, Tensor]:
        return lay_out_open_rows(state, self.batches)

    def growth(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> Growth:
        return FusedGrowth(state, self.batches, self.scores(state, sampling, num_choices))

    def kind_of(self, sampling: RoundSampling) -> RoundSampling:
        return RoundSampling.DRAWN if sampling is RoundSampling.CUT else sampling

    def scores(self, state: RoundState, sampling: RoundSampling, num_choices: int) -> FusedScores:
        tree = self.batches.shape.tree
        return FusedScores(state, tree, sampling, self._token_map, num_choices)

    @property
    def _token_map(self) -> Tensor | None:
        """The target's token id of each token of the model; None where they are equal."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class FusedDecoderDraft(FusedCode, DecoderDraft):
    def logits(self, batch: ForwardBatch) -> Tensor:
        hidden = self.decoder.forward(batch, self.pool).hidden
        # The kernels read any float type.
        return self.decoder.own_logits(hidden.index_select(0, batch.logit_rows), self.decoder.dtype)

    @property
    def _token_map(self) -> Tensor | None:
        return self.decoder.token_map


@dataclass(frozen=True, slots=True, eq=False)
class FusedBlockDraft(FusedCode, BlockDraft):
    def logits(self, states: Tensor) -> Tensor:
        # The kernels read any float type.
        return self.head.lm_head(states)

    @property
    def _token_map(self) -> None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class FusedLayeredDraft(FusedCode, LayeredDraft):
    def logits(self, states: Tensor, layer: int) -> Tensor:
        vocabulary = self.head.vocabulary  # the head's own, not the target's
        return vocabulary.lm_head(vocabulary.normed(states, layer))

    @property
    def _token_map(self) -> Tensor | None:
        return self.head.vocabulary.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class FusedRoundDraft(FusedCode, RoundDraft):
    """Norms and residual sums of a `SplitHeadLayer` are fused into its kernels."""

    def level(
        self, batch: ForwardBatch, hidden: Tensor, sources: Tensor | None, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        head, layer = self.head, self.head.layers[0]
        if not isinstance(layer, SplitHeadLayer):
            states, _ = RoundDraft.level(self, batch, hidden, sources, wanted)
            return states, head.vocabulary.normed(states)
        rows = HeadRows(batch.token_ids, head.embedding, hidden, sources)
        stream, update = layer.advance(rows, self._context(batch))
        norm = layer.state_norm or next(iter(head.vocabulary.norms), None)
        if norm is None:
            states = stream + total_of(update)
            states = states if wanted is None else states.index_select(0, wanted)
            return states, states
        states, normed = norm.add(stream, update, wanted)
        return states if layer.state_norm is None else normed, normed

    def logits(self, read: Tensor) -> Tensor:
        # Over the head's own vocabulary.
        return self.head.vocabulary.lm_head(read)

    def _context(self, batch: ForwardBatch) -> ForwardContext:
        head = self.head
        shape = head.layers[0].attention.shape
        plans = {shape.sliding_window: plan_for(batch, shape, head.attention_backend)}
        return ForwardContext(batch, self.pool, *head.rotary.tables(batch.positions), plans)

    @property
    def _token_map(self) -> Tensor | None:
        return self.head.vocabulary.token_ids
