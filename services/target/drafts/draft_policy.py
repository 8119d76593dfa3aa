"""Chooses what the drafts of one kind are asked for: trees of one shape, or none. No torch.

The choice is what commits most tokens a second, measured from one verdict of a sequence to the
next: waits, misses and the host's work are in it. What is not in force is tried for a few rounds
now and then, within a share of the time. The choice changes no token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.target.acceptance import FORGET_S, Acceptance
from services.target.adaptive_config import AdaptiveConfig
from services.target.costs import CostTable
from services.target.step_report import compared
from shared.tokens import ANY_TREE, NO_TREE, Choice, TreeRequest, TreeShape

MIN_GAIN, MARGIN = 1.03, 0.1
"""A choice must have been this much faster than the one in force to replace it, and by the second
over the square root of its steps more: few steps say little."""
FEWEST_ROUNDS = 4
"""Rounds of each sequence before a choice is judged, and of a trial."""
SKIPPED_ROUNDS = 2
"""Rounds of a trial before those: steps begin to run ahead, or cease to."""
TRIAL_SHARE, ALLOWANCE_S = 0.015, 0.2
"""Share of the time that trials may cost, and what is saved of it at most, as at first."""
LEAST_COST = 0.1
"""A trial counts as costing this share of its time at least: a few rounds show less than they cost,
and what a draft does before and behind them slows the other rounds."""
MOST_COST_S = 0.1
"""A trial ends once it has cost so much: drafts compile kernels for what they are asked first."""
FIRST_LIMIT_S, LAST_LIMIT_S = 1.0, 8.0
"""Longest trial; doubles while drafts do not get to answer within one."""
TRIAL_PAUSE_S, LAST_PAUSE_S = 0.25, 20.0
"""Least and most time between two trials."""
PROMISING_GAIN = 1.25
"""What was this much faster with another number of sequences is tried at once."""
TRIAL_WORTH = 0.9
"""What promises less than this share of the choice in force, when it is hopeful, is not tried."""
LOST_SHARE = 0.5
"""A trial ends at once where a choice is slower than this share of the one in force."""
HOPE = 0.15
"""Added to the acceptance of trees that are not in force, to find out whether to try them."""
SLOW_S = 15.0
"""Time after which trees that were too slow, whatever was accepted, are tried all the same."""
WINDOW = 64
"""Steps of one choice and number of sequences that are remembered."""
CHANGE = 1.5
"""Steps in a row that took so many times longer or shorter than before replace what was before."""
OUTLIER = 3.0
"""A round counts as at most this many times the usual one: first ones compile, others stall."""
SHORTEST_ROUND_S = 1e-6
ALWAYS = 1 << 30
"""More sequences than there ever are."""
IDLE_S = 0.5
"""After so long without a step a trial is void."""
HOLD_S = 0.25
"""Sequences that have ended count for so long, because others may come in their places: a draft
that is given sequences has to read all of them."""


@dataclass(frozen=True, slots=True)
class Round:
    """An average round.

    Attributes:
        seconds: from one verdict to the next.
        tokens: that it committed.
        trees: share of the rounds that verified a tree of a draft.
    """

    seconds: float
    tokens: float
    trees: float


@dataclass(slots=True)
class _Step:
    """Rounds of one step that were asked for alike, added up."""

    num_rounds: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    num_trees: int = 0

    @property
    def round_s(self) -> float:
        return self.seconds / self.num_rounds


class Rounds:
    """The last rounds of one choice with about one number of sequences, step by step."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._mean: Round | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: _Step) -> None:
        """Takes in a step."""
        self._steps.append(step)
        last = list(self._steps)[-FEWEST_ROUNDS:]
        if len(self._steps) > len(last) and self.mean is not None:
            known_s = self.mean.seconds
            is_slower = min(each.round_s for each in last) > CHANGE * known_s
            if is_slower or max(each.round_s for each in last) < known_s / CHANGE:
                self._steps = deque(last, maxlen=WINDOW)
        self._mean = None

    def clear(self) -> None:
        """Forgets all samples; the mean stays until the next one."""
        self._steps.clear()

    @property
    def mean(self) -> Round | None:
        """The average; None before the first step, the last one known after `clear`."""
        if self._mean is None and self._steps:
            number = sum(each.num_rounds for each in self._steps)
            most_s = OUTLIER * self._median_s(number)
            seconds = sum(each.num_rounds * min(each.round_s, most_s) for each in self._steps)
            num_tokens = sum(each.num_tokens for each in self._steps)
            num_trees = sum(each.num_trees for each in self._steps)
            mean_s = max(seconds / number, SHORTEST_ROUND_S)
            self._mean = Round(mean_s, num_tokens / number, num_trees / number)
        return self._mean

    def _median_s(self, number: int) -> float:
        num_left = (number + 1) // 2
        ordered = sorted(self._steps, key=lambda each: each.round_s)
        for each in ordered:
            num_left -= each.num_rounds
            if num_left <= 0:
                return each.round_s
        raise AssertionError("fewer rounds than counted")


class RoundTimes:
    """Measured times of rounds, by choice and number of sequences.

    Numbers of sequences within a factor of the square root of two share their averages.
    """

    def __init__(self) -> None:
        self._rounds: dict[Choice, dict[int, Rounds]] = {}

    def at(self, choice: Choice, num_sequences: int) -> Rounds:
        """Returns the averages with about so many sequences, perhaps of no step yet."""
        sizes = self._rounds.setdefault(choice, {})
        return sizes.setdefault(_size(num_sequences), Rounds())

    def estimate(self, choice: Choice, num_sequences: int, like: Choice) -> Round | None:
        """Returns the average round, or that of the nearest number of sequences that was measured;
        None where nothing was. Its seconds are scaled as those of `like` were."""
        found, size = self._rounds.get(choice, {}), _size(num_sequences)
        means = {each: mean for each, rounds in found.items() if (mean := rounds.mean) is not None}
        if not means:
            return None
        nearest = min(means, key=lambda each: abs(each - size))
        others = self._rounds.get(like, {})
        here, there = (others[each].mean if each in others else None for each in (size, nearest))
        if nearest == size or here is None or there is None:
            return means[nearest]
        scale = here.seconds / there.seconds
        return replace(means[nearest], seconds=scale * means[nearest].seconds)

    def measured(self) -> dict[tuple[Choice, int], float]:
        """Returns the seconds of rounds by choice and about how many sequences."""
        return {
            (choice, round(2.0 ** (size / 2))): mean.seconds
            for choice, sizes in self._rounds.items()
            for size, rounds in sizes.items()
            if (mean := rounds.mean) is not None
        }


def _size(num_sequences: int) -> int:
    return round(2.0 * math.log2(max(num_sequences, 1)))


@dataclass(slots=True)
class _Trial:
    """A choice that is tried.

    Attributes:
        num_rounds: of each sequence that the choice has had.
        num_tokens: of each sequence, since the trial began.
    """

    choice: Choice
    began_s: float
    num_rounds: float = 0.0
    num_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class DraftPolicy:
    """The choice for the drafts of one kind: one algorithm, model and shape. Owned by the engine
    thread.

    Attributes:
        base: the shape of the drafts' trees while no other is wanted.
        config: shapes to choose from by number of sequences; None is the drafts' own.
        always_up_to: sequences that want trees even where plain steps are faster.
        is_pinned: an operator fixed the shape at the draft, so that no other is asked for.
        costs: of plain steps, measured at start: taken where none with as many sequences has been
            timed since. Empty where none were measured.
        choice: what is in force, trials aside.
        trial_s: time that trials have cost.
    """

    base: TreeShape
    config: AdaptiveConfig | None = None
    always_up_to: int = 0
    is_pinned: bool = False
    costs: CostTable = field(default_factory=CostTable)
    choice: Choice = field(init=False)
    trial_s: float = 0.0
    times: RoundTimes = field(default_factory=RoundTimes)
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _trial: _Trial | None = None
    _step: dict[Choice, _Step] = field(default_factory=dict)
    _num_step_tokens: int = 0
    _num_sequences: int = 0
    _held_until_s: float = -math.inf
    _is_void: bool = False
    _seen_s: dict[Choice, float] = field(default_factory=dict)
    _turned_s: float = -math.inf
    _may_try_s: float = -math.inf
    _paid_s: float = -math.inf  # until when the time has paid for trials
    _promised: set[tuple[Choice, int]] = field(default_factory=set)
    _limit_s: float = FIRST_LIMIT_S

    def __post_init__(self) -> None:
        self.choice = self.base

    @property
    def is_always_on(self) -> bool:
        """Whether trees are wanted of as many sequences as there are, whatever they bring."""
        return max(self._num_sequences, 1) <= self.always_up_to

    @property
    def current(self) -> Choice:
        """The choice that drafts are asked for now: the trial's, or the one in force."""
        return self.choice if self._trial is None else self._trial.choice

    @property
    def is_trying(self) -> bool:
        """Whether something is tried that is not in force."""
        return self._trial is not None

    @property
    def is_on(self) -> bool:
        """Whether trees are wanted now. Drafts lose their sequences while none are: to tell them
        of every round costs the host a part of what plain steps bring."""
        return self.current is not None

    @property
    def tree_request(self) -> TreeRequest:
        """The tree request of a sequence that asks for nothing by itself."""
        if self.current is None:
            return NO_TREE
        return ANY_TREE if self.current == self.base else TreeRequest(self.current)

    @property
    def pays(self) -> bool | None:
        """Whether trees are faster than plain steps; None while that is not known."""
        if self.is_always_on or self._rate(None, self._num_sequences) is None:
            return None
        return self.choice is not None

    @property
    def speed(self) -> float | None:
        """The tokens a second of one sequence that has such a draft; None while unknown."""
        known = len(self.times.at(self.choice, self._num_sequences))
        return self._rate(self.choice, self._num_sequences) if known >= FEWEST_ROUNDS else None

    def comparison(self) -> str:
        """Returns the tokens a second behind `pays`."""
        number = max(self._num_sequences, 1)
        rates = {each: number * rate for each, rate in self._rates(number).items()}
        return f"measured {compared(rates, number)}"

    def level_rates(self) -> list[float]:
        """Returns the acceptance of each level of the trees that are wanted, or would be."""
        return self._acceptance.rates(self.choice or self.base, is_greedy=True)

    def saw_round(self, choice: Choice, num_tokens: int, seconds: float, *, has_tree: bool) -> None:
        """Learns from a round, whether its tree came or not.

        Args:
            choice: what was asked for; None where no tree was.
            num_tokens: committed.
            seconds: since the verdict before.
            has_tree: a tree of the draft was verified.
        """
        found = self._step.setdefault(choice, _Step())
        found.num_rounds += 1
        found.seconds += seconds
        found.num_tokens += num_tokens
        found.num_trees += has_tree
        self._num_step_tokens += num_tokens

    def saw_excused(self, num_tokens: int) -> None:
        """A round went without a tree because its draft reads a prompt or warms up: the round says
        nothing about the choice, but counts into what a trial costs."""
        self._num_step_tokens += num_tokens

    def saw_accepted(self, shape: TreeShape, num_accepted: int) -> None:
        """Learns how many levels of a tree were accepted."""
        self._acceptance.observe(shape, is_greedy=True, accepted=(num_accepted,))

    def disregard(self) -> None:
        """The step under way takes longer for a reason of its own: graphs are captured, kernels
        compiled."""
        self._is_void = True

    def drafts_changed(self) -> None:
        """Another draft of the kind attached: a trial may begin at once."""
        self._may_try_s = -math.inf
        if self._trial is None and self.choice is None:
            self._seen_s.clear()

    def turn(self, num_sequences: int, now_s: float, num_reading: int = 0) -> None:
        """Decides; called in each turn of the loop, and when sequences were admitted.

        Args:
            num_sequences: that decode.
            num_reading: whose prompts are read. Drafts read them as well, unless no trees are
                wanted of so many.
        """
        gap_s, number = now_s - self._turned_s, num_sequences + num_reading
        if gap_s > IDLE_S:
            self._trial = None
        elif self._trial is not None and not self._num_sequences:
            self._trial.began_s += gap_s  # no sequence was decoding, so the trial cost nothing
        self._turned_s = now_s
        has_news = self._fold(num_sequences, number)
        if not number:
            self._num_sequences = 0
            return
        number = self._held(number, now_s)
        is_new = _size(number) != _size(self._num_sequences)
        self._num_sequences = number
        self._seen_s[self.current] = now_s
        if self.choice not in (options := self._options(number)):
            self.choice, self._trial = options[0], None
        elif len(options) == 1:
            return
        elif self._trial is not None:
            self._continue(self._trial, number, now_s)
        elif has_news or is_new:
            self._decide(number, now_s, may_try=has_news)

    def _held(self, number: int, now_s: float) -> int:
        """Returns the most sequences of the last while, unless trees are wanted of so few."""
        is_few = number <= self.always_up_to
        if is_few or number >= self._num_sequences or now_s >= self._held_until_s:
            self._held_until_s = now_s + HOLD_S
            return number
        return self._num_sequences

    def _fold(self, num_decoding: int, num_sequences: int) -> bool:
        """Takes in the rounds since the last turn; returns whether there were any.

        Args:
            num_sequences: that decode or whose prompts are read: what choices are made by.
        """
        step, self._step = self._step, {}
        num_tokens, self._num_step_tokens = self._num_step_tokens, 0
        is_void, self._is_void = self._is_void, False
        trial, number = self._trial, max(num_decoding, 1)
        if trial is not None:
            trial.num_tokens += num_tokens / number
        if is_void:
            return False
        for choice, seen in step.items():
            if trial is not None and choice == trial.choice:
                is_early = trial.num_rounds < SKIPPED_ROUNDS
                trial.num_rounds += seen.num_rounds / number
                if is_early:
                    continue
            self.times.at(choice, num_sequences).add(seen)
        return bool(step)

    def _continue(self, trial: _Trial, num_sequences: int, now_s: float) -> None:
        """Ends a trial when it has had its rounds, or its time, or has cost too much."""
        own = self._rate(self.choice, num_sequences)
        elapsed_s = now_s - trial.began_s
        lost_s = max(elapsed_s - (trial.num_tokens / own if own else math.inf), 0.0)
        has_its_rounds = trial.num_rounds >= SKIPPED_ROUNDS + FEWEST_ROUNDS
        is_done = has_its_rounds or self._is_lost(trial, num_sequences, own)
        if not (is_done or elapsed_s > self._limit_s or lost_s > MOST_COST_S):
            return
        self._trial = None
        self._limit_s = FIRST_LIMIT_S if is_done else min(2.0 * self._limit_s, LAST_LIMIT_S)
        if trial.choice is None:
            lost_s += elapsed_s  # drafts have to catch up behind it
        self.trial_s += lost_s
        cost_s = max(lost_s, LEAST_COST * elapsed_s) / TRIAL_SHARE
        # What was saved before pays for the trial, or the time until the next one does.
        self._paid_s = max(self._paid_s, now_s - ALLOWANCE_S / TRIAL_SHARE) + cost_s
        pause_s = min(self._paid_s - now_s, cost_s, LAST_PAUSE_S)
        self._may_try_s = now_s + max(pause_s, TRIAL_PAUSE_S)
        if is_done:
            self._switch(num_sequences)

    def _is_lost(self, trial: _Trial, num_sequences: int, own: float | None) -> bool:
        """Whether the first rounds of a trial are so slow that no more are needed.

        Args:
            own: tokens a second of one sequence with the choice in force; None while unknown.
        """
        if own is None or not len(self.times.at(trial.choice, num_sequences)):
            return False
        found = self._rate(trial.choice, num_sequences)
        return found is not None and found < LOST_SHARE * own

    def _decide(self, num_sequences: int, now_s: float, *, may_try: bool) -> None:
        """Takes what was faster, or tries what might be."""
        # What is known of a load that comes back holds until its rounds say otherwise.
        if self.times.at(self.choice, num_sequences).mean is not None:
            self._switch(num_sequences)
        if not may_try or len(self.times.at(self.choice, num_sequences)) < FEWEST_ROUNDS:
            return
        self._try_promising(num_sequences, now_s)
        if self._trial is None and now_s >= self._may_try_s:
            self._try(num_sequences, now_s)

    def _switch(self, num_sequences: int) -> None:
        """Takes the fastest of the choices that were measured with so many sequences."""
        rates = {
            each: rate
            for each, rate in self._rates(num_sequences).items()
            if len(self.times.at(each, num_sequences)) >= FEWEST_ROUNDS - 1
            or (each is None and self.costs.plain)
        }
        own = self._rate(self.choice, num_sequences) or 0.0
        best = max(rates, key=lambda each: rates[each], default=self.choice)
        if best == self.choice:
            return
        gain = MIN_GAIN + MARGIN / math.sqrt(len(self.times.at(best, num_sequences)) or 1)
        if rates[best] > gain * own:
            self.choice = best

    def _try(self, num_sequences: int, now_s: float) -> None:
        """Begins a trial of what might be the best: of plain steps if they were not measured with
        so many sequences, else of what was not seen for longest."""
        hopes = {
            each: self._hope(each, num_sequences, now_s)
            for each in self._options(num_sequences)
            if each != self.choice
        }
        own = self._rate(self.choice, num_sequences) or 0.0
        others = [each for each, hope in hopes.items() if hope > TRIAL_WORTH * own]
        if not others:
            return
        choice = min(others, key=lambda each: self._seen_s.get(each, -math.inf))
        if None in others and not len(self.times.at(None, num_sequences)):
            choice = None
        self._begin_trial(choice, num_sequences, now_s)

    def _try_promising(self, num_sequences: int, now_s: float) -> None:
        """The load has changed: begins a trial of what was not measured with so many sequences, and
        was much faster with others than the choice in force is now. Once for each number."""
        size, own = _size(num_sequences), self._rate(self.choice, num_sequences)
        promises = {
            each: rate
            for each in self._options(num_sequences)
            if (each, size) not in self._promised
            and not len(self.times.at(each, num_sequences))
            and (rate := self._rate(each, num_sequences, is_scaled=False)) is not None
        }
        best = max(promises, key=lambda each: promises[each], default=self.choice)
        if best != self.choice and own is not None and promises[best] > PROMISING_GAIN * own:
            self._promised.add((best, size))
            self._begin_trial(best, num_sequences, now_s)

    def _begin_trial(self, choice: Choice, num_sequences: int, now_s: float) -> None:
        self._trial = _Trial(choice, now_s)
        self.times.at(choice, num_sequences).clear()

    def _hope(self, choice: Choice, num_sequences: int, now_s: float) -> float:
        """Returns the tokens a second of one sequence that a choice may bring."""
        unseen_s = now_s - self._seen_s.get(choice, now_s)
        hope = HOPE
        if self.choice is None:
            # While no trees are verified nothing tells whether they would be accepted.
            hope = min(HOPE + unseen_s / FORGET_S, 1.0)
        rate = self._rate(choice, num_sequences, hope=hope)
        if rate is not None:
            is_old = self.choice is None and unseen_s >= SLOW_S
            return math.inf if is_old else rate * (1.0 + unseen_s / FORGET_S)
        plain = self._round(None, num_sequences, self.choice)
        if choice is None or plain is None:
            return math.inf
        # A round with a tree takes no less than a plain step.
        return self._acceptance.tokens(choice, is_greedy=True, hope=HOPE) / plain.seconds

    def _rate(
        self, choice: Choice, num_sequences: int, hope: float = 0.0, *, is_scaled: bool = True
    ) -> float | None:
        """Returns the tokens a second of one sequence, from the time of rounds and, for trees, from
        acceptance by level, which few rounds show better than their tokens do; None where no round
        was measured.

        Args:
            hope: added to the acceptance of every level.
            is_scaled: rounds that were measured with other numbers of sequences take so many times
                longer or shorter as those of the choice in force.
        """
        like = self.choice if is_scaled else choice
        rounds = self._round(choice, num_sequences, like)
        if rounds is None:
            return None
        if choice is None:
            return rounds.tokens / rounds.seconds
        accepted = self._acceptance.tokens(choice, is_greedy=True, hope=hope) - 1.0
        return (1.0 + rounds.trees * accepted) / rounds.seconds

    def _round(self, choice: Choice, num_sequences: int, like: Choice) -> Round | None:
        """Returns the average round, see `RoundTimes.estimate`; plain ones as they were measured
        at start, where none was with so many sequences since."""
        if choice is None and not len(self.times.at(None, num_sequences)):
            seconds = self.costs.seconds(None, num_sequences)
            if seconds is not None:
                return Round(seconds, tokens=1.0, trees=0.0)
        return self.times.estimate(choice, num_sequences, like)

    def _rates(self, num_sequences: int) -> dict[Choice, float]:
        """Returns the tokens a second of one sequence for each choice that was measured."""
        options = self._options(num_sequences)
        found = {each: self._rate(each, num_sequences) for each in options}
        return {each: rate for each, rate in found.items() if rate is not None}

    def _options(self, num_sequences: int) -> Sequence[Choice]:
        """Returns what may be chosen with so many sequences; at least one."""
        shapes: tuple[TreeShape, ...] = (self.base,)
        may_pause = True
        if self.config is not None:
            allowed = self.config.candidates(num_sequences)
            shapes = shapes if self.is_pinned else allowed.shapes(self.base)
            may_pause = allowed.may_pause
        may_pause = (may_pause and num_sequences > self.always_up_to) or not shapes
        return (*shapes, None) if may_pause else shapes
