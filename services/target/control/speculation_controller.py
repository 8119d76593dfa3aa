"""Decides, from what was measured, which sequences are drafted for, with which trees. No torch.

Owned by the engine thread. Before each step it cuts the trees that arrived to the nodes that pay,
and now and then revises what drafts are asked for; after each step it learns. Sequences that go
without trees are probed within a budget, so that a change of text is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from services.target.control.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.control.course import Course, Kept, seen_round
from services.target.control.decode_costs import DecodeCosts
from services.target.control.goodput import best_cut, path_survivals
from services.target.control.outlooks import Outlooks
from services.target.control.probe_budget import ProbeBudget
from services.target.control.round_chooser import RoundChooser
from services.target.control.speculation_counts import SpeculationCounts
from services.target.control.step_times import StepTimes
from services.target.control.wishes import LARGEST_PROBE_STEPS, Wishes
from services.target.drafts.attachment import Attachment
from services.target.sequence import Sequence
from shared.tokens import NO_TREE, TokenTree, TreeShape, TreeWish

NOT_WORTH_CUTTING = 1.01
"""Trees are verified whole where their rows make a step at most this much longer."""

LARGEST_AGE = 256
"""Steps after which the time of a plain one is measured again."""


MOST_PER_PROBE = 4.0
"""A probe's round is charged at most this many times what one usually takes: a stall of the machine
is not its doing, and would forbid the next ones for long."""


@dataclass(frozen=True, slots=True)
class _Probed:
    """A probe's round that has ended.

    Attributes:
        told_s: when it began.
        num_told: tokens that all sequences had committed by then.
        dearest_s: most that it is charged.
    """

    told_s: float
    num_told: int
    dearest_s: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A sequence about to step, with the tree that its draft sent for the round, and when."""

    course: Course
    tree: TokenTree
    heard_s: float


class SpeculationController:
    """Ties estimates, outlooks and wishes to the steps of one engine.

    Args:
        config: what may be chosen; None leaves shapes to the drafts, verifies every tree whole and
            never pauses, but still measures.
    """

    def __init__(self, config: AdaptiveConfig | None = DEFAULT_CONFIG) -> None:
        self._config = config
        self._is_adaptive = config is not None
        self._costs = DecodeCosts()
        self._outlooks = Outlooks(config, self._costs)
        self._wishes = Wishes(config, self._costs, self._outlooks)
        self._num_steps = 0
        self._num_committed = 0
        self._told: list[Course] = []
        self._probed: list[_Probed] = []
        self._ended_s: float | None = None
        self._had_work = False
        self._is_quiet = True
        self._counts = SpeculationCounts()

    @property
    def step_times(self) -> StepTimes:
        return self._costs.step_times

    @property
    def budget(self) -> ProbeBudget:
        return self._wishes.budget

    def take_counts(self) -> SpeculationCounts:
        """Returns the counts since the last call."""
        counts, self._counts = self._counts, SpeculationCounts()
        return counts

    def round_chooser(self) -> RoundChooser | None:
        """Returns what chooses the rounds of one head; None where nothing is chosen."""
        return None if self._config is None else RoundChooser(self._config, self.step_times)

    def count_rounds(self, *, num_paused: int = 0, num_probes: int = 0) -> None:
        """Counts rounds of single sequences that a `RoundChooser` left plain, or tried."""
        self._counts.num_paused_rounds += num_paused
        self._counts.num_probe_rounds += num_probes

    def wanted_shape(self, attachment: Attachment) -> TreeShape | None:
        """Returns what a draft is asked for at the moment; None when nothing is."""
        return self._wishes.shape(attachment)

    def level_rates(self, attachment: Attachment) -> list[float]:
        """Returns the acceptance by level of a draft's kind."""
        return self._outlooks.level_rates(attachment)

    # Sequences come, move and go.

    def course(self, attachment: Attachment, sequence: Sequence) -> Course:
        """Returns the course of a sequence that comes to a draft."""
        course = self._outlooks.open(attachment, sequence, self._num_steps)
        course.wish = course.asked = self._wishes.first(course)
        return course

    def best_draft(self, sequence: Sequence, drafts: SequenceOf[Attachment]) -> Attachment:
        """Returns the draft for a sequence: of the kind that promises most, the least loaded."""
        return self._outlooks.best_draft(sequence, drafts, self._num_steps)

    def is_better(self, draft: Attachment, course: Course) -> bool:
        """Whether a draft of another kind promises a sequence clearly more than its own does."""
        return self._outlooks.is_better(draft, course, self._num_steps)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._outlooks.forget(sequence)

    # Before a step.

    def wake(self, now_s: float) -> None:
        """Counts the time since the last step ended as waiting, if there was work."""
        if self._ended_s is not None and self._had_work:
            self._counts.waiting_s += max(now_s - self._ended_s, 0.0)

    def gathering_until_s(
        self, ready: SequenceOf[Course], late: SequenceOf[Course], now_s: float
    ) -> float:
        """Returns until when to hold a step back for late trees; long past when it does not pay."""
        if not self._is_adaptive:
            return -math.inf
        return self._costs.gathering_until_s(ready, late, now_s)

    def begin_step(
        self,
        courses: SequenceOf[Course],
        ready: SequenceOf[Ready],
        now_s: float,
        *,
        num_plain: int,
        num_stepping: int,
        num_late: int,
    ) -> list[Kept | None]:
        """Revises what is wanted, and cuts the trees that are here.

        Args:
            courses: of all sequences that decode and have a draft.
            ready: those of them that have a tree and step now.
            num_plain: sequences that decode and have none.
            num_stepping: sequences of both that step now.
            num_late: sequences whose trees drafts are working on.

        Returns:
            For each of `ready` what to verify; None is the whole tree.
        """
        self._had_work, self._is_quiet = bool(courses or num_plain), num_late == 0
        # Trees that came together say the same, so one of each draft is enough.
        for each in {
            each.course.attachment.identity.attachment_id: each for each in ready
        }.values():
            self._costs.observe_wait(each.course, each.heard_s)
        if not self._is_adaptive or not courses:
            return [None] * len(ready)
        self._wishes.revise(courses, num_plain, self._num_steps, now_s)
        return self._cut(ready, num_stepping)

    def _cut(self, ready: SequenceOf[Ready], num_rows: int) -> list[Kept | None]:
        """Keeps the nodes that pay. Trees of fixed shapes are verified whole."""
        free = [each for each in ready if each.tree.token_ids and each.course.fixed_wish is None]
        if free and self._wants_plain_step(num_rows):
            return [self._kept(each, [] if each in free else None) for each in ready]
        num_nodes = sum(len(each.tree) for each in free)
        step_s = self.step_times
        if not free or step_s(num_rows + num_nodes) <= NOT_WORTH_CUTTING * step_s(num_rows):
            return [None] * len(ready)
        survivals = [path_survivals(each.tree, each.course.acceptance) for each in free]
        wait_s = max(self._costs.usual_wait_s(each.course) for each in free)
        cuts = dict(zip(map(id, free), best_cut(survivals, num_rows, wait_s, step_s), strict=True))
        return [self._kept(each, cuts.get(id(each))) for each in ready]

    def _wants_plain_step(self, num_rows: int) -> bool:
        """Whether to verify nothing for once, because nobody knows any more what that saves."""
        if not self.budget.allows_probe or self.step_times.age(num_rows) < LARGEST_AGE:
            return False
        self.budget.pay(self.step_times(num_rows))
        return True

    def _kept(self, ready: Ready, nodes: list[int] | None) -> Kept | None:
        if nodes is None or len(nodes) == len(ready.tree) or ready.course.is_probing:
            return None
        self._counts.num_cut_nodes += len(ready.tree) - len(nodes)
        return Kept(ready.tree.only(nodes), tuple(nodes))

    # After a round and after a step.

    def observe_round(
        self,
        course: Course,
        tree: TokenTree,
        kept: SequenceOf[int],
        accepted: SequenceOf[int],
        max_levels: int,
    ) -> None:
        """Learns from a verified tree.

        Args:
            tree: as it was drafted.
            kept: its nodes that were verified.
            accepted: those that were accepted, the root's child first.
            max_levels: depth that could be used before the output's end.
        """
        shape = course.asked.shape or course.attachment.base_shape
        levels = min(shape.num_steps, max_levels)
        course.observe(seen_round(tree, kept, accepted, levels, is_tree=shape.topk > 1))

    def end_round(self, course: Course, num_accepted: int) -> TreeWish:
        """Returns what is wanted for the next round of a sequence whose verdict goes out."""
        self._num_committed += num_accepted + 1
        if course.asked.is_paused:
            self._counts.num_paused_rounds += 1
        else:
            self._costs.num_rounds += 1
            self._end_probe_round(course)
        is_telling = not (course.asked.is_paused or course.is_catching_up)
        course.num_decided = num_accepted + 1 if is_telling else None
        course.decided, course.asked = course.asked, self._with_fan_out(course)
        course.num_asked = 0 if course.wish.is_paused else course.num_asked + 1
        self._told.append(course)
        return course.asked

    def _with_fan_out(self, course: Course) -> TreeWish:
        """Returns what is wanted, with the number of verdicts to prepare for."""
        wish, fan_out = course.wish, course.attachment.fan_out
        is_free = self._is_adaptive and not wish.is_paused and course.fixed_wish is None
        if fan_out is None or not is_free:
            return wish
        return replace(wish, num_outcomes=fan_out.budget)

    def end_step(self, num_rows: int, duration_s: float, *, is_decode: bool) -> None:
        """Takes in a step that ran a forward.

        Args:
            duration_s: until everyone was told; from its plan, or from the end of the step before
                where that was still computing.
            is_decode: it computed no prompt chunk.
        """
        self._num_steps += 1
        if is_decode:
            self._costs.observe_step(num_rows, duration_s, is_quiet=self._is_quiet)
        if self._wishes.sequence_ids:
            self.budget.earn(duration_s)

    def rest(self, now_s: float) -> None:
        """A turn of the loop ended, with or without a step."""
        self._ended_s = now_s
        for course in self._told:
            self._observe_fan_out(course, now_s)
            course.told_s, course.num_told = now_s, self._num_committed
        self._told.clear()
        self._pay_probes(now_s)

    @staticmethod
    def _observe_fan_out(course: Course, now_s: float) -> None:
        fan_out = course.attachment.fan_out
        if fan_out is None or course.num_decided is None or course.told_s is None:
            return
        fan_out.observe(course.decided.num_outcomes, course.num_decided, now_s - course.told_s)

    def _end_probe_round(self, course: Course) -> None:
        if not course.is_probing or course.told_s is None:
            return
        if self._costs.is_known(course):  # else it is the cold start of a draft, which comes once
            self._probed.append(_Probed(course.told_s, course.num_told, self._dearest_s(course)))
        self._counts.num_probe_rounds += 1
        course.num_probe_rounds -= 1
        if not course.is_probing:
            course.wish = NO_TREE
            self._wishes.reconsider()

    def _pay_probes(self, now_s: float) -> None:
        """A probe costs the time of its round less that in which plain steps commit as much."""
        num_running = max(len(self._wishes.sequence_ids), 1)
        for each in self._probed:
            plain_s = self.step_times(num_running) / num_running
            num_committed = self._num_committed - each.num_told
            self.budget.pay(min(now_s - each.told_s - num_committed * plain_s, each.dearest_s))
        self._probed.clear()

    def _dearest_s(self, course: Course) -> float:
        num_rows = len(self._wishes.sequence_ids) + LARGEST_PROBE_STEPS
        usual_s = self._costs.usual_wait_s(course) + self.step_times(num_rows)
        return MOST_PER_PROBE * usual_s
