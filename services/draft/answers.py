"""Messages to the targets with trees of their sequences, one a link. No torch, no grpc."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.draft.candidates import (
    conditional_row,
    current_row,
    drop_unknown_tokens,
    launched_row,
)
from services.draft.drafters.drafter import Proposal
from services.draft.events import CandidatesReady, Output, ProbeDone
from services.draft.sequence import DraftSequence
from services.draft.sequence_table import SequenceTable
from shared.candidate_columns import CandidateColumns, CandidateRow
from shared.tokens import DraftReport, TokenTree


class Answers:
    """Delivers proposals for the sequences of a table.

    Args:
        is_launched: whether the verdicts on a sequence's tree are prepared for.
    """

    def __init__(
        self,
        table: SequenceTable,
        deliver: Callable[[Output], None],
        *,
        is_launched: Callable[[DraftSequence], bool],
    ) -> None:
        self._table = table
        self._deliver = deliver
        self._is_launched = is_launched

    def announce(self, link: int, report: DraftReport) -> None:
        """Says something of the draft without a tree."""
        self._deliver(CandidatesReady(link, CandidateColumns(), report))

    def give(self, proposals: Iterable[Proposal], report: DraftReport) -> None:
        """Delivers one message a link; sequences with a tree for their round are due no more."""
        by_link: dict[int, list[CandidateRow]] = {}
        for proposal in proposals:
            sequence = proposal.sequence
            if not self._table.holds(sequence):
                continue
            tree = drop_unknown_tokens(proposal.tree, sequence.vocab_size)
            if proposal.condition is None:
                self._table.due.pop(sequence.key, None)
            if sequence.is_probe:
                self._table.close(sequence.key)
                self._deliver(ProbeDone(sequence.key.link, tree, sequence.draft_s))
                continue
            row = self._row(proposal, tree)
            if row is not None:
                by_link.setdefault(sequence.key.link, []).append(row)
        for link, rows in by_link.items():
            self._deliver(CandidatesReady(link, CandidateColumns.of_rows(rows), report))

    def _row(self, proposal: Proposal, tree: TokenTree) -> CandidateRow | None:
        """Returns the candidate; None when no verdict can make use of it."""
        sequence, condition = proposal.sequence, proposal.condition
        shape = None if sequence.wish.shape is None else proposal.shape
        if condition is not None:
            return conditional_row(sequence, tree, condition, shape)
        if not self._is_launched(sequence) or not tree.token_ids:
            return current_row(sequence, tree, shape)
        self._table.unprepared[sequence.key] = sequence
        return launched_row(sequence, tree, shape)
