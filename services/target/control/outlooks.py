"""What each sequence can expect of each kind of draft. No torch."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from services.target.control.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig, Candidates
from services.target.control.choices import Group, best_choices, goodput_of
from services.target.control.course import Course, Population
from services.target.control.decode_costs import DecodeCosts
from services.target.drafts.attachment import Attachment
from services.target.sequence import Sequence

MIN_STAY = 48
"""Steps a sequence stays with a kind of draft before another is considered."""

MOVE_GAIN = 1.1
MAX_OUTLOOK_AGE = 512
"""Steps after which a sequence may be tried again with a kind of draft that it left."""

_TEMPERATURES = (0.0, 0.4, 0.8)
_Kind = tuple[str, str]


class Outlooks:
    """Owns the courses of running sequences and what sequences have in common.

    Args:
        config: None where nothing is chosen.
    """

    def __init__(self, config: AdaptiveConfig | None, costs: DecodeCosts) -> None:
        self._config = config
        self._costs = costs
        self._populations: dict[tuple[str, str, int], Population] = {}
        self._courses: dict[int, dict[_Kind, Course]] = {}

    def open(self, attachment: Attachment, sequence: Sequence, step: int) -> Course:
        """Returns the course of a sequence that comes to a draft; what was learnt at another
        draft of its kind counts."""
        courses = self._courses.setdefault(sequence.sequence_id, {})
        course = courses[attachment.kind] = self._outlook(attachment, sequence, step)
        course.attachment, course.told_s, course.opened_at = attachment, None, step
        course.num_asked, course.grown = 0, None
        return course

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._courses.pop(sequence.sequence_id, None)

    def group(self, courses: SequenceOf[Course], candidates: Candidates) -> Group:
        """Returns the choice there is for sequences of one draft."""
        attachment = courses[0].attachment
        shapes = candidates.shapes(attachment.base_shape)
        tokens = [course.tokens(shapes) if shapes else [] for course in courses]
        rows = [[course.num_rows(shape) for shape in shapes] for course in courses]
        return Group(shapes, tokens, rows, self._costs.wait_time(attachment))

    def best_draft(
        self, sequence: Sequence, drafts: SequenceOf[Attachment], step: int
    ) -> Attachment:
        """Returns the draft for a sequence: of the kind that promises most, the least loaded."""
        by_kind: dict[_Kind, Attachment] = {}
        for draft in sorted(drafts, key=lambda each: each.load, reverse=True):
            by_kind[draft.kind] = draft
        if len(by_kind) == 1 or self._config is None:
            return min(drafts, key=lambda each: each.load)
        return max(
            by_kind.values(), key=lambda each: self._promise(self._outlook(each, sequence, step))
        )

    def is_better(self, draft: Attachment, course: Course, step: int) -> bool:
        """Whether a draft of another kind promises a sequence clearly more than its own does, and
        the sequence has been with its own for a while."""
        has_stayed = step - course.opened_at >= MIN_STAY
        if self._config is None or not has_stayed or course.fixed_wish is not None:
            return False
        other = self._outlook(draft, course.sequence, step)
        return self._promise(other) > MOVE_GAIN * self._promise(course)

    def level_rates(self, attachment: Attachment) -> list[float]:
        """Returns the acceptance by level of a draft's kind, over the temperatures with most
        rounds; nothing before the first."""
        found = [p for (*kind, _), p in self._populations.items() if tuple(kind) == attachment.kind]
        most = max(found, key=lambda each: each.num_rounds, default=None)
        if most is None or most.num_rounds == 0:
            return []
        levels = max((most.trees, most.chains), key=lambda each: each.counts.num_trials(0))
        return levels.rates(attachment.base_shape.num_steps)

    def _outlook(self, draft: Attachment, sequence: Sequence, step: int) -> Course:
        """What is known of a sequence at a draft; what it learnt there long ago is forgotten."""
        known = self._courses.get(sequence.sequence_id, {}).get(draft.kind)
        if known is not None and step - known.opened_at < MAX_OUTLOOK_AGE:
            return known
        config = DEFAULT_CONFIG if self._config is None else self._config
        smoothing = config.candidates(1).smoothing
        return Course(draft, sequence, self._population(draft, sequence), smoothing)

    def _promise(self, course: Course) -> float:
        """Returns the tokens a second of a sequence that is alone with a draft."""
        assert self._config is not None
        group, device = self.group([course], self._config.candidates(1)), self._costs.device
        return goodput_of([group], best_choices([group], 0, device), 0, device)

    def _population(self, attachment: Attachment, sequence: Sequence) -> Population:
        level = sum(sequence.sampling.temperature > each for each in _TEMPERATURES)
        return self._populations.setdefault((*attachment.kind, level), Population())
