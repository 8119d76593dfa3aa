"""Chooses the tree shape that remote drafts of one kind are asked for, or plain steps. No torch.

The policy chooses the highest throughput. It measures the time from one verdict of a sequence to
the next, so waiting, missing trees and host work count. Other choices are tried for a few rounds
now and then, within a small share of the time. The choice never changes a token.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from services.target.adaptive_config import AdaptiveConfig
from services.target.throughput import FORGET_S, Acceptance, CostTable, compared
from shared.tokens import ANY_TREE, NO_TREE, ShapeOrPlain, TreeRequest, TreeShape

MIN_GAIN, MARGIN = 1.03, 0.1
"""The current choice is replaced by one whose throughput is `MIN_GAIN + MARGIN / sqrt(steps)` times
as high, after so many measured steps: few steps are poor evidence."""
FEWEST_ROUNDS = 4
"""Rounds of each sequence that a choice, or a trial, needs before it is judged."""
LEAST_STEPS = 2
"""Measured steps of a choice that tell something: one may have stalled."""
STEPS_A_DECISION = 8
"""Plain steps between two decisions, unless the batch size changes."""
SKIPPED_ROUNDS, COLD_STEPS = 2, 4
"""Rounds at the beginning of a trial, and steps at the beginning of the first choice, that are not
measured: steps start or stop running ahead, and kernels are compiled."""
TRIAL_SHARE, ALLOWANCE_S = 0.015, 0.1
"""Share of the time that trials may cost, and the largest unused budget, which is also the first
one."""
LEAST_COST = 0.1
"""Share of its duration that a trial is charged at least. Few rounds underestimate the cost, and
the draft's work before and after them slows other rounds down."""
MOST_COST_S = 0.1
"""A trial that has cost so much ends, and is charged no more: kernels are compiled for a shape that
is new. A trial of trees ends sooner where a wait in vain costs less."""
FIRST_LIMIT_S, LAST_LIMIT_S = 1.0, 8.0
"""Longest duration of a trial. It doubles while drafts do not answer within a trial. From the
second such trial on, so does what a trial is charged."""
TRIAL_PAUSE_S, LAST_PAUSE_S = 0.25, 20.0
"""Shortest and longest time between two trials."""
PROMISING_GAIN = 1.25
"""A choice that was so much faster at another batch size is tried at once."""
TRIAL_WORTH = 0.9
"""A choice is tried if its optimistic throughput is at least this share of the current one's."""
LOST_SHARE = 0.5
"""A trial ends at once if its throughput is below this share of the current choice's."""
HOPE = 0.15
"""Added to the acceptance rates of a choice in an optimistic estimate."""
WINDOW = 64
"""Last steps that are kept for each choice and batch size."""
CHANGE = 1.5
"""If the last few steps all took so many times longer, or shorter, than the average, the earlier
steps are dropped."""
OUTLIER = 3.0
"""A round counts as at most this many times the median: first rounds compile kernels, others
stall."""
TREES_A_WAIT = 2.0
"""Trees that one wait is worth: a draft that drafts ahead can then push the next ones in time."""
SHORTEST_ROUND_S = 1e-6
ALWAYS = 1 << 30
"""A batch size above any possible one."""
IDLE_S = 0.5
"""A trial is dropped after so long without a turn of the loop."""
HOLD_S = 0.25
"""Sequences that have ended count for so long in the batch size. Others may soon take their places,
and a draft has to read every sequence that it is given."""


@dataclass(frozen=True, slots=True)
class Round:
    """Means over rounds.

    Attributes:
        seconds: from one verdict of a sequence to the next.
        tokens: committed in a round.
        trees: share of the rounds that verified a tree of a draft.
    """

    seconds: float
    tokens: float
    trees: float


@dataclass(slots=True)
class _Step:
    """Sums over the rounds of one step that had the same choice."""

    num_rounds: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    num_trees: int = 0

    @property
    def round_s(self) -> float:
        return self.seconds / self.num_rounds


class Rounds:
    """The last steps of one choice at one batch size."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque(maxlen=WINDOW)
        self._mean: Round | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: _Step) -> None:
        """Adds a step."""
        self._steps.append(step)
        latest = list(self._steps)[-FEWEST_ROUNDS:]
        if len(self._steps) > len(latest) and self.mean is not None:
            mean_s = self.mean.seconds
            times_s = [step.round_s for step in latest]
            if min(times_s) > CHANGE * mean_s or max(times_s) < mean_s / CHANGE:
                self._steps = deque(latest, maxlen=WINDOW)
        self._mean = None

    def clear(self) -> None:
        """Drops all steps. `mean` keeps its value until the next step."""
        self._steps.clear()

    @property
    def mean(self) -> Round | None:
        """Means over the steps; None before the first one."""
        if self._mean is None and self._steps:
            num_rounds = sum(step.num_rounds for step in self._steps)
            by_time = sorted(self._steps, key=lambda step: step.round_s)
            totals = accumulate(step.num_rounds for step in by_time)
            median_s = next(
                step.round_s
                for step, total in zip(by_time, totals, strict=True)
                if 2 * total >= num_rounds
            )
            longest_s = OUTLIER * median_s
            seconds = sum(step.num_rounds * min(step.round_s, longest_s) for step in self._steps)
            num_tokens = sum(step.num_tokens for step in self._steps)
            num_trees = sum(step.num_trees for step in self._steps)
            mean_s = max(seconds / num_rounds, SHORTEST_ROUND_S)
            self._mean = Round(mean_s, num_tokens / num_rounds, num_trees / num_rounds)
        return self._mean


class RoundTimes:
    """Measured rounds by choice and batch size.

    Batch sizes are grouped: each power of the square root of two has a group.
    """

    def __init__(self) -> None:
        self._rounds: dict[ShapeOrPlain, dict[int, Rounds]] = {}

    def at(self, choice: ShapeOrPlain, num_sequences: int) -> Rounds:
        """Returns the rounds of the batch size's group, perhaps without a step yet."""
        by_size = self._rounds.setdefault(choice, {})
        return by_size.setdefault(_size(num_sequences), Rounds())

    def estimate(
        self, choice: ShapeOrPlain, num_sequences: int, like: ShapeOrPlain
    ) -> Round | None:
        """Returns the means at a batch size, or at the nearest measured one; None where the choice
        was never measured.

        Args:
            like: seconds of another batch size are scaled by the ratio that this choice's have; of
                two trees, by the ratio of the seconds for a token.
        """
        by_size, size = self._rounds.get(choice, {}), _size(num_sequences)
        means = {key: mean for key, rounds in by_size.items() if (mean := rounds.mean) is not None}
        if not means:
            return None
        nearest = min(means, key=lambda key: abs(key - size))
        like_by_size = self._rounds.get(like, {})
        here, there = (
            like_by_size[key].mean if key in like_by_size else None for key in (size, nearest)
        )
        if nearest == size or here is None or there is None:
            return means[nearest]
        scale = here.seconds / there.seconds
        if choice is not None and like is not None:
            scale *= there.tokens / here.tokens
        return replace(means[nearest], seconds=scale * means[nearest].seconds)

    def measured(self) -> dict[tuple[ShapeOrPlain, int], float]:
        """Returns the mean seconds of a round by choice and the middle of the batch-size group."""
        return {
            (choice, round(2.0 ** (size / 2))): mean.seconds
            for choice, by_size in self._rounds.items()
            for size, rounds in by_size.items()
            if (mean := rounds.mean) is not None
        }


def _size(num_sequences: int) -> int:
    return round(2.0 * math.log2(max(num_sequences, 1)))


@dataclass(slots=True)
class _Trial:
    """A choice on trial.

    Attributes:
        num_rounds: with this choice, a sequence.
        num_other_rounds: with trees of other shapes: the draft has yet to prepare this one.
        num_tokens: committed since the trial began, a sequence.
    """

    choice: ShapeOrPlain
    began_s: float
    num_rounds: float = 0.0
    num_other_rounds: float = 0.0
    num_tokens: float = 0.0


@dataclass(slots=True, eq=False)
class DraftPolicy:
    """The tree shape, or plain steps, for all drafts of one algorithm, model and shape. Owned by
    the engine thread.

    Attributes:
        base: the drafts' own shape, and the first choice.
        config: shapes to choose from by batch size; None allows `base` alone.
        always_up_to: batch sizes up to this one keep their trees even if plain steps are faster.
        is_pinned: an operator fixed the shape at the draft, so other shapes are not requested.
        costs: plain steps measured at start-up. They stand in for batch sizes without a measured
            plain step. Empty if nothing was measured.
        choice: the current choice; a trial does not change it.
        trial_s: total time that trials have cost.
    """

    base: TreeShape
    config: AdaptiveConfig | None = None
    always_up_to: int = 0
    is_pinned: bool = False
    costs: CostTable = field(default_factory=CostTable)
    choice: ShapeOrPlain = field(init=False)
    trial_s: float = 0.0
    times: RoundTimes = field(default_factory=RoundTimes)
    _acceptance: Acceptance = field(default_factory=Acceptance)
    _trial: _Trial | None = None
    _step: dict[ShapeOrPlain, _Step] = field(default_factory=dict)
    _num_step_tokens: int = 0
    _num_cold: int = COLD_STEPS
    _worthwhile_wait_s: float | None = None
    _num_sequences: int = 0
    _num_undecided: int = 0  # steps since the last decision
    _held_until_s: float = -math.inf
    _is_void: bool = False
    _seen_s: dict[ShapeOrPlain, float] = field(default_factory=dict)
    _turned_s: float = -math.inf
    _may_try_s: float = -math.inf
    _paid_s: float = -math.inf  # the trial budget is used up until this time
    _promised: set[tuple[ShapeOrPlain, int]] = field(default_factory=set)
    _limit_s: float = FIRST_LIMIT_S

    def __post_init__(self) -> None:
        self.choice = self.base

    @property
    def is_always_on(self) -> bool:
        """Whether the batch keeps its trees even if plain steps are faster."""
        return max(self._num_sequences, 1) <= self.always_up_to

    @property
    def current(self) -> ShapeOrPlain:
        """The choice on trial, else the current choice. Without trees drafts lose their sequences:
        sending them every verdict would cost host time that plain steps need."""
        return self.choice if self._trial is None else self._trial.choice

    @property
    def is_trying(self) -> bool:
        """Whether a trial is under way."""
        return self._trial is not None

    @property
    def tree_request(self) -> TreeRequest:
        """The tree request of a sequence whose request sets nothing about it."""
        if self.current is None:
            return NO_TREE
        return ANY_TREE if self.current == self.base else TreeRequest(self.current)

    @property
    def worthwhile_wait_s(self) -> float:
        """Longest time for which waiting for a tree can pay: that of the plain steps which bring as
        many tokens as a whole path of `TREES_A_WAIT` trees. Infinite where plain steps are no
        alternative, or were never measured. The same for all verdicts between two turns."""
        if self._worthwhile_wait_s is None:
            plain = (
                None if self.is_always_on else self._round(None, self._num_sequences, self.choice)
            )
            shape = self.current or self.base
            num_tokens = TREES_A_WAIT * min(shape.num_steps, shape.max_node_count)
            wait_s = math.inf if plain is None else num_tokens * plain.seconds / plain.tokens
            self._worthwhile_wait_s = wait_s
        return self._worthwhile_wait_s

    @property
    def pays(self) -> bool | None:
        """Whether trees are faster than plain steps; None while one of both is unknown."""
        compared = {None, self.choice}
        if self.is_always_on or any(
            self._rate(choice, self._num_sequences) is None for choice in compared
        ):
            return None
        return self.choice is not None

    @property
    def speed(self) -> float | None:
        """Throughput of one sequence with such a draft, in tokens/s; None while unknown."""
        if len(self.times.at(self.choice, self._num_sequences)) < FEWEST_ROUNDS:
            return None
        return self._rate(self.choice, self._num_sequences)

    def comparison(self) -> str:
        """Returns the throughputs behind `pays`, in words."""
        batch = max(self._num_sequences, 1)
        rates = {choice: batch * rate for choice, rate in self._rates(batch).items()}
        return f"measured {compared(rates, batch)}"

    def level_rates(self) -> list[float]:
        """Returns the acceptance rate of each tree level."""
        return self._acceptance.rates(self.choice or self.base, is_greedy=True)

    def observe_round(
        self, choice: ShapeOrPlain, num_tokens: int, seconds: float, *, has_tree: bool
    ) -> None:
        """Adds a round, with or without a verified tree.

        Args:
            choice: the requested shape; None for a plain step.
            num_tokens: committed.
            seconds: since the sequence's previous verdict.
            has_tree: a tree of the draft was verified.
        """
        step = self._step.setdefault(choice, _Step())
        step.num_rounds += 1
        step.seconds += seconds
        step.num_tokens += num_tokens
        step.num_trees += has_tree
        self._num_step_tokens += num_tokens

    def observe_excused(self, num_tokens: int) -> None:
        """Adds a round without a tree whose draft reads a prompt or warms up, or is silent in a
        trial. Its time says nothing about the choice; its tokens count for the cost of a trial."""
        self._num_step_tokens += num_tokens

    def observe_accepted(self, shape: TreeShape, num_accepted: int) -> None:
        """Adds the accepted length of a verified tree."""
        self._acceptance.observe(shape, is_greedy=True, accepted=(num_accepted,))

    def disregard(self) -> None:
        """Ignores the time of the current step: it captures graphs or compiles kernels."""
        self._is_void = True

    def drafts_changed(self) -> None:
        """Allows a trial at once, because another draft of the kind attached."""
        self._may_try_s = -math.inf
        if self._trial is None and self.choice is None:
            self._seen_s.clear()

    def turn(self, num_sequences: int, now_s: float, num_reading: int = 0) -> None:
        """Decides. Called in each turn of the loop, and after sequences were admitted.

        Args:
            num_sequences: in decoding.
            num_reading: whose prompts are being computed. They count in the batch size, since
                drafts read prompts as well.
        """
        gap_s, batch = now_s - self._turned_s, num_sequences + num_reading
        if gap_s > IDLE_S:
            self._trial = None
        elif self._trial is not None and (self._is_void or not self._num_sequences):
            # Graphs were captured, or nothing was decoding: that costs the trial nothing.
            self._trial.began_s += gap_s
        self._turned_s, self._worthwhile_wait_s = now_s, None
        has_news = self._add_step(num_sequences, batch)
        if not batch:
            self._num_sequences = 0
            return
        batch = self._held(batch, now_s)
        is_new_size = _size(batch) != _size(self._num_sequences)
        self._num_sequences = batch
        self._seen_s[self.current] = now_s
        options = self._options(batch)
        if self._trial is not None and self._trial.choice not in options:
            self._trial = None  # it is for other sizes of the batch
        if self.choice not in options:
            self.choice, self._trial = options[0], None
        elif len(options) == 1:
            return
        elif self._trial is not None:
            self._continue(self._trial, batch, now_s)
        else:
            self._num_undecided += has_news
            # Without trees, only the times of plain steps can change a decision.
            least = 1 if self.choice is not None else STEPS_A_DECISION
            if is_new_size or self._num_undecided >= least:
                self._num_undecided = 0
                self._decide(batch, now_s, may_try=has_news)

    def _held(self, num_sequences: int, now_s: float) -> int:
        """Returns the largest batch size within `HOLD_S`, or the present one if such small batches
        always have trees."""
        is_small = num_sequences <= self.always_up_to
        if is_small or num_sequences >= self._num_sequences or now_s >= self._held_until_s:
            self._held_until_s = now_s + HOLD_S
            return num_sequences
        return self._num_sequences

    def _add_step(self, num_decoding: int, num_sequences: int) -> bool:
        """Adds the rounds since the last turn to `times`; returns whether there were any.

        Args:
            num_sequences: the batch size, with sequences whose prompts are being computed.
        """
        by_choice, self._step = self._step, {}
        num_tokens, self._num_step_tokens = self._num_step_tokens, 0
        is_void, self._is_void = self._is_void, False
        trial, num_decoding = self._trial, max(num_decoding, 1)
        if trial is not None:
            trial.num_tokens += num_tokens / num_decoding
        if is_void:
            return False
        for choice, step in by_choice.items():
            if trial is None and self._num_cold and choice == self.base:
                self._num_cold -= 1
                continue
            if trial is not None and choice == trial.choice:
                is_skipped = trial.num_rounds < SKIPPED_ROUNDS
                trial.num_rounds += step.num_rounds / num_decoding
                if is_skipped:
                    continue
            elif trial is not None and choice is not None:
                trial.num_other_rounds += step.num_rounds / num_decoding
            self.times.at(choice, num_sequences).add(step)
        return bool(by_choice)

    def _continue(self, trial: _Trial, num_sequences: int, now_s: float) -> None:
        """Ends a trial after enough rounds or time, or once it has cost too much."""
        current = self._rate(self.choice, num_sequences)
        elapsed_s = now_s - trial.began_s
        lost_s = max(elapsed_s - (trial.num_tokens / current if current else math.inf), 0.0)
        num_rounds = max(trial.num_rounds, trial.num_other_rounds)
        has_its_rounds = num_rounds >= SKIPPED_ROUNDS + FEWEST_ROUNDS
        is_done = has_its_rounds or self._is_lost(trial, num_sequences, current)
        most_s = MOST_COST_S
        if trial.choice is not None:
            most_s = min(most_s, self.worthwhile_wait_s)
        if not (is_done or elapsed_s > self._limit_s or lost_s > most_s):
            return
        self._trial = None
        self._limit_s = FIRST_LIMIT_S if is_done else min(2.0 * self._limit_s, LAST_LIMIT_S)
        if trial.choice is None:
            lost_s += elapsed_s  # drafts have to catch up afterwards
        self.trial_s += lost_s
        cost_s = min(max(lost_s, LEAST_COST * elapsed_s), MOST_COST_S) / TRIAL_SHARE
        cost_s *= max(self._limit_s / (2.0 * FIRST_LIMIT_S), 1.0)
        # The unused budget pays for the trial, or else the time until the next one.
        self._paid_s = max(self._paid_s, now_s - ALLOWANCE_S / TRIAL_SHARE) + cost_s
        pause_s = min(self._paid_s - now_s, cost_s, LAST_PAUSE_S)
        self._may_try_s = now_s + max(pause_s, TRIAL_PAUSE_S)
        if is_done:
            self._switch(num_sequences)

    def _is_lost(self, trial: _Trial, num_sequences: int, current: float | None) -> bool:
        """Whether the first rounds of a trial are so slow that it needs no more.

        Args:
            current: throughput of one sequence with the current choice; None while unknown.
        """
        num_steps = len(self.times.at(trial.choice, num_sequences))
        if current is None or num_steps < LEAST_STEPS:
            return False
        rate = self._rate(trial.choice, num_sequences)
        return rate is not None and rate < LOST_SHARE * current

    def _decide(self, num_sequences: int, now_s: float, *, may_try: bool) -> None:
        """Switches to a faster choice, or begins a trial of one that may be faster."""
        # Measurements of a batch size that comes back hold until new rounds contradict them.
        if self.times.at(self.choice, num_sequences).mean is not None:
            self._switch(num_sequences)
        if not may_try or len(self.times.at(self.choice, num_sequences)) < FEWEST_ROUNDS:
            return
        self._try_promising(num_sequences, now_s)
        if self._trial is None and now_s >= self._may_try_s:
            self._try(num_sequences, now_s)

    def _switch(self, num_sequences: int) -> None:
        """Switches to the fastest choice with enough measured steps at this batch size. Where no
        round has had a tree lately, plain steps are no slower."""
        if self._lacks_trees(self.choice, num_sequences):
            self.choice = None
        rates = {
            choice: rate
            for choice, rate in self._rates(num_sequences).items()
            if (choice is None and self.costs.plain)
            or (
                len(self.times.at(choice, num_sequences)) >= LEAST_STEPS
                and not self._lacks_trees(choice, num_sequences)
            )
        }
        current = self._rate(self.choice, num_sequences) or 0.0
        best = max(rates, key=lambda choice: rates[choice], default=self.choice)
        if best == self.choice:
            return
        gain = MIN_GAIN + MARGIN / math.sqrt(len(self.times.at(best, num_sequences)) or 1)
        if rates[best] > gain * current:
            self.choice = best

    def _lacks_trees(self, choice: ShapeOrPlain, num_sequences: int) -> bool:
        """Whether plain steps can replace trees of a shape, and no measured round at a batch size
        had one of them."""
        if choice is None or None not in self._options(num_sequences):
            return False
        rounds = self.times.at(choice, num_sequences)
        return len(rounds) >= FEWEST_ROUNDS and rounds.mean is not None and not rounds.mean.trees

    def _is_credible(self, choice: ShapeOrPlain, num_sequences: int) -> bool:
        """Whether the measured time of a choice tells how fast it is. Not where no round had a
        tree, nor where rounds took much longer than those of other trees suggest, with the same
        time for each level: then kernels were compiled, or graphs captured."""
        if self._lacks_trees(choice, num_sequences):
            return False
        own = self.times.at(choice, num_sequences).mean
        plain = self._round(None, num_sequences, self.choice)
        if choice is None or own is None or plain is None:
            return True
        for other in self._options(num_sequences):
            rounds = self.times.at(other, num_sequences)
            if other in (None, choice) or rounds.mean is None or len(rounds) < LEAST_STEPS:
                continue
            draft_s = max(rounds.mean.seconds - plain.seconds, 0.0)
            draft_s *= max(choice.num_steps / other.num_steps, 1.0)
            if own.seconds > OUTLIER * (plain.seconds + draft_s):
                return False
        return True

    def _try(self, num_sequences: int, now_s: float) -> None:
        """Begins a trial of a choice that may be the fastest: plain steps if they were not measured
        at this batch size, else the choice with the oldest measurement. Those without a credible
        one come first, and of these the one whose depth is nearest to that of the current trees."""
        current = self._rate(self.choice, num_sequences) or 0.0
        choices = [
            choice
            for choice in self._options(num_sequences)
            if choice != self.choice
            and self._hope(choice, num_sequences, now_s) > TRIAL_WORTH * current
        ]
        if not choices:
            return
        if None in choices and not len(self.times.at(None, num_sequences)):
            choices = [None]
        depth = (self.choice or self.base).num_steps

        def order(choice: ShapeOrPlain) -> tuple[float, int]:
            is_known = choice in self._seen_s and self._is_credible(choice, num_sequences)
            distance = abs((0 if choice is None else choice.num_steps) - depth)
            return self._seen_s[choice] if is_known else -math.inf, distance

        self._begin_trial(min(choices, key=order), num_sequences, now_s)

    def _try_promising(self, num_sequences: int, now_s: float) -> None:
        """After a change of the batch size: begins a trial of the choice that was fastest at other
        sizes, if it was much faster there than the current choice is here. Once for each size. If
        the current choice is a tree, others are expected to have changed by the same factor."""
        size, current = _size(num_sequences), self._rate(self.choice, num_sequences)
        promises = dict[ShapeOrPlain, float]()
        for choice in self._options(num_sequences):
            if (choice, size) in self._promised or len(self.times.at(choice, num_sequences)):
                continue
            is_scaled = None not in (choice, self.choice)
            rate = self._rate(choice, num_sequences, is_scaled=is_scaled)
            if rate is not None:
                promises[choice] = rate
        best = max(promises, key=lambda choice: promises[choice], default=self.choice)
        if best == self.choice or current is None:
            return
        if promises[best] > PROMISING_GAIN * current:
            self._promised.add((best, size))
            self._begin_trial(best, num_sequences, now_s)

    def _begin_trial(self, choice: ShapeOrPlain, num_sequences: int, now_s: float) -> None:
        self._trial = _Trial(choice, now_s)
        self.times.at(choice, num_sequences).clear()

    def _hope(self, choice: ShapeOrPlain, num_sequences: int, now_s: float) -> float:
        """Returns an optimistic throughput of one sequence."""
        unseen_s = now_s - self._seen_s.get(choice, now_s)
        hope = HOPE
        if self.choice is None:
            # Without trees nothing shows how fast drafts are by now, or whether they are accepted.
            hope = min(HOPE + unseen_s / FORGET_S, 1.0)
        elif self._is_credible(choice, num_sequences):
            rate = self._rate(choice, num_sequences, hope=hope)
            if rate is not None:
                return rate * (1.0 + unseen_s / FORGET_S)
        plain = self._round(None, num_sequences, self.choice)
        if choice is None or plain is None:
            return math.inf
        # A round with a tree takes at least as long as a plain step.
        return self._acceptance.tokens(choice, is_greedy=True, hope=hope) / plain.seconds

    def _rate(
        self, choice: ShapeOrPlain, num_sequences: int, hope: float = 0.0, *, is_scaled: bool = True
    ) -> float | None:
        """Returns the throughput of one sequence, in tokens/s; None if never measured.

        It follows from the measured time of a round and, for trees, from acceptance by level: after
        few rounds these rates are better evidence than the tokens committed.

        Args:
            hope: added to the acceptance rate of every level.
            is_scaled: times measured at another batch size are scaled as those of the current
                choice.
        """
        like = self.choice if is_scaled else choice
        rounds = self._round(choice, num_sequences, like)
        if rounds is None:
            return None
        if choice is None:
            return rounds.tokens / rounds.seconds
        accepted = self._acceptance.tokens(choice, is_greedy=True, hope=hope) - 1.0
        return (1.0 + rounds.trees * accepted) / rounds.seconds

    def _round(self, choice: ShapeOrPlain, num_sequences: int, like: ShapeOrPlain) -> Round | None:
        """Returns the means of a choice, see `RoundTimes.estimate`. Plain steps without a
        measurement at this batch size take the times measured at start-up."""
        if choice is None and not len(self.times.at(None, num_sequences)):
            seconds = self.costs.seconds(None, num_sequences)
            if seconds is not None:
                return Round(seconds, tokens=1.0, trees=0.0)
        return self.times.estimate(choice, num_sequences, like)

    def _rates(self, num_sequences: int) -> dict[ShapeOrPlain, float]:
        """Returns the throughput of one sequence for each choice that was measured."""
        return {
            choice: rate
            for choice in self._options(num_sequences)
            if (rate := self._rate(choice, num_sequences)) is not None
        }

    def _options(self, num_sequences: int) -> Sequence[ShapeOrPlain]:
        """Returns the choices that are allowed at a batch size; at least one."""
        shapes: tuple[TreeShape, ...] = (self.base,)
        may_pause = True
        if self.config is not None:
            allowed = self.config.candidates(num_sequences)
            shapes = shapes if self.is_pinned else allowed.shapes(self.base)
            may_pause = allowed.may_pause
        may_pause = (may_pause and num_sequences > self.always_up_to) or not shapes
        return (*shapes, None) if may_pause else shapes
