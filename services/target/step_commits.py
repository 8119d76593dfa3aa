"""The commit of a step that the device has done, and the report of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.target.clock import Clock
from services.target.committer import Committer
from services.target.drafts.attachments import Attachments
from services.target.draw import Decision
from services.target.fallback import OwnTrees
from services.target.launched_step import LaunchedStep
from services.target.sequence import Sequence as TargetSequence
from services.target.step_plan import ScheduledSequence
from services.target.step_report import StepReport


class StepCommits:
    """Commits steps and keeps their reports until they are taken. Owned by the engine thread.

    Args:
        forget: lets go of a sequence that has ended.
        release: frees the pages of one whose rows were in flight when it ended.
    """

    def __init__(
        self,
        *,
        committer: Committer,
        attachments: Attachments,
        own_trees: OwnTrees,
        clock: Clock,
        forget: Callable[[TargetSequence], None],
        release: Callable[[TargetSequence], None],
    ) -> None:
        self._committer = committer
        self._attachments = attachments
        self._own_trees = own_trees
        self._clock = clock
        self._forget = forget
        self._release = release
        self._committed_s = 0.0
        self._reports: list[StepReport] = []

    def commit(
        self, step: LaunchedStep, decided: Sequence[tuple[ScheduledSequence, Decision]]
    ) -> None:
        """Commits what a step decided.

        Args:
            decided: of the sequences that have not ended since the launch.
        """
        now_s = self._clock()
        start_s, self._committed_s = max(step.start_s, self._committed_s), now_s
        num_committed = 0
        for entry, decision in decided:
            num_committed += self._committer.commit(entry, decision, start_s, now_s)
            if entry.sequence.finish_reason is not None:
                self._forget(entry.sequence)
        for sequence in step.retired:
            self._release(sequence)
        own = self._own_trees.take()
        self._reports.append(
            StepReport(
                duration_s=now_s - start_s,
                end_s=now_s,
                host_gap_s=step.host_gap_s,
                num_rows=step.num_rows,
                num_prompt_rows=step.num_prompt_rows,
                num_rounds=len(decided),
                num_committed=num_committed,
                num_drafted=sum(len(entry.tree) for entry, _ in decided),
                num_accepted=sum(len(decision.accepted_nodes) for _, decision in decided),
                num_preempted=len(step.plan.preempted),
                outcomes=self._attachments.outcomes.take(),
                speculation=self._attachments.verdicts.take_counts(),
                num_discarded=len(step.retired),
                num_fallback_rounds=own.num_rounds,
                num_fallback_committed=own.num_committed,
            )
        )

    def report(self, report: StepReport) -> None:
        """Keeps the report of a step that was committed elsewhere."""
        self._reports.append(report)

    @property
    def has_reports(self) -> bool:
        """Whether steps were committed since reports were last taken."""
        return bool(self._reports)

    def take_reports(self) -> list[StepReport]:
        """Returns the reports since the last call."""
        reports, self._reports = self._reports, []
        return reports
