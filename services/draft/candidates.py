"""Trees of a sequence as candidates, and the answers to verdicts. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.draft.drafters.drafter import Proposal
from services.draft.events import CandidatesReady, Output, ProbeDone
from services.draft.sequence import DraftSequence, InFlightTree
from services.draft.sequence_table import SequenceTable
from shared.candidate_columns import UNCONDITIONAL, CandidateColumns, CandidateRow, condition_key
from shared.tokens import DraftReport, TokenTree


def drop_unknown_tokens(tree: TokenTree, vocab_size: int) -> TokenTree:
    """Returns the tree without tokens outside `[0, vocab_size)` and without their descendants.

    A draft's vocabulary may be padded further than its target's.
    """
    if not tree.token_ids or max(tree.token_ids) < vocab_size:
        return tree
    kept: set[int | None] = {None}
    nodes = list[int]()
    for node, parent in enumerate(tree.parent_indices):
        if parent in kept and tree.token_ids[node] < vocab_size:
            kept.add(node)
            nodes.append(node)
    return tree.only(nodes)


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
        candidate_id, key = 0, UNCONDITIONAL
        if condition is not None:
            is_known = condition.bonus_token_id < sequence.vocab_size
            if sequence.in_flight is None or not is_known or not tree.token_ids:
                return None
            candidate_id = sequence.new_candidate_id()
            key = sequence.in_flight.push(condition_key(condition), candidate_id, tree)
        elif self._is_launched(sequence) and tree.token_ids:
            # Conditions can name it: it is the in-flight tree from now on.
            candidate_id = sequence.new_candidate_id()
            sequence.in_flight = InFlightTree(candidate_id, tree)
            self._table.unprepared[sequence.key] = sequence
        shape = None if sequence.tree_request.shape is None else proposal.shape
        fence = sequence.key.sequence_id, sequence.round, len(sequence.token_ids)
        return *fence, candidate_id, *key, shape, tree
