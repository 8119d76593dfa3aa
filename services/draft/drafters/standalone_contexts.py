"""The committed tokens of sequences in a language model that drafts, and what lies behind them."""

from __future__ import annotations

from collections.abc import Sequence

from services.draft.drafters.contexts import BranchKv, Contexts
from services.draft.drafters.tails import GrownRows
from services.draft.sequence import DraftSequence
from shared.kv.batch import build_batch
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_pass import OpenSequence


class StandaloneContexts(Contexts):
    """The row of a position reads the token there, so what a tree computed of it stays good."""

    reads_ahead = 0
    keeps_tree_rows = True

    def __init__(self, runner: ModelRunner, leases: KvLeases, *, max_context_tokens: int) -> None:
        super().__init__(runner.pool, leases, max_context_tokens=max_context_tokens)
        self._runner = runner

    def commit(self, sequence: DraftSequence) -> None:
        """Takes new tokens in; keeps the KV of those the last tree foresaw."""
        self._keep_accepted(sequence)
        self._slide(sequence)

    def adopt(self, sequence: DraftSequence, branch: BranchKv, rows: GrownRows) -> None:
        """Goes on in a branch where all committed tokens are computed.

        Args:
            rows: computed behind them in the branch.
        """
        kv = self.kv_of(sequence)
        self.leases.adopt(kv.lease, branch.own)
        kv.num_computed, kv.tail = self.num_window_rows(sequence), None
        self._slide(sequence)
        if not self.backlog(sequence):
            self.plant(sequence, rows)

    def backlog(self, sequence: DraftSequence) -> int:
        return self.num_window_rows(sequence) - self.kv_of(sequence).num_computed

    def is_complete(self, sequence: DraftSequence) -> bool:
        return True

    def branch(
        self, sequence: DraftSequence, behind: BranchKv | None, path: Sequence[int], num_rows: int
    ) -> BranchKv | None:
        """See `Contexts.branch`; None also where there is no tail any more."""
        if behind is None and self.kv_of(sequence).tail is None:
            return None
        return super().branch(sequence, behind, path, num_rows)

    def take_in(self, counts: Sequence[tuple[DraftSequence, int]]) -> None:
        runner, rows = self._runner, [self._next_rows(*each) for each in counts]
        self.move()
        runner.run(build_batch(rows, page_size=runner.page_size, device=runner.device))

    def _open_sequence(self, sequence: DraftSequence) -> OpenSequence:
        if not self.backlog(sequence):
            # The last token was computed ahead, but its logits are gone.
            self.kv_of(sequence).num_computed -= 1
        return super()._open_sequence(sequence)

    def _keys(self, sequence: DraftSequence, window_start: int, count: int) -> Sequence[int]:
        return sequence.token_ids[window_start : window_start + count]

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        self._runner.move(moves)

    def _slide(self, sequence: DraftSequence) -> None:
        if self._is_outgrown(sequence):
            self._restart(sequence, sequence.num_tokens - self.num_kept_rows)

    def _keep_accepted(self, sequence: DraftSequence) -> None:
        """The tokens decide, not the verdict's node indices: the verified tree may have been
        another one, and KV depends on nothing but the tokens before it."""
        kv = self.kv_of(sequence)
        tail, kv.tail = kv.tail, None
        if tail is None:
            return
        base, pages = kv.num_computed, kv.lease.pages
        rows = tail.matched(sequence.token_ids[kv.window_start + base :])
        moved = [(row, place) for place, row in enumerate(rows) if row != place]
        sources, targets = [base + row for row, _ in moved], [base + place for _, place in moved]
        self._copy(pages, sources, pages, targets)
        kv.num_computed += len(rows)
