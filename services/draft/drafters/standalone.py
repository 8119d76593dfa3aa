"""Drafts with a smaller language model that has its own paged KV and prefix cache.

A round costs one forward a level for all sequences together: the first computes the tokens the
last verdict committed, and its logits are the first level; each further level computes the K
frontier nodes of the tree. Where the device can do without the host, it grows the whole trees in
one pass, see `standalone_trees`. KV of the accepted path is kept: a chain's is in place already, a
tree's is moved to the front of its tail. So is what was drafted ahead below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from services.draft.chain_draws import LevelScores, level_scores
from services.draft.drafters.draft_kv import DraftKv, SequenceKv
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.outcome_drafter import OutcomeDrafter, TailWork, learn_rows
from services.draft.drafters.standalone_trees import StandaloneTrees
from services.draft.drafters.tail import Tail
from services.draft.drafters.tree_tail import TreeTail, beam_rows, learn_levels
from services.draft.drafters.whole_trees import batches, split
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases, OutOfPages
from shared.kv.upload import uploaded_numbers
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.speculation.growth import Children, TreeGrowth, choose_children
from shared.speculation.noise import fresh_generator
from shared.tokens import TreeShape, Verdict

CONTEXT_MARGIN = 33
"""Tokens of the context kept for the deepest tree and the token it hangs off."""


class StandaloneDrafter:
    """See `Drafter`; state per sequence is its `SequenceKv`."""

    def __init__(
        self,
        runner: ModelRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        grower: TreeGrower | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Args:
        grower: of the runner's model and pool; None grows all trees level by level.
        generator: of the host; the source of what is drawn for targets that verify by the
            draft's laws. Unforeseeable when left out.
        """
        self._runner = runner
        self._trees = None if grower is None else StandaloneTrees(grower)
        self._generator = generator or fresh_generator()
        self._max_context_tokens = max_context_tokens
        self._kv = DraftKv(
            leases, max_context_tokens=max_context_tokens, margin_tokens=CONTEXT_MARGIN
        )
        self._states: dict[SequenceKey, SequenceKv] = {}
        self._outcomes = OutcomeDrafter(
            self._tail, self._compute_tails, max_depth=CONTEXT_MARGIN - 1, keeps_rows=True
        )

    @property
    def foresight(self) -> OutcomeDrafter:
        return self._outcomes

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
        self._outcomes.observe(sequence, verdict.committed_token_ids)
        self._states[key] = self._kv.commit(self._states[key], sequence, num_committed)
        self._outcomes.drop(sequence)

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        """Nothing to do: a language model reads tokens only."""

    def backlog(self, sequence: DraftSequence) -> int:
        return len(self._uncomputed(sequence))

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        grown_shape = self._grown_shape(shape)
        num_tail_rows = (grown_shape.num_steps - 1) * grown_shape.topk
        try:
            self._kv.reserve(self._states[sequence.key], sequence, num_tail_rows)
        except OutOfPages:
            return False
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Leaves the last token of each: its logits start a tree."""
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = max(min(self.backlog(sequence) - 1, max_tokens - num_taken), 0)
            chunk.append((sequence, count))
            num_taken += count
        self._compute(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        shape = self._grown_shape(shape)
        # Drafting ahead goes on from what was found on every level.
        trees = None if self._outcomes.budget else self._trees
        whole, rest = ([], sequences) if trees is None else split(sequences)
        proposals = self._grow(rest, shape) if rest else []
        if trees is not None:
            for batch in batches(whole, trees.max_sequences):
                proposals += self._grow_whole(batch, shape, trees)
        return proposals

    def _grow_whole(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, trees: StandaloneTrees
    ) -> list[Proposal]:
        """Grows the trees of sequences in one pass."""
        most = trees.max_open_rows(shape)
        self._compute([(each, self.backlog(each) - most) for each in sequences])
        for sequence in sequences:
            self._reopen(sequence)
        self._move()
        own = [(each, self._states[each.key]) for each in sequences]
        growing = trees.launch(own, shape)
        # The device computes meanwhile.
        for sequence, kv in own:
            self._kv.publish(kv, sequence)
        grown = growing.read()
        return [trees.finish(*each, tree) for each, tree in zip(own, grown, strict=True)]

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        """Grows trees level by level."""
        growth = TreeGrowth(shape)
        scores = level_scores(sequences, shape, self._runner.device, self._generator)
        rows = [self._open_rows(sequence) for sequence in sequences]
        tails = [TreeTail(self._states[s.key], s.token_ids[-1]) for s in sequences]
        levels = [self._children(scores, rows, tails, shape)]
        growth.add(levels[0].best(shape.topk))
        for sequence in sequences:
            self._kv.publish(self._states[sequence.key], sequence)
        while not growth.is_complete:
            rows = beam_rows(growth.select_beam(), tails)
            levels.append(self._children(scores, rows, tails, shape))
            growth.add(levels[-1].best(shape.topk))
        if self._outcomes.budget:
            learn_levels(tails, levels)
        for sequence, tail in zip(sequences, tails, strict=True):
            self._states[sequence.key].tail = tail.tail
        trees = scores.finished([result.tree for result in growth.finish()])
        return list(map(Proposal, sequences, trees))

    def close(self, sequence: DraftSequence) -> None:
        self._outcomes.drop(sequence)
        self._kv.close(self._states.pop(sequence.key), sequence)

    def prepare_next(self) -> bool:
        """Captures a graph of trees that are grown in one pass."""
        return self._trees is not None and self._trees.capture_next()

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

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        """Levels beyond the last kept node of a chain, and children beyond the vocabulary, would be
        grown in vain."""
        return replace(
            shape,
            num_steps=min(shape.num_steps, shape.max_node_count),
            topk=min(shape.topk, self._runner.decoder.config.vocab_size),
        )

    def _children(
        self,
        scores: LevelScores,
        rows: Sequence[SequenceRows],
        tails: Sequence[TreeTail],
        shape: TreeShape,
    ) -> Children:
        """As many as the tree needs, and those that verdicts may end in beside them."""
        logits = self._forward(rows)
        width = min(shape.topk + self._outcomes.budget, logits.shape[1])
        return choose_children(scores(logits, [tail.paths for tail in tails]), width)

    def _tail(self, sequence: DraftSequence) -> Tail | None:
        return self._states[sequence.key].tail

    def _compute_tails(self, work: Sequence[TailWork]) -> list[DraftSequence]:
        """Computes nodes behind the committed tokens, one forward for all sequences."""
        served = [
            each
            for each in work
            if self._kv.reserve_tail(self._states[each.sequence.key], len(each.nodes))
        ]
        if not served:
            return []
        pages = [self._states[each.sequence.key].lease.pages for each in served]
        rows = [each.tail.lay_out(each.nodes, own) for each, own in zip(served, pages, strict=True)]
        learn_rows(served, self._forward(rows), self._runner.device)
        return [each.sequence for each in served]

    def _uncomputed(self, sequence: DraftSequence) -> range:
        state = self._states[sequence.key]
        return range(state.num_computed, sequence.num_tokens - state.window_start)

    def _open_rows(self, sequence: DraftSequence) -> SequenceRows:
        """Lays out what is left of the backlog; the last row's logits start a tree."""
        self._reopen(sequence)
        return self._committed_rows(sequence, self.backlog(sequence), with_logits=True)

    def _reopen(self, sequence: DraftSequence) -> None:
        """Leaves at least a token to compute."""
        if not self.backlog(sequence):
            # The last token was computed ahead, but its logits are gone.
            self._states[sequence.key].num_computed -= 1

    def _compute(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes committed tokens of those sequences that have a count above 0."""
        rows = [
            self._committed_rows(sequence, count, with_logits=False)
            for sequence, count in counts
            if count > 0
        ]
        if rows:
            self._forward(rows)

    def _committed_rows(
        self, sequence: DraftSequence, count: int, *, with_logits: bool
    ) -> SequenceRows:
        """Lays out the next `count` committed tokens and counts them as computed."""
        state = self._states[sequence.key]
        start = state.num_computed
        state.num_computed += count
        state.tail = None
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
        self._move()
        return self._runner.run(build_batch(rows, page_size=page_size, device=device)).logits

    def _move(self) -> None:
        """Moves the keys and values that wait to be."""
        moves = self._kv.take_moves()
        if moves:
            slots = uploaded_numbers(moves, self._runner.device)
            self._runner.pool.move(slots[:, 0], slots[:, 1])
