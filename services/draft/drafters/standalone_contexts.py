"""The committed tokens of sequences in a language model that drafts, and what lies behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.drafters.branches import GrownRows, Wanted, num_choices
from services.draft.drafters.draft_kv import BranchKv, DraftKv, SequenceKv
from services.draft.drafters.whole_trees import PassUse, batches, pass_sampling
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_pass import GrowingTrees, OpenSequence
from shared.tokens import TreeShape


class StandaloneContexts:
    """Opens, fills, slides and closes the contexts of sequences.

    Args:
        margin_tokens: of `max_context_tokens`, kept free for a tree.
    """

    def __init__(
        self,
        runner: ModelRunner,
        leases: KvLeases,
        *,
        max_context_tokens: int,
        margin_tokens: int,
    ) -> None:
        self.leases = leases
        self._runner = runner
        self._kv = DraftKv(
            leases, max_context_tokens=max_context_tokens, margin_tokens=margin_tokens
        )
        self._contexts: dict[SequenceKey, SequenceKv] = {}

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def open(self, sequence: DraftSequence) -> None:
        """Starts a sequence on the longest cached prefix of its window."""
        self._contexts[sequence.key] = self._kv.open(sequence)

    def close(self, sequence: DraftSequence) -> None:
        """Frees a sequence's pages; what is computed stays cached."""
        self._kv.close(self._contexts.pop(sequence.key), sequence)

    def commit(self, sequence: DraftSequence) -> None:
        """Takes new tokens in, see `DraftKv.commit`."""
        key = sequence.key
        self._contexts[key] = self._kv.commit(self._contexts[key], sequence)

    def adopt(self, sequence: DraftSequence, branch: BranchKv, rows: GrownRows) -> None:
        """Takes new tokens in that a branch was computed for, see `DraftKv.adopt`.

        Args:
            rows: computed behind them in the branch.
        """
        key = sequence.key
        self._contexts[key] = self._kv.adopt(self._contexts[key], sequence, branch)
        if not self.backlog(sequence):
            self.plant(sequence, rows)

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """Returns pages for what may follow the computed tokens, see `DraftKv.branch`."""
        return self._kv.branch(self.kv_of(sequence), behind, path, num_rows)

    def branch_sequence(
        self, sequence: DraftSequence, branch: BranchKv, token_id: int
    ) -> OpenSequence:
        """Lays out the token that ends the verdict of a branch."""
        num_before = self.kv_of(sequence).window_start - 1
        return branch.sequence(token_id, num_before=num_before, sampling=pass_sampling(sequence))

    def plant(self, sequence: DraftSequence, rows: GrownRows) -> None:
        """Takes in what a pass computed behind the last committed token."""
        kv = self.kv_of(sequence)
        kv.tail = rows.tail(kv.num_computed, sequence.token_ids[-1])

    def kv_of(self, sequence: DraftSequence) -> SequenceKv:
        """Returns the pages of a sequence and what is computed in them."""
        return self._contexts[sequence.key]

    def backlog(self, sequence: DraftSequence) -> int:
        """Returns the committed tokens that are not computed."""
        kv = self.kv_of(sequence)
        return sequence.num_tokens - kv.window_start - kv.num_computed

    def reserve(self, sequence: DraftSequence, num_tail_rows: int) -> bool:
        """Makes room for the committed tokens and a tree; False, with nothing changed, if there is
        none."""
        return self._kv.reserve(self.kv_of(sequence), sequence, num_tail_rows)

    def reserve_tail(self, sequence: DraftSequence, num_rows: int) -> bool:
        """Makes room for that many rows behind the tail's; False when there is none."""
        return self._kv.reserve_tail(self.kv_of(sequence), num_rows)

    def publish(self, sequence: DraftSequence) -> None:
        """Shares the computed tokens with other sequences, once."""
        self._kv.publish(self.kv_of(sequence), sequence)

    def compute(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        """Computes the next tokens of those sequences that have a count above 0."""
        rows = [
            self._next_rows(sequence, count, with_logits=False)
            for sequence, count in counts
            if count > 0
        ]
        if rows:
            self.forward(rows)

    def open_rows(self, sequence: DraftSequence) -> SequenceRows:
        """Lays out what is left of the backlog; the last row's logits start a tree."""
        self._reopen(sequence)
        return self._next_rows(sequence, self.backlog(sequence), with_logits=True)

    def open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        """Lays out all committed tokens that are left and counts them as computed."""
        self._reopen(sequence)
        kv = self.kv_of(sequence)
        start, kv.num_computed = kv.num_computed, sequence.num_tokens - kv.window_start
        kv.tail = None
        return OpenSequence(
            token_ids=sequence.token_ids[kv.window_start + start :],
            num_computed=start,
            num_before=kv.window_start - 1,
            sampling=pass_sampling(sequence),
            pages=kv.lease.pages,
        )

    def forward(self, rows: Sequence[SequenceRows]) -> Tensor:
        """Returns the logits `[L, V]` float32 of the rows that asked for them."""
        runner = self._runner
        self.move()
        return runner.run(
            build_batch(rows, page_size=runner.page_size, device=runner.device)
        ).logits

    def move(self) -> None:
        """Moves the keys and values that wait to be, which is due before any forward."""
        moves = self._kv.take_moves()
        if moves:
            self._runner.move(moves)

    def _reopen(self, sequence: DraftSequence) -> None:
        """Leaves at least a token to compute."""
        if not self.backlog(sequence):
            # The last token was computed ahead, but its logits are gone.
            self.kv_of(sequence).num_computed -= 1

    def _next_rows(self, sequence: DraftSequence, count: int, *, with_logits: bool) -> SequenceRows:
        """Lays out the next `count` committed tokens and counts them as computed."""
        kv = self.kv_of(sequence)
        start = kv.num_computed
        kv.num_computed += count
        kv.tail = None
        first_token = kv.window_start + start
        return SequenceRows.causal(
            sequence.token_ids[first_token : first_token + count],
            start,
            kv.lease.pages,
            (count - 1,) if with_logits else (),
        )


class StandaloneTrees:
    """Grows what `StandaloneDrafter` grows level by level, with one copy to the host."""

    def __init__(self, grower: TreeGrower, contexts: StandaloneContexts) -> None:
        self._grower, self._split = grower, grower.split()
        self._contexts = contexts

    @property
    def max_sequences(self) -> int:
        """Trees that one pass grows."""
        return self._grower.limits.max_sequences

    def uses(self, shape: TreeShape, num_sequences: int, budget: int) -> list[PassUse]:
        """See `PassGraphs`."""
        choices = num_choices(shape, budget)
        grown = PassUse(self._grower, num_sequences, choices)
        branches = PassUse(self._split, num_sequences * budget, choices)
        return [grown, branches] if budget else [grown]

    def grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        """Computes the committed tokens that are left of each sequence, and a tree behind them.

        Args:
            sequences: that `grows_whole`, with room for both.
            num_choices: see `TreeGrower.launch`.
        """
        return [
            each
            for batch in batches(sequences, self.max_sequences)
            for each in self._grow(batch, shape, num_choices)
        ]

    def num_branch_rows(self, shape: TreeShape) -> int:
        """See `BranchTrees`: the leaves are computed, too."""
        return shape.num_steps * shape.topk

    def begin(
        self, wanted: Sequence[Wanted], rows: Sequence[OpenSequence], num_choices: int
    ) -> GrowingTrees:
        """See `BranchTrees.begin`."""
        self._contexts.move()
        return self._split.begin(rows, (), wanted[0].plan.shape, num_choices=num_choices)

    def _grow(
        self, sequences: Sequence[DraftSequence], shape: TreeShape, num_choices: int
    ) -> list[GrownRows]:
        contexts, num_left = self._contexts, self._grower.max_open_rows(shape)
        contexts.compute([(each, contexts.backlog(each) - num_left) for each in sequences])
        rows = [contexts.open_sequence(each) for each in sequences]
        contexts.move()
        growing = self._grower.launch(rows, (), shape, num_choices=num_choices)
        # The device computes meanwhile.
        for sequence in sequences:
            contexts.publish(sequence)
        grown = list(map(GrownRows, growing.read()))
        for sequence, each in zip(sequences, grown, strict=True):
            contexts.plant(sequence, each)
        return grown
