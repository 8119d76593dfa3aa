"""What drafts are asked for: one shape each, for some of their sequences. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from services.target.control.adaptive_config import AdaptiveConfig, Candidates, shape_of
from services.target.control.choices import (
    NOTHING,
    Choice,
    Freedom,
    Group,
    best_choices,
    goodput_of,
    parts_of,
)
from services.target.control.course import Course
from services.target.control.decode_costs import DecodeCosts
from services.target.control.outlooks import Outlooks
from services.target.control.probe_budget import ProbeBudget
from services.target.drafts.attachment import Attachment
from shared.tokens import ANY_TREE, NO_TREE, TreeShape, TreeWish

NUM_PROBE_ROUNDS = 3
LARGEST_PROBE_STEPS = 3
MIN_GAIN = 1.02
"""A choice must promise this much more than the one in force to replace it."""

MIN_PAUSE_GAIN = 1.1
"""Drafting for some sequences must promise this much more than drafting for all: what the model of
a cycle says of sequences out of step is rough, and what is not tried is not learnt."""


class Wishes:
    """Revises wishes now and then, and whenever sequences came or went.

    Attributes:
        sequence_ids: of the sequences that the wishes in force are for.
    """

    def __init__(
        self,
        config: AdaptiveConfig | None,
        costs: DecodeCosts,
        outlooks: Outlooks,
        budget: ProbeBudget,
    ) -> None:
        self.sequence_ids: frozenset[int] = frozenset()
        self._budget = budget
        self._config = config
        self._costs = costs
        self._outlooks = outlooks
        self._shapes: dict[str, TreeShape | None] = {}
        self._revised_at: int | None = None

    def shape(self, attachment: Attachment) -> TreeShape | None:
        """Returns what a draft is asked for at the moment; None when nothing is."""
        return self._shapes.get(attachment.identity.attachment_id)

    def first(self, course: Course, freedom: Freedom) -> TreeWish:
        """Returns what is wanted of a sequence's first tree: what pays for those like it."""
        fixed = course.fixed_wish
        if fixed is not None or self._config is None:
            return fixed or ANY_TREE
        num_others = len(self.sequence_ids)
        candidates = self._config.candidates(num_others + 1)
        num_known = course.population.num_rounds
        if not candidates.may_draft:
            return NO_TREE
        is_known = self._costs.are_known and num_known > candidates.num_warm_up_rounds
        if freedom is Freedom.NONE or not is_known:
            return TreeWish(course.attachment.base_shape)
        shape = self.shape(course.attachment)
        if shape is not None:
            return TreeWish(shape)
        group = self._outlooks.group([course], candidates)
        [choice] = best_choices([group], num_others, self._costs.device, Freedom.ALL)
        assert choice.shape is not None
        return TreeWish(group.shapes[choice.shape])

    def revise(
        self,
        courses: SequenceOf[Course],
        num_plain: int,
        step: int,
        now_s: float,
        freedom: Freedom,
    ) -> None:
        """Chooses anew, if it is time."""
        assert self._config is not None
        candidates = self._config.candidates(len(courses) + num_plain)
        before = self.sequence_ids
        if not self._is_due(courses, candidates, step):
            return
        if not candidates.may_draft:
            self.pause(courses)
            return
        is_whole = before == self.sequence_ids and all(each.is_obeyed for each in courses)
        self._costs.close_window(now_s, is_whole=is_whole)
        by_draft, num_fixed = _by_draft(courses)
        if not self._costs.are_known:
            return
        if freedom is Freedom.NONE:
            for course in (course for each in by_draft for course in each):
                course.wish = TreeWish(course.attachment.base_shape)
        elif by_draft:
            freedom = freedom if candidates.may_pause else Freedom.ALL
            self._choose(by_draft, num_plain + num_fixed, candidates, freedom)
            self._start_probe([course for each in by_draft for course in each], step)
            self._open_window(by_draft, num_plain + num_fixed, candidates, now_s)

    def pause(self, courses: SequenceOf[Course]) -> None:
        """Wants no trees for a while."""
        by_draft, _ = _by_draft(courses)
        for each in by_draft:
            self._shapes[each[0].attachment.identity.attachment_id] = None
            for course in each:
                course.wish, course.num_probe_rounds = NO_TREE, 0
        self.reconsider()

    def reconsider(self) -> None:
        """A probe has ended: chooses anew with the next step."""
        self._revised_at = None

    def _is_due(self, courses: SequenceOf[Course], candidates: Candidates, step: int) -> bool:
        now_there = frozenset(course.sequence.sequence_id for course in courses)
        interval = max(candidates.update_interval, len(courses) // 4)
        is_early = self._revised_at is not None and step - self._revised_at < interval
        if is_early and now_there == self.sequence_ids:
            return False
        self.sequence_ids, self._revised_at = now_there, step
        return True

    def _choose(
        self,
        members: SequenceOf[SequenceOf[Course]],
        num_plain: int,
        candidates: Candidates,
        freedom: Freedom,
    ) -> None:
        groups = [self._outlooks.group(each, candidates) for each in members]
        device = self._costs.device
        # That speculation runs is the referee's decision, so pausing all is not the alternative.
        best = best_choices(groups, num_plain, device, Freedom.ALL)
        if freedom is Freedom.ANY:
            some = best_choices(groups, num_plain, device, freedom)
            needed = MIN_PAUSE_GAIN * goodput_of(groups, best, num_plain, device)
            is_better = goodput_of(groups, some, num_plain, device) >= needed
            best = some if is_better and any(choice.members for choice in some) else best
        chosen = self._unless_held(best, groups, members, num_plain, freedom)
        for group, choice, each in zip(groups, chosen, members, strict=True):
            self._apply(group, choice, each, candidates)

    def _unless_held(
        self,
        best: list[Choice],
        groups: SequenceOf[Group],
        members: SequenceOf[SequenceOf[Course]],
        num_plain: int,
        freedom: Freedom,
    ) -> list[Choice]:
        """Returns the best choices, or those in force where the gain would be small."""
        held = _held(groups, members, with_probes=False)
        num_held = sum(len(each.members) for each in held)
        least = sum(map(len, members)) if freedom is Freedom.ALL else 1
        if len(held) < len(groups) or num_held < least:
            return best
        device = self._costs.device
        rate = goodput_of(groups, held, num_plain, device)
        is_clear = goodput_of(groups, best, num_plain, device) >= MIN_GAIN * rate
        return best if is_clear else held

    def _open_window(
        self,
        members: SequenceOf[SequenceOf[Course]],
        num_plain: int,
        candidates: Candidates,
        now_s: float,
    ) -> None:
        groups = [self._outlooks.group(each, candidates) for each in members]
        held = _held(groups, members)
        num_drafted = sum(len(choice.members) for choice in held)
        if num_drafted and len(held) == len(groups):
            self._costs.open_window(parts_of(groups, held, num_plain), num_drafted, now_s)

    def _apply(
        self, group: Group, choice: Choice, courses: SequenceOf[Course], candidates: Candidates
    ) -> None:
        attachment = courses[0].attachment
        attachment_id = attachment.identity.attachment_id
        shape = None if choice.shape is None else group.shapes[choice.shape]
        self._shapes[attachment_id] = shape
        self._costs.sizes[attachment_id] = max(len(choice.members), 1)
        wanted = set(choice.members)
        for index, course in enumerate(courses):
            if course.population.num_rounds < candidates.num_warm_up_rounds:
                course.wish = TreeWish(attachment.base_shape)
            elif index in wanted and shape is not None:
                course.wish, course.num_probe_rounds = TreeWish(shape), 0
            elif not course.is_probing:
                course.wish = NO_TREE

    def _start_probe(self, courses: SequenceOf[Course], step: int) -> None:
        """Drafts for the sequence that went without for longest, for a few rounds."""
        if not self._budget.allows_probe or any(course.is_probing for course in courses):
            return
        paused = [course for course in courses if course.wish.is_paused]
        if not paused:
            return
        course = min(paused, key=lambda each: -1 if each.probed_at is None else each.probed_at)
        course.num_probe_rounds, course.probed_at = NUM_PROBE_ROUNDS, step
        base = course.attachment.base_shape
        course.wish = TreeWish(shape_of(base, min(base.num_steps, LARGEST_PROBE_STEPS)))


def _by_draft(courses: SequenceOf[Course]) -> tuple[list[list[Course]], int]:
    """Returns the sequences of each draft, and how many have fixed wishes, which are set. A draft
    that is left alone for a while stays so; a pause of before its shape was pinned ends."""
    by_draft: dict[str, list[Course]] = {}
    num_fixed = 0
    for course in courses:
        fixed = course.fixed_wish
        if fixed is None:
            by_draft.setdefault(course.attachment.identity.attachment_id, []).append(course)
        else:
            is_paused = course.wish.is_paused and course.attachment.backoff.is_on
            course.wish = replace(fixed, is_paused=is_paused)
            num_fixed += 1
    return list(by_draft.values()), num_fixed


def _held(
    groups: SequenceOf[Group], members: SequenceOf[SequenceOf[Course]], *, with_probes: bool = True
) -> list[Choice]:
    """Returns the choices in force; fewer than groups where one could not be made now."""
    found = [
        _current(group, each, with_probes=with_probes)
        for group, each in zip(groups, members, strict=True)
    ]
    return [choice for choice in found if choice is not None]


def _current(group: Group, courses: SequenceOf[Course], *, with_probes: bool) -> Choice | None:
    """Returns the choice in force; None where it is none that could be made now."""
    members = [
        index
        for index, course in enumerate(courses)
        if not course.wish.is_paused and (with_probes or not course.is_probing)
    ]
    if not members:
        return NOTHING
    shapes = {courses[index].wish.shape for index in members}
    shape = shapes.pop()
    if shapes or shape not in group.shapes:
        return None
    return Choice(group.shapes.index(shape), tuple(members))
