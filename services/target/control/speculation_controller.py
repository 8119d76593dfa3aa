"""Decides, from what was measured, which sequences are drafted for, with which trees. No torch.

Owned by the engine thread. A referee says whether speculation runs at all. Where it does, the trees
that arrived are cut to the nodes that pay before each step, and now and then what drafts are asked
for is revised; after each step the controller learns. What goes without trees is tried again within
a budget, so that a change of text is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from services.target.control.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.control.choices import Freedom
from services.target.control.course import Course, seen_round
from services.target.control.decode_costs import DecodeCosts
from services.target.control.kept import Kept
from services.target.control.outlooks import Outlooks
from services.target.control.probe_budget import ProbeBudget
from services.target.control.probe_rounds import ProbeRounds
from services.target.control.referee import Referee
from services.target.control.regime import Stance
from services.target.control.speculation_counts import SpeculationCounts
from services.target.control.step_times import StepTimes
from services.target.control.told_rounds import ToldRounds
from services.target.control.tree_cuts import Ready, TreeCuts
from services.target.control.turn_account import TurnAccount
from services.target.control.wishes import Wishes
from services.target.drafts.attachment import Attachment
from services.target.sequence import Sequence
from services.target.step_report import Gain, StepReport
from shared.tokens import NO_TREE, TokenTree, TreeShape, TreeWish


class SpeculationController:
    """Ties estimates, outlooks and wishes to the steps of one engine.

    Args:
        config: what may be chosen; None leaves shapes to the drafts, verifies every tree whole and
            never pauses, but still measures.

    Attributes:
        budget: of probes and trials.
        referee: says whether speculation runs.
    """

    def __init__(self, config: AdaptiveConfig | None = DEFAULT_CONFIG) -> None:
        self.budget = ProbeBudget()
        self.referee = Referee(self.budget)
        self._config = config
        self._costs = DecodeCosts()
        self._outlooks = Outlooks(config, self._costs)
        self._wishes = Wishes(config, self._costs, self._outlooks, self.budget)
        self._cuts = TreeCuts(self._costs, self.budget)
        self._probes = ProbeRounds(self._costs, self.budget)
        self._turns = TurnAccount(self.referee, self._costs)
        self._num_steps = 0
        self._num_committed = 0
        self._told = ToldRounds(is_adaptive=config is not None)
        self._is_quiet = True
        self._is_deciding = True
        self._counts = SpeculationCounts()
        self._lessons: list[Callable[[], None]] = []

    @property
    def step_times(self) -> StepTimes:
        return self._costs.step_times

    @property
    def is_adaptive(self) -> bool:
        """Whether anything is chosen."""
        return self._config is not None

    @property
    def stance(self) -> Stance:
        """What sequences do that may have drafts."""
        return Stance.ON if self._config is None else self.referee.stance

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster than plain decoding; None while that is not known."""
        return None if self._config is None else self.referee.pays

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""
        regime = self.referee.regime
        if regime is None:
            return ""
        speed, trials = 1.0 + regime.estimate.gain, regime.num_trials
        times = "once" if trials == 1 else f"{trials} times"
        size = self.referee.num_sequences
        sequences = "1 sequence" if size == 1 else f"{size} sequences"
        return f"with {sequences} speculation is {speed:.2f} times as fast, tried {times}"

    @property
    def verifies_whole_trees(self) -> bool:
        """Whether what is chosen are whole trees: speculation is known to pay, or not to be
        switched off, and cutting is seldom worth it."""
        return self.referee.is_sure and self._cuts.are_rare

    def take_counts(self) -> SpeculationCounts:
        """Returns the counts since the last call."""
        counts, self._counts = self._counts, SpeculationCounts()
        return counts

    def count_rounds(self, *, num_paused: int = 0, num_probes: int = 0) -> None:
        """Counts rounds of single sequences that a `LanePolicy` left plain, or tried."""
        self._counts.num_paused_rounds += num_paused
        self._counts.num_probe_rounds += num_probes

    def gains(self) -> dict[int, Gain]:
        """Returns what is known of the gain, by about how many sequences decode."""
        return {
            1 << octave: Gain(regime.estimate.gain, regime.estimate.deviation, regime.num_trials)
            for octave, regime in sorted(self.referee.regimes.items())
        }

    def wanted_shape(self, attachment: Attachment) -> TreeShape | None:
        """Returns what a draft is asked for at the moment; None when nothing is."""
        return None if self.stance is Stance.OFF else self._wishes.shape(attachment)

    def level_rates(self, attachment: Attachment) -> list[float]:
        """Returns the acceptance by level of a draft's kind."""
        self._learn()
        return self._outlooks.level_rates(attachment)

    # Sequences come, move and go.

    def course(self, attachment: Attachment, sequence: Sequence) -> Course:
        """Returns the course of a sequence that comes to a draft."""
        self._learn()
        course = self._outlooks.open(attachment, sequence, self._num_steps)
        course.wish = self._wishes.first(course, self.referee.freedom)
        course.asked = course.wish_of_request
        return course

    def best_draft(self, sequence: Sequence, drafts: SequenceOf[Attachment]) -> Attachment:
        """Returns the draft for a sequence: of the kind that promises most, the least loaded."""
        self._learn()
        return self._outlooks.best_draft(sequence, drafts, self._num_steps)

    def is_better(self, draft: Attachment, course: Course) -> bool:
        """Whether a draft of another kind promises a sequence clearly more than its own does."""
        self._learn()
        return self._outlooks.is_better(draft, course, self._num_steps)

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._outlooks.forget(sequence)

    def admits(self, sequence: Sequence, attachment: Attachment) -> bool:
        """Whether a sequence may go to a draft now: speculation is not off, and the draft has shown
        with one sequence that it is warm; or it is not to be decided here."""
        is_fixed = attachment.report.pinned_shape or sequence.request.num_draft_steps
        if self._config is None or is_fixed is not None:
            return True
        is_free = attachment.turnarounds.is_known or not attachment.sequence_ids
        return self.stance is not Stance.OFF and is_free

    def drafts_changed(self) -> None:
        """A draft came or went."""
        self.referee.doubt()

    # Before a step.

    def wake(self, now_s: float, *, was_idle: bool = False) -> None:
        """A turn of the loop begins, other than with the end of the last one; see
        `TurnAccount.wake`."""
        self._counts.waiting_s += self._turns.wake(now_s, was_idle=was_idle)

    def found_cold(self) -> None:
        """A turn of the loop takes longer for what comes once."""
        self._turns.is_cold = True

    def skip_turn(self) -> None:
        """A turn of the loop was a round's with a lent head; a `LanePolicy` chooses those."""
        self._learn()
        self._turns.skip()

    def judge(
        self,
        courses: SequenceOf[Course],
        num_decoding: int,
        *,
        is_warming: bool = False,
        is_wanted: bool = True,
    ) -> None:
        """Decides whether speculation runs.

        Args:
            courses: of the sequences that decode and have a draft.
            num_decoding: sequences that decode.
            is_warming: a draft has prepared what it needs once since this was last asked.
            is_wanted: a sequence that decodes may have a draft.
        """
        if self._config is None or not num_decoding:
            return
        is_free = any(each.fixed_wish is None for each in courses)
        self._is_deciding = is_wanted and (is_free or not courses)
        if not is_wanted:
            self.referee.window.clear()
            return
        candidates = self._config.candidates(num_decoding)
        self.referee.is_bound = not (candidates.may_draft and candidates.may_pause)
        if not candidates.may_draft:
            self.referee.forbid()
        elif candidates.may_pause and is_warming:
            self.referee.put_off()
        elif candidates.may_pause:
            was_off = self.stance is Stance.OFF
            self._turns.judge(courses, num_decoding)
            self._counts.num_trials += was_off and self.stance is Stance.ON
        else:
            self.referee.insist()

    def gathering_until_s(
        self, ready: SequenceOf[Course], late: SequenceOf[Course], now_s: float
    ) -> float:
        """Returns until when to hold a step back for late trees; long past when it does not pay."""
        if self._config is None:
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
        is_whole: bool = False,
    ) -> list[Kept | None]:
        """Revises what is wanted, and cuts the trees that are here.

        Args:
            courses: of all sequences that decode and have a draft.
            ready: those of them that have a tree and step now.
            num_plain: sequences that decode and have none.
            num_stepping: sequences of both that step now.
            num_late: sequences whose trees drafts are working on.
            is_whole: trees are verified whole, whatever pays.

        Returns:
            For each of `ready` what to verify; None is the whole tree.
        """
        self._learn()
        self._turns.num_decoding, self._is_quiet = len(courses) + num_plain, num_late == 0
        self._hear(ready)
        if self._config is None or not courses:
            return [None] * len(ready)
        if self.stance is Stance.PAUSED:
            self._wishes.pause(courses)
        else:
            freedom = self.referee.freedom
            for attachment in {course.attachment for course in courses}:
                attachment.fan_outs.num_trials = self.referee.num_trials
            self._wishes.revise(courses, num_plain, self._num_steps, now_s, freedom)
        freedom = self.referee.freedom
        if freedom is Freedom.NONE:
            return [None] * len(ready)
        may_probe = freedom is Freedom.ANY and not is_whole
        cuts = self._cuts.of(ready, num_stepping, may_probe=may_probe)
        self._cuts.count(cuts)
        if is_whole:
            return [None] * len(ready)
        for each, kept in zip(ready, cuts, strict=True):
            if kept is not None:
                self._counts.num_cut_nodes += len(each.tree) - len(kept.nodes)
        return cuts

    def _hear(self, ready: SequenceOf[Ready]) -> None:
        """Learns how long trees were waited for, once each: a round on the device is prepared while
        the one before is under way, whose trees are those that are here."""
        new = {each.course: each for each in ready if not each.course.is_heard}
        for course in new:
            course.is_heard = True
        # Trees that came together say the same, so one of each draft is enough.
        for each in {course.attachment: each for course, each in new.items()}.values():
            self._costs.observe_wait(each.course, each.heard_s, is_foreseen=each.is_foreseen)

    # After a round and after a step.

    def observe_round(
        self,
        course: Course,
        tree: TokenTree,
        kept: SequenceOf[int],
        accepted: SequenceOf[int],
        max_levels: int,
    ) -> None:
        """Learns from a verified tree, once its verdict is out or what is known is asked for.

        Args:
            tree: as it was drafted.
            kept: its nodes that were verified.
            accepted: those that were accepted, the root's child first.
            max_levels: depth that could be used before the output's end.
        """
        shape = course.shape
        levels = min(shape.num_steps, max_levels)
        self._lessons.append(
            lambda: course.observe(seen_round(tree, kept, accepted, levels, is_tree=shape.topk > 1))
        )

    def end_round(self, course: Course, num_accepted: int) -> TreeWish:
        """Returns what is wanted for the next round of a sequence whose verdict goes out."""
        self._num_committed += num_accepted + 1
        if course.asked.is_paused:
            self._counts.num_paused_rounds += 1
        else:
            self._costs.num_rounds += 1
            self._end_probe_round(course)
        return self._told.tell(course, num_accepted + 1)

    def end_step(self, report: StepReport, duration_s: float, *, is_timed: bool) -> None:
        """Takes in a step that ran a forward.

        Args:
            duration_s: until everyone was told; from its plan, or from the end of the step before
                where that was still computing.
            is_timed: whether that was its time alone.
        """
        self._num_steps += 1
        self._turns.count(report, duration_s, is_timed=is_timed)
        if self._turns.num_decoding:
            if self._is_deciding:
                self.budget.earn(self.referee.eagerness * duration_s)
            self._counts.off_s += duration_s if self.stance is Stance.OFF else 0.0
        if is_timed and not report.num_prompt_rows:
            self._costs.observe_step(report.num_rows, duration_s, is_quiet=self._is_quiet)

    def rest(self, now_s: float) -> None:
        """A turn of the loop ended, with or without a step."""
        self._learn()
        self._turns.end(now_s)
        self._told.end(now_s, self._num_committed)
        self._probes.pay(now_s, self._turns.num_decoding, self._num_committed)

    def _learn(self) -> None:
        """Reads the verdicts of the turn. That takes as long as to commit them, so that drafts are
        told of them first; whoever needs what they say calls this."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            lesson()

    def _end_probe_round(self, course: Course) -> None:
        if not course.is_probing or course.told_s is None:
            return
        self._probes.end(course, self._turns.num_decoding)
        self._counts.num_probe_rounds += 1
        course.num_probe_rounds -= 1
        if not course.is_probing:
            course.wish = NO_TREE
            self._wishes.reconsider()
