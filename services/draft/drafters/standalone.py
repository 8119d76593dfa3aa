"""Drafts with a smaller language model that has its own paged KV and prefix cache.

A round costs one forward a level for all sequences together: the first computes the tokens the
last verdict committed, and its logits are the first level; each further level computes the K
frontier nodes of the tree. KV of the accepted path is kept: a chain's is in place already, a
tree's is moved to the front of its tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.draft.draft_scores import draft_log_probs
from services.draft.drafters.draft_kv import DraftKv, GrownRows, SequenceKv
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from services.draft.tree_builder import TreeBuilder
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases, OutOfPages
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape, Verdict

CONTEXT_MARGIN = 33
"""Tokens of the context kept for the deepest tree and the token it hangs off."""


class StandaloneDrafter:
    """See `Drafter`; state per sequence is its `SequenceKv`."""

    def __init__(self, runner: ModelRunner, leases: KvLeases, *, max_context_tokens: int) -> None:
        self._runner = runner
        self._max_context_tokens = max_context_tokens
        self._kv = DraftKv(
            leases, max_context_tokens=max_context_tokens, margin_tokens=CONTEXT_MARGIN
        )
        self._states: dict[SequenceKey, SequenceKv] = {}

    @property
    def limits(self) -> DrafterLimits:
        return DrafterLimits(
            vocab_size=self._runner.decoder.config.vocab_size,
            max_context_tokens=self._max_context_tokens,
        )

    def open(self, sequence: DraftSequence) -> None:
        self._states[sequence.key] = self._kv.open(sequence)

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        key = sequence.key
        num_committed = len(verdict.committed_token_ids)
        self._states[key] = self._kv.commit(self._states[key], sequence, num_committed)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Nothing to do: a language model reads tokens only."""

    def backlog(self, sequence: DraftSequence) -> int:
        return len(self._uncomputed(sequence))

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        num_tail_rows = (TreeBuilder(shape).num_levels - 1) * shape.topk
        try:
            self._kv.reserve(self._states[sequence.key], sequence, num_tail_rows)
        except OutOfPages:
            return False
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Leaves the last token of each: its logits start a tree."""
        chunk: list[SequenceRows] = []
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence) - 1, max_tokens - num_taken)
            if count > 0:
                chunk.append(self._committed_rows(sequence, count, with_logits=False))
                num_taken += count
        if chunk:
            self._forward(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        builder = TreeBuilder(shape)
        first = [self._committed_rows(s, self.backlog(s), with_logits=True) for s in sequences]
        logits = self._forward(first)
        for sequence in sequences:
            self._kv.publish(self._states[sequence.key], sequence)
        tails = [_Tail(sequence, self._states[sequence.key]) for sequence in sequences]
        no_paths: list[tuple[int, ...]] = [() for _ in sequences]
        frontier = builder.start(draft_log_probs(logits, sequences, no_paths))
        for _ in range(builder.num_levels - 1):
            levels = zip(tails, frontier.token_ids, frontier.parents, strict=True)
            logits = self._forward([tail.extend(tokens, above) for tail, tokens, above in levels])
            owners = [tail.sequence for tail in tails for _ in tail.paths]
            paths = [path for tail in tails for path in tail.paths]
            frontier = builder.expand(draft_log_probs(logits, owners, paths))
        for tail in tails:
            tail.state.grown = tail.grown
        return [Proposal(s, tree) for s, tree in zip(sequences, builder.finish(), strict=True)]

    def close(self, sequence: DraftSequence) -> None:
        self._kv.close(self._states.pop(sequence.key), sequence)

    def flush_prefix_cache(self) -> int:
        return self._kv.leases.flush()

    def gauges(self) -> Mapping[str, float]:
        leases = self._kv.leases
        return {
            "page_count": float(leases.num_pages),
            "free_page_count": float(leases.num_free_pages),
            "cached_page_count": float(leases.num_cached_pages),
            "held_page_count": float(leases.num_held_pages),
        }

    def check(self) -> None:
        self._kv.leases.check()

    def _uncomputed(self, sequence: DraftSequence) -> range:
        state = self._states[sequence.key]
        return range(state.num_computed, sequence.num_tokens - state.window_start)

    def _committed_rows(
        self, sequence: DraftSequence, count: int, *, with_logits: bool
    ) -> SequenceRows:
        """Lays out the next `count` committed tokens and counts them as computed."""
        state = self._states[sequence.key]
        start = state.num_computed
        state.num_computed += count
        state.grown = None
        first_token = state.window_start + start
        return SequenceRows(
            token_ids=sequence.token_ids[first_token : first_token + count],
            positions=range(start, start + count),
            kv_start=start,
            pages=state.lease.pages,
            prefix_length=start,
            tail_mask=None,
            logit_rows=(count - 1,) if with_logits else (),
        )

    def _forward(self, rows: Sequence[SequenceRows]) -> Tensor:
        """Returns the logits `[L, V]` float32 of the rows that asked for them."""
        device, page_size = self._runner.device, self._runner.page_size
        moves = self._kv.take_moves()
        if moves:
            slots = torch.tensor(moves, dtype=torch.int64, device=device)
            self._runner.pool.move(slots[:, 0], slots[:, 1])
        return self._runner.run(build_batch(rows, page_size=page_size, device=device)).logits


@dataclass(frozen=True, slots=True)
class _TailNode:
    """A computed tree row: its number, tokens and rows on its path, its own included."""

    row: int | None
    path: tuple[int, ...]
    visible_rows: frozenset[int]


_ROOT = _TailNode(None, (), frozenset())


class _Tail:
    """The tree rows of one sequence behind its committed tokens, level by level."""

    def __init__(self, sequence: DraftSequence, state: SequenceKv) -> None:
        self.sequence = sequence
        self.state = state
        self.grown = GrownRows(base=state.num_computed)
        self._frontier: list[_TailNode] = []

    @property
    def paths(self) -> list[tuple[int, ...]]:
        """Tokens on the path of each frontier node."""
        return [node.path for node in self._frontier]

    def extend(self, token_ids: Sequence[int], parents: Sequence[int | None]) -> SequenceRows:
        """Lays out the rows of the next frontier, all with logits."""
        first_row = self.grown.num_rows
        above = [_ROOT if place is None else self._frontier[place] for place in parents]
        self._frontier = [self._add(node, t) for node, t in zip(above, token_ids, strict=True)]
        return SequenceRows(
            token_ids=token_ids,
            positions=[self.grown.base + len(node.path) for node in above],
            kv_start=self.grown.base + first_row,
            pages=self.state.lease.pages,
            prefix_length=self.grown.base,
            tail_mask=self._tail_mask(),
            logit_rows=range(len(token_ids)),
        )

    def _add(self, parent: _TailNode, token: int) -> _TailNode:
        row = self.grown.add(parent.row, token)
        return _TailNode(row, (*parent.path, token), parent.visible_rows | {row})

    def _tail_mask(self) -> list[list[bool]] | None:
        """None for a chain: it is causal."""
        if len(self._frontier) == 1:
            return None
        rows = range(self.grown.num_rows)
        return [[row in node.visible_rows for row in rows] for node in self._frontier]
