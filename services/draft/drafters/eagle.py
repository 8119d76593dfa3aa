"""Drafts with a one-layer head that continues the target's hidden states: EAGLE-2 and EAGLE-3.

A round costs one forward a level for all sequences together, as in `standalone`. The first takes
in the rows whose features the last verdict brought, and scores the first level; on each further
level a node reads the state its parent's row left. Sequences whose features have not arrived get
an empty tree: their target need not wait.

Drafting ahead, the states of the verified tree's nodes stand in for the features that its verdict
will bring. They are computed again from the features of each verdict, so that errors do not grow
from round to round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from services.draft.draft_scores import DraftScores
from services.draft.drafters.draft_kv import SequenceKv
from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.drafters.feature_buffer import FeatureBuffer
from services.draft.drafters.head_kv import HeadKv, num_window_rows
from services.draft.drafters.head_tails import HeadTails, reroot
from services.draft.drafters.outcome_drafter import OutcomeDrafter
from services.draft.drafters.tree_tail import TreeTail, beam_rows, learn_levels
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases, OutOfPages
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.head_runner import HeadOutput, HeadRunner
from shared.speculation.growth import Children, TreeGrowth, choose_children
from shared.tokens import EMPTY_TREE, TreeShape, Verdict

CONTEXT_MARGIN = 33
"""Rows of the context kept for the deepest tree and the row it hangs off."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadLoan:
    """What a drafter lends to a target in the same process.

    Attributes:
        pages: of `pool`; the drafter keeps off them for good.
        max_context_tokens: longest sequence that needs no window.
    """

    head: DraftHead
    pool: KvPool
    pages: tuple[int, ...]
    max_context_tokens: int


@dataclass(slots=True, eq=False)
class _State:
    """What is computed of a sequence, and what there is to compute it from."""

    kv: SequenceKv
    features: FeatureBuffer = field(default_factory=FeatureBuffer)

    @property
    def next_position(self) -> int:
        """The first position whose row is not computed."""
        return self.kv.window_start + self.kv.num_computed


class EagleDrafter:
    """See `Drafter`. Whatever sets the heads apart is in `DraftHead`."""

    def __init__(
        self,
        runner: HeadRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        keeps_features: bool,
    ) -> None:
        """Args:
        keeps_features: hold on to the features a sliding window starts over with; needed where
            the target's context is longer than the draft's.
        """
        self._runner = runner
        self._max_context_tokens = max_context_tokens
        self._keeps_features = keeps_features
        self._kv = HeadKv(
            leases, max_context_tokens=max_context_tokens, margin_tokens=CONTEXT_MARGIN
        )
        self._states: dict[SequenceKey, _State] = {}
        self._tails = HeadTails(self, leases, runner.device)
        self._outcomes = OutcomeDrafter(
            self._tails.tail_of,
            self._tails.compute,
            max_depth=CONTEXT_MARGIN - 1,
            keeps_rows=False,
        )

    @property
    def foresight(self) -> OutcomeDrafter | None:
        return self._outcomes

    @property
    def limits(self) -> DrafterLimits:
        head = self._runner.head
        return DrafterLimits(
            vocab_size=head.config.vocab_size,
            max_context_tokens=self._max_context_tokens,
            feature_spec=head.feature_spec,
        )

    def kv_of(self, sequence: DraftSequence) -> SequenceKv:
        """Returns the pages of a sequence and what is computed in them."""
        return self._states[sequence.key].kv

    def lend(self) -> HeadLoan:
        """Lends the head and half of the free pages; called before any sequence is opened."""
        leases = self._kv.leases
        loan = leases.open(())
        leases.grow(loan, leases.num_free_pages // 2 * leases.page_size)
        return HeadLoan(
            self._runner.head,
            self._runner.pool,
            tuple(loan.pages),
            self._max_context_tokens - CONTEXT_MARGIN,
        )

    def open(self, sequence: DraftSequence) -> None:
        self._states[sequence.key] = _State(self._kv.open(sequence))

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        if features is not None:
            self.add_features(sequence, features)
        state = self._states[sequence.key]
        self._outcomes.observe(sequence, verdict.committed_token_ids)
        self._outcomes.drop(sequence)
        reroot(state.kv, verdict.committed_token_ids)
        if self._kv.is_outgrown(state.kv, sequence):
            start = sequence.num_tokens - 1 - self._kv.num_kept_rows
            self._restart(sequence, max(start, state.features.start))

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        state = self._states[sequence.key]
        state.features.append(rows)
        if state.features.start > state.next_position:
            # The target cannot send what came before, so that is no part of the context.
            self._restart(sequence, state.features.start)
        self._drop_features(sequence)

    def backlog(self, sequence: DraftSequence) -> int:
        state = self._states[sequence.key]
        end = min(state.features.end, sequence.num_tokens - 1)
        return max(end - state.next_position, 0)

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        shape = self._grown_shape(shape)
        num_tail_rows = (shape.num_steps - 1) * shape.topk
        try:
            self._kv.reserve(self._states[sequence.key].kv, sequence, num_tail_rows)
        except OutOfPages:
            return False
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        """Leaves the open rows of each: the last one's state and logits start a tree."""
        chunk: list[tuple[DraftSequence, int]] = []
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence) - self._num_open_rows, max_tokens - num_taken)
            if count > 0:
                chunk.append((sequence, count))
                num_taken += count
        if chunk:
            self._take_in(chunk)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        complete = [sequence for sequence in sequences if self.is_complete(sequence)]
        waiting = [sequence for sequence in sequences if not self.is_complete(sequence)]
        grown = self._grow(complete, self._grown_shape(shape)) if complete else []
        return [*grown, *(Proposal(sequence, EMPTY_TREE) for sequence in waiting)]

    def close(self, sequence: DraftSequence) -> None:
        self._outcomes.drop(sequence)
        self._kv.close(self._states.pop(sequence.key).kv, sequence)

    def flush_prefix_cache(self) -> int:
        return self._kv.leases.flush()

    def gauges(self) -> Mapping[str, float]:
        leases = self._kv.leases
        buffers = [state.features for state in self._states.values()]
        return {
            "page_count": float(leases.num_pages),
            "free_page_count": float(leases.num_free_pages),
            "cached_page_count": float(leases.num_cached_pages),
            "held_page_count": float(leases.num_held_pages),
            "held_feature_row_count": float(sum(each.end - each.start for each in buffers)),
        }

    def check(self) -> None:
        self._kv.leases.check()

    @property
    def _num_open_rows(self) -> int:
        """Committed rows that only a proposal computes."""
        return 1

    def _take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next committed rows of each sequence."""
        self.compute_committed(counts, with_logits=False)

    def _grow(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        growth, scores = TreeGrowth(shape), DraftScores(sequences, self._runner.device)
        output = self.compute_committed(
            [(sequence, self.backlog(sequence)) for sequence in sequences], with_logits=True
        )
        for sequence in sequences:
            self._kv.publish(self._states[sequence.key].kv, sequence)
        tails = [TreeTail(self._states[s.key].kv, s.token_ids[-1]) for s in sequences]
        outputs = [output]
        levels = [self._children(scores, output, tails, shape)]
        growth.add(levels[0].best(shape.topk))
        while not growth.is_complete:
            beam = growth.select_beam()
            hidden = parent_states(output.states, beam.parents)
            output = self.run(beam_rows(beam, tails), hidden)
            outputs.append(output)
            levels.append(self._children(scores, output, tails, shape))
            growth.add(levels[-1].best(shape.topk))
        if self._outcomes.budget:
            learn_levels(tails, levels)
            self._tails.keep(sequences, tails, outputs)
        grown = zip(sequences, growth.finish(), strict=True)
        return [Proposal(sequence, result.tree) for sequence, result in grown]

    def _children(
        self, scores: DraftScores, output: HeadOutput, tails: Sequence[TreeTail], shape: TreeShape
    ) -> Children:
        """As many as the tree needs, and those that verdicts may end in beside them."""
        width = min(shape.topk + self._outcomes.budget, self._runner.head.vocabulary.size)
        return choose_children(scores(output.logits, [tail.paths for tail in tails]), width)

    def is_complete(self, sequence: DraftSequence) -> bool:
        """Whether the features of every committed position but the last are here."""
        state, backlog = self._states[sequence.key], self.backlog(sequence)
        return 0 < backlog == num_window_rows(state.kv, sequence) - state.kv.num_computed

    def _grown_shape(self, shape: TreeShape) -> TreeShape:
        """Levels beyond the last kept node of a chain, and children beyond the vocabulary, would be
        grown in vain."""
        return replace(
            shape,
            num_steps=min(shape.num_steps, shape.max_node_count),
            topk=min(shape.topk, self._runner.head.vocabulary.size),
        )

    def compute_committed(
        self, counts: Sequence[tuple[DraftSequence, int]], *, with_logits: bool
    ) -> HeadOutput:
        """Computes the next rows of each sequence from the target's features."""
        hidden = self._committed_hidden(counts)
        rows = [self._committed_rows(*each, with_logits=with_logits) for each in counts]
        output = self.run(rows, hidden)
        for sequence, _ in counts:
            self._drop_features(sequence)
        return output

    def _committed_hidden(self, counts: Sequence[tuple[DraftSequence, int]]) -> Tensor:
        """Returns the fused features of the next rows of each sequence, end to end."""
        pieces = [
            piece
            for sequence, count in counts
            for state in [self._states[sequence.key]]
            for piece in state.features.read(state.next_position, count)
        ]
        return self._runner.fuse(torch.cat(pieces))

    def _committed_rows(
        self, sequence: DraftSequence, count: int, *, with_logits: bool
    ) -> SequenceRows:
        """Lays out the next `count` committed rows and counts them as computed."""
        state = self._states[sequence.key]
        start, first_token = state.kv.num_computed, state.next_position + 1
        state.kv.num_computed += count
        return SequenceRows(
            token_ids=sequence.token_ids[first_token : first_token + count],
            positions=range(start, start + count),
            kv_start=start,
            pages=state.kv.lease.pages,
            prefix_length=start,
            tail_mask=None,
            logit_rows=(count - 1,) if with_logits else (),
        )

    def run(self, rows: Sequence[SequenceRows], hidden: Tensor) -> HeadOutput:
        runner = self._runner
        batch = build_batch(rows, page_size=runner.page_size, device=runner.device)
        return runner.run(batch, hidden)

    def _restart(self, sequence: DraftSequence, window_start: int) -> None:
        state = self._states[sequence.key]
        state.kv = self._kv.restart(state.kv, sequence, window_start)
        self._outcomes.drop(sequence)

    def _drop_features(self, sequence: DraftSequence) -> None:
        state = self._states[sequence.key]
        needed = state.next_position
        if self._keeps_features:
            needed = min(needed, sequence.num_tokens - 1 - self._kv.num_kept_rows)
        state.features.drop_before(needed)


def parent_states(states: Tensor, parents: Tensor) -> Tensor:
    """Returns `[S * K, H]`, the states that the rows of the next beam read.

    Args:
        states: `[S * N, H]` of the last level's rows.
        parents: `[S, K]`, place in the last level of each row's parent.
    """
    num_sequences, hidden_size = parents.shape[0], states.shape[1]
    levels = states.view(num_sequences, -1, hidden_size)
    index = parents.unsqueeze(2).expand(-1, -1, hidden_size)
    return levels.gather(1, index).flatten(0, 1)
