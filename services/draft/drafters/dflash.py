"""Drafts a whole block in one forward, from the target's features: DFlash.

A round costs one forward for all sequences together, whatever the length of the block. Before it
the features that the last verdict brought become keys and values of their positions. Each row of
the block scores the token at its own position; the candidates are the best of each, a chain, or a
tree over the marginals when the shape has siblings (see `block_tree`).

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
from services.draft.likely_verdicts import (
    Continuation,
    LikelyVerdict,
    likely_verdicts,
    rank_of,
)
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.kv.upload import uploaded_numbers
from shared.models.heads.dflash import DflashHead
from shared.runtime.host_copy import joined_rows
from shared.runtime.tree_model import BlockModel, RoundModel
from shared.speculation.block_tree import grow_block_tree
from shared.speculation.distributions import stable_topk
from shared.speculation.tree import row_paths
from shared.tokens import TokenTree, TreeShape, Verdict

log = logging.getLogger(__name__)


class BlockRows:
    """Lays out rows from the last committed token's position on.

    A *known* row is a token whose features are not here: the last committed one, and those that a
    verdict may commit. It sees the context, its ancestors and itself. A *block* opens with one that
    is known as well; it and the masks behind it all see each other and the known rows above them.

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
        self._wanted: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def add_known(self, above: int | None, token: int) -> int:
        """Appends a known token; returns its row.

        Args:
            above: row of the token before it; None for the last committed token.
        """
        row = len(self)
        self._tokens.append(token)
        self._depths.append(self._depth_below(above))
        self._visible.append([*self._path_to(above), row])
        return row

    def add_block(self, above: int | None, token: int, num_wanted: int) -> None:
        """Appends a block.

        Args:
            above: row of the token before the block; None where it opens with the last committed
                token.
            token: opens the block.
            num_wanted: drafted positions that are to be scored.
        """
        first, size = len(self), self._block_size
        depth, above_it = self._depth_below(above), self._path_to(above)
        self._tokens += [token, *[self._mask_token_id] * (size - 1)]
        self._depths += range(depth, depth + size)
        self._visible += [[*above_it, *range(first, first + size)]] * size
        self._wanted += range(first + 1, first + 1 + num_wanted)

    def lay_out(self) -> SequenceRows:
        """Returns the rows; their pages must reach as far."""
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
            logit_rows=self._wanted,
        )

    def _depth_below(self, above: int | None) -> int:
        return 0 if above is None else self._depths[above] + 1

    def _path_to(self, above: int | None) -> list[int]:
        return [] if above is None else self._visible[above]


class BlockContexts(FeatureContexts):
    """A position's keys and values are made of its own features alone and stand at its own rotary
    angle, so a window slides by letting go of its first pages; nothing is computed again, and
    nothing is shared: features come for every sequence.

    Args:
        leases: of the pool, without a prefix cache.
        window_tokens: positions before a block that it sees, to the page.
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
        return self.longest

    def slide(self, sequence: DraftSequence) -> None:
        """Lets go of positions that no block will see; they need not even be computed."""
        kv = self.kv_of(sequence)
        start = sequence.num_tokens - 1 - self.longest
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
        """Returns rows behind the context, none yet."""
        mask = self._head.config.mask_token_id
        return BlockRows(self.kv_of(sequence), block_size=self._block_size, mask_token_id=mask)

    def trim(self, sequence: DraftSequence, num_rows: int) -> None:
        """Frees the pages reserved beyond that many rows behind the context."""
        num_kept = self.num_window_rows(sequence) + num_rows
        self.leases.shrink(self.kv_of(sequence).lease, num_kept)

    @torch.inference_mode()
    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
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
        """Returns the logits `[L, V]` float32 of the rows that ask for them."""
        pool = self._pool
        batch = build_batch(rows, page_size=pool.page_size, device=pool.device)
        states = self._head.forward(batch, pool)
        return self._head.logits(states.index_select(0, batch.logit_rows))

    def _keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        return ()


# Prepares blocks for the verdicts to come: one forward for all verdicts of all sequences.
#
# The features that a verdict will bring are not here yet. In their place a block looks at the
# tokens that the verdict would commit: known rows, each of which sees the context and the tokens
# before it, shared by the blocks of all verdicts on one tree. A head was trained to find features
# there, so such a block is drafted worse than one made after the verdict, the worse the more
# tokens it commits; docs/decoding.md has figures. Where the whole block may be accepted nothing
# scores the token after it, so that verdict gets a block when it has fallen, from its features.
#
# A conditional block is never made of another: the features of a verdict are here before blocks
# for the next one are drafted.


@dataclass(frozen=True, slots=True)
class BlockChoices:
    """Marginals of P positions, the best W tokens of each, best first.

    Attributes:
        token_ids, log_probs: `[P][W]`.
    """

    token_ids: Sequence[Sequence[int]]
    log_probs: Sequence[Sequence[float]]

    def __iter__(self) -> Iterator[Sequence[Continuation]]:
        """Yields the choices of each position."""
        return (self.at(position) for position in range(len(self.token_ids)))

    def at(self, position: int) -> Sequence[Continuation]:
        """Returns the choices of a position; none behind the last."""
        if position >= len(self.token_ids):
            return ()
        return list(zip(self.token_ids[position], self.log_probs[position], strict=True))

    def tree(self, shape: TreeShape) -> TokenTree:
        """Returns the best nodes of the first `shape.num_steps` positions."""
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
        width: choices a position, V at most.
    """
    best = stable_topk(scores, min(width, scores.shape[2]))
    # Token ids are exact in float64, so one transfer brings both.
    log_probs, token_ids = torch.stack([part.to(torch.float64) for part in best]).tolist()
    return [
        BlockChoices([[int(token) for token in row] for row in tokens], values)
        for tokens, values in zip(token_ids, log_probs, strict=True)
    ]


MAX_ROWS = 2048
"""Rows of one forward, but for those of a single sequence: a verdict that arrives meanwhile waits
for it."""


@dataclass(frozen=True, slots=True)
class _Work:
    """The blocks of one sequence in a forward.

    Attributes:
        paths: by block, the tokens that its verdict commits.
    """

    verified: VerifiedTree
    verdicts: Sequence[LikelyVerdict]
    paths: Sequence[Path]
    rows: BlockRows


class BlockLookahead(OneStepLookahead):
    """A tree is drafted anew once its features have arrived: rows computed ahead lack them.

    Args:
        block_size: rows of a block, the token that opens it included.
    """

    def __init__(self, contexts: BlockContexts, *, block_size: int) -> None:
        super().__init__()
        self._contexts = contexts
        self._block_size = block_size
        self._choices: dict[SequenceKey, BlockChoices] = {}
        self._prepared: dict[SequenceKey, dict[Path, BlockChoices]] = {}

    def keep(self, sequence: DraftSequence, choices: BlockChoices) -> None:
        """Takes what the tree for the current round was made of."""
        self._choices[sequence.key] = choices

    def begin(self, verified: VerifiedTree) -> None:
        if verified.sequence.key in self._choices:
            super().begin(verified)

    def observe(self, sequence: DraftSequence, token_ids: Sequence[int]) -> None:
        """Learns which of its choices the target took, and moves on to what was prepared for it.

        Args:
            token_ids: what the verdict commits.
        """
        choices = self._choices.get(sequence.key)
        prepared = self._prepared.get(sequence.key, {}).get(tuple(token_ids))
        self.drop(sequence)
        if choices is not None:
            for own, token in zip(choices, token_ids, strict=False):
                self._shares.observe(rank_of(own, token))
        if prepared is not None:
            self._choices[sequence.key] = prepared

    def drop(self, sequence: DraftSequence) -> None:
        super().drop(sequence)
        for kept in (self._choices, self._prepared):
            kept.pop(sequence.key, None)

    def advance(self) -> list[Proposal]:
        self._take_in()
        work: list[_Work] = []
        while self._verified and sum(len(each.rows) for each in work) < MAX_ROWS:
            prepared = self._lay_out(self._next())
            if prepared is not None:
                work.append(prepared)
        return self._draft(work) if work else []

    def _take_in(self) -> None:
        """Computes the contexts, which end where the rows of blocks begin; gives up on sequences
        whose features are not here, or have no room."""
        contexts = self._contexts
        self._verified = {
            key: each
            for key, each in self._verified.items()
            if contexts.is_complete(each.sequence) and contexts.reserve(each.sequence, 1)
        }
        sequences = [each.sequence for each in self._verified.values()]
        contexts.take_in([(each, contexts.backlog(each)) for each in sequences])

    def _lay_out(self, verified: VerifiedTree) -> _Work | None:
        """Returns the rows of as many verdicts as there is memory for; None for none."""
        sequence, contexts = verified.sequence, self._contexts
        verdicts = likely_verdicts(
            verified.tree, self._by_node(verified), self._shares, verified.budget
        )
        while verdicts:
            work = self._work(verified, verdicts)
            if contexts.reserve(sequence, len(work.rows)):
                return work
            verdicts = verdicts[: len(verdicts) // 2]
        return None

    def _by_node(self, verified: VerifiedTree) -> list[Sequence[Continuation]]:
        """Returns what may follow the last committed token, then each node; nothing behind the last
        position that the block scored."""
        choices = self._choices[verified.sequence.key]
        return [choices.at(depth) for depth in (0, *verified.tree.depths)]

    def _work(self, verified: VerifiedTree, verdicts: Sequence[LikelyVerdict]) -> _Work:
        sequence, tree = verified.sequence, verified.tree
        rows = self._contexts.block_rows(sequence)
        # By place: 0 is the last committed token, then come the nodes, parents first.
        above = [0, *(0 if parent is None else parent + 1 for parent in tree.parent_indices)]
        paths = row_paths(tree)
        known = {0: rows.add_known(None, sequence.token_ids[-1])}
        for place in _through(above, [verdict.place for verdict in verdicts]):
            known[place] = rows.add_known(known[above[place]], tree.token_ids[place - 1])
        for verdict in verdicts:
            rows.add_block(known[verdict.place], verdict.token, self._block_size - 1)
        committed = [(*paths[verdict.place], verdict.token) for verdict in verdicts]
        return _Work(verified, verdicts, committed, rows)

    def _draft(self, work: Sequence[_Work]) -> list[Proposal]:
        sequences = [each.verified.sequence for each in work]
        logits = self._contexts.run([each.rows.lay_out() for each in work])
        for each in work:
            self._contexts.trim(each.verified.sequence, self._block_size)
        scores = DraftScores(sequences).of_blocks(
            logits, [each.paths for each in work], self._block_size - 1
        )
        width = max(each.verified.shape.topk for each in work) + self.budget
        blocks = iter(best_choices(scores, width))
        return [
            proposal
            for each in work
            for proposal in self._proposals(each, [next(blocks) for _ in each.paths])
        ]

    def _proposals(self, work: _Work, blocks: Sequence[BlockChoices]) -> list[Proposal]:
        sequence, shape = work.verified.sequence, work.verified.shape
        self._prepared[sequence.key] = dict(zip(work.paths, blocks, strict=True))
        return [
            Proposal(sequence, choices.tree(shape), verdict.condition)
            for verdict, choices in zip(work.verdicts, blocks, strict=True)
        ]


def _through(above: Sequence[int], places: Sequence[int]) -> list[int]:
    """Returns the nodes' places on the way to any of `places`, parents first; 0 left out."""
    needed: set[int] = set()
    for place in places:
        while place and place not in needed:
            needed.add(place)
            place = above[place]
    return sorted(needed)


class DflashDrafter(ContextDrafter):
    """State per sequence is the keys and values of its context.

    Attributes:
        head: the weights.
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
        contexts.take_in([(sequence, self.backlog(sequence)) for sequence in sequences])
        # A verdict's bonus token may lie one position behind the tree.
        depth = min(shape.num_steps, shape.max_node_count) + bool(budget)
        num_scored = min(self._block_size - 1, depth)
        logits = contexts.run([self._block_rows(sequence, num_scored) for sequence in sequences])
        scores = DraftScores(sequences).of_blocks(logits, [[()]] * len(sequences), num_scored)
        proposals = []
        for sequence, choices in zip(
            sequences, best_choices(scores, shape.topk + budget), strict=True
        ):
            proposals.append(Proposal(sequence, choices.tree(shape)))
            if budget:
                self._lookahead.keep(sequence, choices)
        return proposals

    def _block_rows(self, sequence: DraftSequence, num_scored: int) -> SequenceRows:
        rows = self._contexts.block_rows(sequence)
        rows.add_block(None, sequence.token_ids[-1], num_scored)
        return rows.lay_out()
