"""The commit of a round whose trees the device selected, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from services.target.committer import Committer
from services.target.drafts.attachments import Attachments
from services.target.miss_ladder import MissLadder
from services.target.rounds.selected_round import SelectedRound, as_step
from services.target.sequence import Sequence
from services.target.step_report import StepReport
from shared.runtime.round_sequences import SequenceRound
from shared.tokens import TokenTree


@dataclass(frozen=True, slots=True)
class _Commit:
    """What a round did to a sequence."""

    num_committed: int
    num_drafted: int
    num_accepted: int


class SelectionCommits:
    """Owned by the engine thread.

    Args:
        report: keeps the report of a step.
        forget: lets go of a sequence that has ended.
    """

    def __init__(
        self,
        committer: Committer,
        attachments: Attachments,
        ladder: MissLadder,
        report: Callable[[StepReport], None],
        forget: Callable[[Sequence], None],
    ) -> None:
        self._committer = committer
        self._attachments = attachments
        self._ladder = ladder
        self._report = report
        self._forget = forget
        self._committed_s = 0.0

    def commit(
        self,
        round_: SelectedRound,
        results: SequenceOf[tuple[Sequence | None, SequenceRound]],
        next_round: SelectedRound | None,
        now_s: float,
    ) -> float:
        """Commits what a round did, and returns how long it took.

        Args:
            results: with None in place of sequences that have ended since the launch.
            next_round: launched already, with trees that were prepared for the end of this one.
        """
        start_s, self._committed_s = max(round_.start_s, self._committed_s), now_s
        self._ladder.stepped(now_s - start_s)
        commits: list[_Commit] = []
        for sequence, result in results:
            if sequence is None:
                continue
            tree = round_.trees.get(sequence.sequence_id)
            took_part = bool(result.token_ids)
            assert took_part == (tree is not None), "device and host differ on who took part"
            if tree is not None:
                commits.append(self._commit(sequence, result, tree, start_s, now_s))
                if sequence.finish_reason is None and next_round is not None:
                    self._follow(sequence, next_round)
        num_gone = sum(sequence is None and bool(each.token_ids) for sequence, each in results)
        self._report(
            StepReport(
                duration_s=now_s - start_s,
                end_s=now_s,
                host_gap_s=round_.host_gap_s,
                num_rows=round_.shape.num_draft_tokens * len(results),
                num_prompt_rows=0,
                num_rounds=len(commits),
                num_committed=sum(each.num_committed for each in commits),
                num_drafted=sum(each.num_drafted for each in commits),
                num_accepted=sum(each.num_accepted for each in commits),
                num_preempted=0,
                outcomes=self._attachments.outcomes.take(),
                speculation=self._attachments.controller.take_counts(),
                num_discarded=num_gone,
                round_shape=round_.shape,
            )
        )
        return now_s - start_s

    def _commit(
        self,
        sequence: Sequence,
        result: SequenceRound,
        tree: TokenTree,
        start_s: float,
        now_s: float,
    ) -> _Commit:
        """Commits a sequence's part of a round."""
        entry, decision = as_step(sequence, tree, result.token_ids)
        sequence.num_computed += 1
        num_committed = self._committer.commit(entry, decision, start_s, now_s)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return _Commit(num_committed, len(entry.tree), len(decision.accepted_nodes))

    def _follow(self, sequence: Sequence, next_round: SelectedRound) -> None:
        """Notes which of the prepared trees the device has taken for the next round: the one that
        the verdict has just selected, if it was among them."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        offered = next_round.offered.get(sequence.sequence_id, ())
        if assignment is not None and any(each is assignment.candidate for each in offered):
            assignment.is_stepping = True
            next_round.trees[sequence.sequence_id] = assignment.tree
