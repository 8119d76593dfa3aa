"""The commit of a round whose trees the device selected, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from services.target.committer import Committer
from services.target.drafts.attachments import Attachments
from services.target.draw import Decision
from services.target.rounds.selected_round import SelectedRound, as_step
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence
from services.target.step_report import StepReport
from shared.runtime.round_sequences import SequenceRound


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
        report: Callable[[StepReport], None],
        forget: Callable[[Sequence], None],
    ) -> None:
        self._committer = committer
        self._attachments = attachments
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
        num_rounds = num_committed = num_drafted = num_accepted = num_gone = 0
        for sequence, result in results:
            if sequence is None:
                num_gone += bool(result.token_ids)
                continue
            tree = round_.trees.get(sequence.sequence_id)
            took_part = bool(result.token_ids)
            assert took_part == (tree is not None), "device and host differ on who took part"
            if tree is not None:
                entry, decision = as_step(sequence, tree, result)
                num_rounds += 1
                num_committed += self._commit(entry, decision, start_s, now_s)
                num_drafted += len(entry.tree)
                num_accepted += len(decision.accepted_nodes)
                if sequence.finish_reason is None and next_round is not None:
                    self._follow(sequence, next_round)
        self._report(
            StepReport(
                duration_s=now_s - start_s,
                end_s=now_s,
                host_gap_s=round_.host_gap_s,
                num_rows=round_.shape.num_draft_tokens * len(results),
                num_prompt_rows=0,
                num_rounds=num_rounds,
                num_committed=num_committed,
                num_drafted=num_drafted,
                num_accepted=num_accepted,
                num_preempted=0,
                outcomes=self._attachments.outcomes.take(),
                speculation=self._attachments.verdicts.take_counts(),
                num_discarded=num_gone,
                round_shape=round_.shape,
            )
        )
        return now_s - start_s

    def _commit(
        self, entry: ScheduledSequence, decision: Decision, start_s: float, now_s: float
    ) -> int:
        """Commits a sequence's part of a round; returns how many tokens that were."""
        sequence = entry.sequence
        sequence.num_computed += 1
        num_committed = self._committer.commit(entry, decision, start_s, now_s, is_lane=True)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return num_committed

    def _follow(self, sequence: Sequence, next_round: SelectedRound) -> None:
        """Notes which of the prepared trees the device has taken for the next round: the one that
        the verdict has just selected, if it was among them."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        offered = next_round.offered.get(sequence.sequence_id, ())
        if assignment is not None and any(each is assignment.candidate for each in offered):
            assignment.is_stepping = True
            next_round.trees[sequence.sequence_id] = assignment.tree
