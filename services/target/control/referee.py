"""Whether speculation runs at all: where it is measured to be faster than plain decoding. No torch.

The model of a cycle says which trees pay best. Whether they pay depends on more than it knows: who
shares cores with whom, prompts that come and go, sequences that are out of step. So the referee
compares what is committed in windows of plain decoding and of speculation, by about how many
sequences decode, and lets speculation run only where it is faster beyond doubt. Elsewhere it is
off, which is plain decoding in every respect, but for trials within the budget of probes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.target.control.averages import Typical
from services.target.control.choices import Freedom
from services.target.control.gain_estimate import GainEstimate
from services.target.control.probe_budget import ProbeBudget
from services.target.control.regime import Regime, Stance
from services.target.control.speed_window import SpeedWindow

MIN_GAIN = 0.01
"""Gain that speculation must be above beyond doubt, in parts of plain decoding's usual speed."""

WIDE_GAIN = 0.2
"""A gain above this is compared anew with sequences that stay at their drafts: what that costs a
plain step could not hide it."""

WINDOW_ROUNDS = 4
"""Rounds of each sequence in a window."""

FEWEST_ROUNDS = 16
HOPELESS = 0.6
"""A trial's window ends after so many rounds, one of each sequence, if it is below this speed."""

MOST_SETTLING_ROUNDS = 16
"""Rounds of each sequence after which speculation counts although drafts still read prompts."""

CLEAR_LOSS = 0.1
"""A trial that shows a loss above this beyond doubt counts as three that failed."""

MOST_LOSSES = 5
"""Windows of loss in a row that end speculation, however well it did before."""

MOST_TRIAL_WINDOWS = 12
NUM_PLAIN_WINDOWS = 1
"""Before a trial, so that it is compared with what plain decoding is then; twice as many after each
trial that failed."""

MOST_DOUBLINGS = 5

LEARNING_STEPS = 8
"""Plain steps whose time a trial in a new regime may cost beyond the budget, once."""

SIZE_SMOOTHING = 0.25
OCTAVE_EDGE = 0.6
"""Octaves from its middle at which a regime ends; a bit more than half of one."""

UNKNOWN_GAIN = 0.3
"""Standard deviation of what the gain changes by from one regime, or set of drafts, to another."""

GAIN_AN_OCTAVE = 0.5
"""Part of the gain that is expected to be left where twice as many sequences decode."""


@dataclass(slots=True)
class Referee:
    """Decides the stance of one engine.

    Attributes:
        regimes: by the octave of how many sequences decode.
        num_changes: of the stance.
        is_settling: the stance has changed, and what is measured belongs to neither side.
        is_bound: the stance is not to be decided here, so nothing is a trial.
    """

    budget: ProbeBudget
    stance: Stance = Stance.OFF
    regimes: dict[int, Regime] = field(default_factory=dict)
    num_changes: int = 0
    is_settling: bool = False
    is_bound: bool = False
    _octave: int | None = None
    _size: float = 0.0
    _window: SpeedWindow = field(default_factory=SpeedWindow)
    _num_windows: int = 0
    _prompt_row_s: Typical = field(default_factory=Typical)

    @property
    def regime(self) -> Regime | None:
        """Where decoding is now; None before it began."""
        return None if self._octave is None else self.regimes[self._octave]

    @property
    def num_sequences(self) -> int:
        """About how many sequences decode; 0 before any did."""
        return 0 if self._octave is None else 1 << max(self._octave, 0)

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster than plain decoding; None before a trial has told."""
        regime = self.regime
        if regime is None or self.is_bound or not (regime.pays or regime.num_failed):
            return None
        return regime.pays

    @property
    def is_sure(self) -> bool:
        """Whether speculation runs and is known to pay, or is not to be switched off."""
        regime = self.regime
        pays = regime is not None and regime.pays and not self.is_settling
        return self.stance is Stance.ON and (pays or self.is_bound)

    @property
    def eagerness(self) -> float:
        """Share of the budget that trials may use."""
        return 1.0 if self.regime is None else self.regime.eagerness

    @property
    def freedom(self) -> Freedom:
        """What may be chosen where speculation runs."""
        return Freedom.ANY if self.regime is None or self.is_bound else self.regime.freedom

    @property
    def num_trials(self) -> int | None:
        """Of speculation in this regime, while it is not known to pay; None where it is, or where
        nothing is decided."""
        regime = self.regime
        return None if regime is None or regime.pays or self.is_bound else regime.num_trials

    @property
    def knows_prompts(self) -> bool:
        """Whether it is known how long plain decoding takes for prompts."""
        return self._prompt_row_s.is_sure

    @property
    def window(self) -> SpeedWindow:
        """What is measured now."""
        return self._window

    def doubt(self) -> None:
        """Drafts came or went."""
        for regime in self.regimes.values():
            regime.estimate.doubt(UNKNOWN_GAIN)

    def judge(self, num_sequences: int, step_s: float, *, is_settled: bool, may_end: bool) -> None:
        """Ends a window that is full, and decides what follows. Called before each step.

        Args:
            num_sequences: that decode; at least one.
            step_s: of a plain step of all of them; 0 where that is not known yet.
            is_settled: drafts have read most of what they were handed, and speculation has begun.
            may_end: a window that ends now holds what its steps did and their time, which a loop
                that runs ahead sees one turn apart.
        """
        self._follow_size(num_sequences)
        if not may_end:
            return
        if self.is_settling:
            self._settle(num_sequences, is_settled=is_settled)
        elif self._is_full(num_sequences):
            self._end_window(step_s)

    def insist(self) -> None:
        """Speculation is not to be switched off."""
        self._window.clear()
        self._take(Stance.ON)

    def forbid(self) -> None:
        """Speculation is not to be switched on."""
        self._window.clear()
        self._take(Stance.OFF)

    def put_off(self) -> None:
        """What is measured now tells nothing, because drafts prepare what they need once: a trial
        is for later, and has not failed."""
        self.charge(self._window)
        self._window.clear()
        regime = self.regime
        if regime is not None and self.stance is Stance.ON and not regime.pays:
            regime.is_put_off = True
            self._take(Stance.OFF)

    def charge(self, spent: SpeedWindow) -> None:
        """A trial costs the time beyond that in which plain decoding does the same; until drafts
        are warm for the first time it does not, because that comes once."""
        regime = self.regime
        if regime is None or self.stance is not Stance.ON or regime.pays or self.is_bound:
            return
        if not (self.is_settling and regime.num_trials == 1):
            plain_s = spent.plain_s + self._prompt_row_s.value * spent.num_prompt_rows
            self.budget.settle(spent.elapsed_s - plain_s / regime.estimate.level)

    def _follow_size(self, num_sequences: int) -> None:
        if self._octave is None:
            self._size = float(num_sequences)
        self._size += SIZE_SMOOTHING * (num_sequences - self._size)
        place = math.log2(self._size)
        if self._octave is None or abs(place - self._octave) > OCTAVE_EDGE:
            self._enter(round(place))

    def _enter(self, octave: int) -> None:
        """Decoding is in another regime from now on; an unknown one is like the nearest known."""
        if octave not in self.regimes:
            self.regimes[octave] = Regime(self._expected(octave))
        self._octave = octave
        estimate = self.regimes[octave].estimate
        self._window.clear()
        self._num_windows = 0
        self._take(Stance.ON if estimate.lowest > MIN_GAIN else Stance.OFF)

    def _expected(self, octave: int) -> GainEstimate:
        if not self.regimes:
            return GainEstimate.of(num_sequences=2.0**octave)
        nearest = min(self.regimes, key=lambda each: abs(each - octave))
        known, distance = self.regimes[nearest].estimate, octave - nearest
        expected = GainEstimate.of(
            num_sequences=2.0**octave, like=known, deviation=UNKNOWN_GAIN * abs(distance)
        )
        if distance > 0 and expected.gain > 0.0:
            expected.gain *= GAIN_AN_OCTAVE**distance
        return expected

    def _settle(self, num_sequences: int, *, is_settled: bool) -> None:
        """The first rounds after a change belong to neither side, but they cost what they cost."""
        fewest = 1 if is_settled else MOST_SETTLING_ROUNDS
        if self._window.num_rounds >= fewest * num_sequences:
            self.charge(self._window)
            self.is_settling = False
            self._window.clear()

    def _is_full(self, num_sequences: int) -> bool:
        """Whether the window is long enough: a trial's sooner, where it goes so badly that the rest
        would say the same."""
        num_rounds = self._window.num_rounds
        if num_rounds >= WINDOW_ROUNDS * num_sequences:
            return True
        is_trial = self.stance is Stance.ON and not (self.regime is None or self.regime.pays)
        is_enough = num_rounds >= max(FEWEST_ROUNDS, num_sequences)
        return is_trial and is_enough and self._window.speed(self._prompt_row_s.value) < HOPELESS

    def _end_window(self, step_s: float) -> None:
        regime, window = self.regime, self._window
        assert regime is not None
        is_plain = self.stance is Stance.OFF
        if window.num_prompt_rows and is_plain:
            longer_s = max(window.elapsed_s - window.plain_s, 0.0)
            self._prompt_row_s.add(longer_s / window.num_prompt_rows)
        self.charge(window)
        speed = window.speed(self._prompt_row_s.value)
        self._observe(regime, speed)
        window.clear()
        self._num_windows += 1
        self._decide(regime, step_s)

    def _observe(self, regime: Regime, speed: float) -> None:
        is_speculative = self.stance is Stance.ON
        regime.estimate.observe(speed, is_speculative=is_speculative)
        is_loss = is_speculative and speed < regime.estimate.level
        regime.num_losses = regime.num_losses + 1 if is_loss else 0
        if regime.pays and regime.num_losses >= MOST_LOSSES:
            regime.estimate.forget_gain()

    def _decide(self, regime: Regime, step_s: float) -> None:
        estimate, did_pay = regime.estimate, regime.pays
        regime.pays = estimate.lowest > MIN_GAIN
        if regime.pays:
            regime.num_failed = 0
            self._take(Stance.ON)
        elif self.stance is Stance.ON:
            self._doubt_speculation(regime, did_pay=did_pay)
        elif self._num_windows >= NUM_PLAIN_WINDOWS << min(regime.num_failed, MOST_DOUBLINGS):
            self._begin_trial(regime, step_s)

    def _begin_trial(self, regime: Regime, step_s: float) -> None:
        if not regime.num_trials:
            self.budget.grant(LEARNING_STEPS * step_s)
        is_granted = regime.num_trials == 0 or (regime.is_put_off and regime.num_trials == 1)
        if self.stance is Stance.OFF and (self.budget.allows_probe or is_granted):
            regime.num_trials += not regime.is_put_off
            regime.is_put_off = False
            self._take(Stance.ON)
        else:
            self._take(Stance.OFF)

    def _doubt_speculation(self, regime: Regime, *, did_pay: bool) -> None:
        """Speculation runs and does not, or no longer, pay beyond doubt."""
        estimate = regime.estimate
        if estimate.is_surprised:
            return
        if did_pay:
            self._take(Stance.PAUSED if estimate.gain > WIDE_GAIN else Stance.OFF)
        elif (
            estimate.highest < 0.0
            or (regime.num_losses and not self.budget.allows_probe)
            or self._num_windows >= MOST_TRIAL_WINDOWS
        ):
            regime.num_failed += 1 if estimate.highest > -CLEAR_LOSS else 3
            self._take(Stance.OFF)
        if self.stance is not Stance.ON:
            regime.num_trials = max(regime.num_trials, 1)  # what ran on a promise was one

    def _take(self, stance: Stance) -> None:
        if stance is self.stance:
            return
        self.stance, self.is_settling, self._num_windows = stance, True, 0
        self.num_changes += 1
