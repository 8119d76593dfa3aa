"""The committed tokens of sequences in a language model that drafts, and what lies behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.drafters.branch_pages import BranchKv
from services.draft.drafters.draft_kv import DraftKv, SequenceKv
from services.draft.drafters.grown_rows import GrownRows
from services.draft.drafters.whole_trees import pass_sampling
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.leases import KvLeases
from shared.runtime.open_sequence import OpenSequence
from shared.runtime.runner import ModelRunner


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
