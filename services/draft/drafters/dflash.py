"""Drafts a whole block in one forward, from the target's features: DFlash.

A round takes one forward for all sequences together, whatever the length of the block. Before it,
the features that came with the last verdict are turned into keys and values of their positions.
Each row of the block scores the token at its own position. The candidates are the best token of
each position, a chain, or a tree over the marginals when the shape has siblings (see `block_tree`).

Source: Chen et al., DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.contexts import ContextDrafter, Path, SequenceKv
from services.draft.drafters.drafter import (
    DrafterLimits,
    OneStepLookahead,
    Proposal,
    VerifiedTree,
)
from services.draft.drafters.head_contexts import FeatureContexts
from services.draft.events import FeatureRows
from services.draft.likely_verdicts import Continuation, LikelyVerdict, likely_verdicts, rank_of
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.dflash import DflashHead
from shared.runtime.host_copy import joined_rows
from shared.runtime.tree_model import BlockModel, RoundModel
from shared.speculation.distributions import stable_topk
from shared.speculation.tree import grow_block_tree, row_paths
from shared.tokens import TokenTree, TreeShape, Verdict

log = logging.getLogger(__name__)


class BlockRows:
    """Lays out rows from the last committed token's position on.

    A *known* row reads a token whose features are not here: the last committed token, or a token
    that a verdict may commit. It attends to the context, its ancestors and itself. A *block* is a
    row with a known token, followed by rows with the mask token. Its rows attend to each other, the
    context and the known rows above the block.

    Args:
        kv: the context of the sequence; it ends right before the last committed token.
        block_size: rows of a block.
        mask_token_id: stands for a token that is to be drafted.
    """

    def __init__(self, kv: SequenceKv, *, block_size: int, mask_token_id: int) -> None:
        self._kv = kv
        self._block_size = block_size
        self._mask_token_id = mask_token_id
        self._tokens: list[int] = []
        self._depths: list[int] = []
        self._visible: list[list[int]] = []
        self._scored: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add_known(self, parent: int | None, token: int) -> int:
        """Appends a known token; returns its row.

        Args:
            parent: row of the token before it; None for the last committed token.
        """
        row = len(self)
        self._tokens.append(token)
        self._depths.append(self._child_depth(parent))
        self._visible.append([*self._rows_to(parent), row])
        return row

    def add_block(self, parent: int | None, token: int, num_scored: int) -> None:
        """Appends a block.

        Args:
            parent: row of the token before the block; None where `token` is the last committed one.
            token: the known token that opens the block.
            num_scored: drafted positions that are to be scored.
        """
        first, size = len(self), self._block_size
        depth, ancestors = self._child_depth(parent), self._rows_to(parent)
        self._tokens += [token, *[self._mask_token_id] * (size - 1)]
        self._depths += range(depth, depth + size)
        self._visible += [[*ancestors, *range(first, first + size)]] * size
        self._scored += range(first + 1, first + 1 + num_scored)

    def lay_out(self) -> SequenceRows:
        """Returns the rows; the sequence's pages must have room for them."""
        end, num_rows = self._kv.window_start + self._kv.num_computed, len(self)
        mask = np.zeros((num_rows, num_rows), dtype=np.bool_)
        for row, visible in enumerate(self._visible):
            mask[row, visible] = True
        return SequenceRows(
            token_ids=self._tokens,
            positions=[end + depth for depth in self._depths],
            kv_start=self._kv.num_computed,
            pages=self._kv.lease.pages,
            prefix_length=self._kv.num_computed,
            tail_mask=mask,
            logit_rows=self._scored,
        )

    def _child_depth(self, parent: int | None) -> int:
        return 0 if parent is None else self._depths[parent] + 1

    def _rows_to(self, parent: int | None) -> list[int]:
        return [] if parent is None else self._visible[parent]


class BlockContexts(FeatureContexts):
    """Contexts of a block drafter. A position's keys and values are computed from its own features
    alone, at its own rotary angle. So a window slides by freeing its first pages, and nothing is
    computed again. Prefixes are not shared: features come for every sequence.

    Args:
        leases: leases of the pool, without a prefix cache.
        window_tokens: positions before a block that the block attends to, rounded to pages.
    """

    def __init__(
        self,
        head: DflashHead,
        pool: KvPool,
        leases: KvLeases,
        *,
        window_tokens: int,
        block_size: int,
    ) -> None:
        context = window_tokens + block_size
        super().__init__(pool, leases, max_context_tokens=context, margin_tokens=block_size)
        self._head, self._block_size = head, block_size

    @property
    def num_kept_rows(self) -> int:
        return self.max_rows

    def slide(self, sequence: DraftSequence) -> None:
        """Frees positions that no block will attend to, computed or not."""
        kv = self.kv_of(sequence)
        start = sequence.num_tokens - 1 - self.max_rows
        if start >= kv.window_start + max(kv.num_computed, 1):
            self._restart(sequence, start)
        elif start > kv.window_start:
            page_size = self.leases.page_size
            num_dropped = (start - kv.window_start) // page_size
            self.leases.drop_first(kv.lease, num_dropped)
            kv.window_start += num_dropped * page_size
            kv.num_computed -= num_dropped * page_size
        self.drop_features(sequence)

    def block_rows(self, sequence: DraftSequence) -> BlockRows:
        """Returns an empty layout of rows after the context."""
        mask = self._head.config.mask_token_id
        return BlockRows(self.kv_of(sequence), block_size=self._block_size, mask_token_id=mask)

    def trim(self, sequence: DraftSequence, num_rows: int) -> None:
        """Frees the pages reserved for more than `num_rows` rows after the context."""
        num_kept = self.num_window_rows(sequence) + num_rows
        self.leases.shrink(self.kv_of(sequence).lease, num_kept)

    @torch.inference_mode()
    def compute_rows(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Turns the features of the next positions of each sequence into keys and values."""
        counts = [(sequence, count) for sequence, count in counts if count]
        if not counts:
            return
        pieces, positions, slots = self.sources(counts), list[int](), list[int]()
        for sequence, count in counts:
            kv = self.kv_of(sequence)
            start, kv.num_computed = kv.num_computed, kv.num_computed + count
            positions += range(kv.window_start + start, kv.window_start + kv.num_computed)
            slots += kv.lease.slots(start, kv.num_computed, self.leases.page_size)
            self.drop_features(sequence)
        index = uploaded_numbers([positions, slots], self._pool.device)
        features = joined_rows(pieces, self._pool.device)
        self._head.write_context(features, index[0], index[1], self._pool)

    @torch.inference_mode()
    def run(self, rows: Sequence[SequenceRows]) -> Tensor:
        """Returns the logits `[L, V]` float32 of all rows to be scored."""
        pool = self._pool
        batch = build_batch(rows, page_size=pool.page_size, device=pool.device)
        states = self._head.forward(batch, pool)
        return self._head.logits(states.index_select(0, batch.logit_rows))

    def _cache_keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        return ()


# Lookahead: blocks for possible verdicts, in one forward for all verdicts of all sequences.
#
# The features of a verdict are not here before it. In their place a block attends to the tokens
# that the verdict would commit. These are known rows, each of which attends to the context and the
# tokens before it, and the blocks of all verdicts on one tree share them. The head was trained on
# features instead, so the acceptance of such a block is lower than that of a block drafted after
# the verdict, the more so the more tokens the verdict commits; docs/decoding.md has figures. No row
# scores the token after a whole accepted block. So the verdict that accepts all of it gets a block
# only after it arrived, from its features.
#
# A conditional block never builds on another one: the features of a verdict arrive before blocks
# for the next verdict are drafted.


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """Marginals of P positions: the best W tokens of each position, best first.

    Attributes:
        token_ids, log_probs: `[P][W]`.
    """

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    def __iter__(self) -> Iterator[Sequence[Continuation]]:
        """Yields the choices of each position."""
        return (self.at(position) for position in range(len(self.token_ids)))

    def at(self, position: int) -> Sequence[Continuation]:
        """Returns the choices of a position; empty after the last position."""
        if position >= len(self.token_ids):
            return ()
        return list(zip(self.token_ids[position], self.log_probs[position], strict=True))

    def tree(self, shape: TreeShape) -> TokenTree:
        """Returns the tree of the best nodes of the first `shape.num_steps` positions."""
        depth, topk = shape.num_steps, shape.topk
        return grow_block_tree(
            [row[:topk] for row in self.token_ids[:depth]],
            [row[:topk] for row in self.log_probs[:depth]],
            shape.max_node_count,
        )


def best_choices(scores: Tensor, width: int) -> list[BlockChoices]:
    """Returns the choices of each block. Waits for the device once.

    Args:
        scores: `[N, P, V]` float32 log probabilities.
        width: number of choices per position, at most V.
    """
    best = stable_topk(scores, min(width, scores.shape[2]))
    # Token ids are exact in float64, so one transfer copies both.
    log_probs, token_ids = torch.stack([part.to(torch.float64) for part in best]).tolist()
    return [
        BlockChoices([[int(token) for token in row] for row in tokens], values)
        for tokens, values in zip(token_ids, log_probs, strict=True)
    ]


MAX_ROWS = 2048
"""Rows from which on a forward gets no further sequence: a verdict that arrives meanwhile waits for
the forward."""


@dataclass(frozen=True, slots=True)
class _SequenceBlocks:
    """The blocks of one sequence in a forward.

    Attributes:
        paths: for each block, the tokens that its verdict commits.
    """

    verified: VerifiedTree
    verdicts: Sequence[LikelyVerdict]
    paths: Sequence[Path]
    rows: BlockRows


class BlockLookahead(OneStepLookahead):
    """Prepares blocks for the verdicts on a tree. The tree of a round that was not prepared is
    drafted when its features have arrived: rows computed ahead have no features to build on.

    Args:
        block_size: rows of a block, the known token that opens it included.
    """

    def __init__(self, contexts: BlockContexts, *, block_size: int) -> None:
        super().__init__()
        self._contexts = contexts
        self._block_size = block_size
        self._choices: dict[SequenceKey, BlockChoices] = {}
        self._prepared: dict[SequenceKey, dict[Path, BlockChoices]] = {}

    def keep(self, sequence: DraftSequence, choices: BlockChoices) -> None:
        """Records the choices that the tree for the current round was made from."""
        self._choices[sequence.key] = choices

    def begin(self, verified: VerifiedTree) -> None:
        if verified.sequence.key in self._choices:
            super().begin(verified)

    def observe(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Counts the ranks of the choices that the target took, and keeps the choices that were
        prepared for the verdict.

        Args:
            token_ids: the tokens that the verdict commits.
        """
        choices = self._choices.get(sequence.key)
        prepared = self._prepared.get(sequence.key, {}).get(tuple(token_ids))
        self.drop(sequence)
        if choices is not None:
            for continuations, token in zip(choices, token_ids, strict=False):
                self._shares.observe(rank_of(continuations, token))
        if prepared is not None:
            self._choices[sequence.key] = prepared

    def drop(self, sequence: DraftSequence) -> None:
        super().drop(sequence)
        for state in (self._choices, self._prepared):
            state.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        self._compute_contexts()
        batch: list[_SequenceBlocks] = []
        while self._verified and sum(len(blocks.rows) for blocks in batch) < MAX_ROWS:
            blocks = self._lay_out(self._next())
            if blocks is not None:
                batch.append(blocks)
        return self._draft(batch) if batch else []

    def _compute_contexts(self) -> None:
        """Computes the contexts up to the rows of blocks; drops sequences whose features are not
        here, or for which no pages are left."""
        contexts = self._contexts
        self._verified = {
            key: verified
            for key, verified in self._verified.items()
            if contexts.is_complete(verified.sequence) and contexts.reserve(verified.sequence, 1)
        }
        sequences = [verified.sequence for verified in self._verified.values()]
        contexts.compute_rows([(sequence, contexts.backlog(sequence)) for sequence in sequences])

    def _lay_out(self, verified: VerifiedTree) -> _SequenceBlocks | None:
        """Lays out blocks for as many verdicts as there is memory for; None if there is none."""
        # Of the last committed token, then of each node; none after the last scored position.
        choices = self._choices[verified.sequence.key]
        continuations = [choices.at(depth) for depth in (0, *verified.tree.depths)]
        verdicts = likely_verdicts(verified.tree, continuations, self._shares, verified.budget)
        while verdicts:
            blocks = self._sequence_blocks(verified, verdicts)
            if self._contexts.reserve(verified.sequence, len(blocks.rows)):
                return blocks
            verdicts = verdicts[: len(verdicts) // 2]
        return None

    def _sequence_blocks(
        self, verified: VerifiedTree, verdicts: Sequence[LikelyVerdict]
    ) -> _SequenceBlocks:
        sequence, tree = verified.sequence, verified.tree
        rows = self._contexts.block_rows(sequence)
        # Tree row 0 is the last committed token; the nodes follow, parents first.
        parents = [0, *(0 if parent is None else parent + 1 for parent in tree.parent_indices)]
        paths = row_paths(tree)
        known = {0: rows.add_known(None, sequence.token_ids[-1])}
        for tree_row in _with_ancestors(parents, [verdict.tree_row for verdict in verdicts]):
            known[tree_row] = rows.add_known(known[parents[tree_row]], tree.token_ids[tree_row - 1])
        for verdict in verdicts:
            rows.add_block(known[verdict.tree_row], verdict.token, self._block_size - 1)
        committed = [(*paths[verdict.tree_row], verdict.token) for verdict in verdicts]
        return _SequenceBlocks(verified, verdicts, committed, rows)

    def _draft(self, batch: Sequence[_SequenceBlocks]) -> list[Proposal]:
        sequences = [blocks.verified.sequence for blocks in batch]
        logits = self._contexts.run([blocks.rows.lay_out() for blocks in batch])
        for sequence in sequences:
            self._contexts.trim(sequence, self._block_size)
        scores = DraftScores(sequences).of_blocks(
            logits, [blocks.paths for blocks in batch], self._block_size - 1
        )
        width = max(blocks.verified.shape.topk for blocks in batch) + self.budget
        choices = iter(best_choices(scores, width))
        return [
            proposal
            for blocks in batch
            for proposal in self._proposals(blocks, [next(choices) for _ in blocks.paths])
        ]

    def _proposals(
        self, blocks: _SequenceBlocks, block_choices: Sequence[BlockChoices]
    ) -> list[Proposal]:
        sequence, shape = blocks.verified.sequence, blocks.verified.shape
        self._prepared[sequence.key] = dict(zip(blocks.paths, block_choices, strict=True))
        return [
            Proposal(sequence, choices.tree(shape), verdict.condition)
            for verdict, choices in zip(blocks.verdicts, block_choices, strict=True)
        ]


def _with_ancestors(parents: Sequence[int], tree_rows: Sequence[int]) -> list[int]:
    """Returns tree rows and their ancestors without the root, row 0; parents come first."""
    needed: set[int] = set()
    for tree_row in tree_rows:
        while tree_row and tree_row not in needed:
            needed.add(tree_row)
            tree_row = parents[tree_row]
    return sorted(needed)


class DflashDrafter(ContextDrafter):
    """Drafts blocks with a DFlash head. Each sequence's state is its context's keys and values.

    Attributes:
        head: the head with its weights.
    """

    _contexts: BlockContexts

    def __init__(
        self,
        head: DflashHead,
        pool: KvPool,
        leases: KvLeases,
        *,
        block_size: int,
        window_tokens: int,
    ) -> None:
        """Args:
        leases, window_tokens: see `BlockContexts`.
        block_size: rows of a block, the last committed token included; at least 2.
        """
        self.head, self._pool = head, pool
        self._block_size, self._window_tokens = block_size, window_tokens
        self._contexts = BlockContexts(
            head, pool, leases, window_tokens=window_tokens, block_size=block_size
        )
        self._lookahead = BlockLookahead(self._contexts, block_size=block_size)

    @property
    def lookahead(self) -> BlockLookahead:
        return self._lookahead

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            vocab_size=self.head.vocab_size,
            max_context_tokens=self._window_tokens + self._block_size,
            feature_spec=self.head.feature_spec,
        )

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        self._lookahead.observe(sequence, verdict.committed_token_ids)
        self._contexts.slide(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        self._contexts.add_features(sequence, rows)

    @property
    def _round_model(self) -> RoundModel:
        return BlockModel(self.head, self._pool, self._block_size)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        return self._contexts.reserve(sequence, self._block_size)

    def close(self, sequence: DraftSequence) -> None:
        self._lookahead.drop(sequence)
        self._contexts.close(sequence)

    @property
    def _num_open_rows(self) -> int:
        return 0

    def _propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        contexts, budget = self._contexts, self._lookahead.budget
        contexts.compute_rows([(sequence, self.backlog(sequence)) for sequence in sequences])
        # A verdict's bonus token may be one position deeper than the tree.
        depth = min(shape.num_steps, shape.max_node_count) + bool(budget)
        num_scored = min(self._block_size - 1, depth)
        layouts = [contexts.block_rows(sequence) for sequence in sequences]
        for layout, sequence in zip(layouts, sequences, strict=True):
            layout.add_block(None, sequence.token_ids[-1], num_scored)
        logits = contexts.run([layout.lay_out() for layout in layouts])
        scores = DraftScores(sequences).of_blocks(logits, [[()]] * len(sequences), num_scored)
        proposals = []
        best = best_choices(scores, shape.topk + budget)
        for sequence, choices in zip(sequences, best, strict=True):
            proposals.append(Proposal(sequence, choices.tree(shape)))
            if budget:
                self._lookahead.keep(sequence, choices)
        return proposals
