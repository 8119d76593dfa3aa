"""How much faster than plain decoding speculation is, from windows of both. No torch.

What is observed is a speed: that of plain decoding, its *level*, which is about 1, and in windows
of speculation the *gain* on top of it. Both wander, the level with whatever else the machine does,
so windows of the two count the more against each other the closer they are in time, and what was
not observed for long gets uncertain again.

Source: a local level with an intervention; Harvey, Forecasting, Structural Time Series Models and
the Kalman Filter, 1989, ch. 2 and 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

LEVEL_DRIFT = 0.004
GAIN_DRIFT = 0.003
"""Standard deviations of what a window adds to level and gain."""

FIRST_DEVIATION = 0.5
"""Standard deviation of the gain before anything is known."""

NOISE = {False: 0.05, True: 0.25}
"""Standard deviation of a window's speed before any was seen: plain, speculative."""

MOST_EVEN = 4.0
LEAST_NOISE = 0.01
NOISE_SMOOTHING = 0.1
LARGEST_SURPRISE = 1.0
"""A window counts as at most this far from what was expected: it may hold a stall."""

SURPRISING = 3.0
"""Standard deviations beyond which it is not noise, but a change."""

CONFIDENCE = 1.64
"""Standard deviations on either side of the gain: it is beyond each with a probability of 5 %."""


@dataclass(slots=True)
class GainEstimate:
    """Level and gain with their covariance.

    Attributes:
        level, gain: means; at a level of 1 a gain of 0.1 is 1.1 times as fast.
        is_surprised: the last window was further from what was expected than noise explains, and
            the one before of its kind was not.
    """

    level: float = 1.0
    gain: float = 0.0
    level_var: float = 0.01
    gain_var: float = FIRST_DEVIATION**2
    covariance: float = 0.0
    is_surprised: bool = False
    _noise_var: dict[bool, float] = field(
        default_factory=lambda: {key: sigma**2 for key, sigma in NOISE.items()}
    )
    _last: tuple[bool, float] | None = None
    _has_surprised: dict[bool, bool] = field(default_factory=lambda: {False: False, True: False})

    @classmethod
    def of(
        cls, *, num_sequences: float, like: GainEstimate | None = None, deviation: float = 0.0
    ) -> GainEstimate:
        """Returns what to expect before any window.

        Args:
            num_sequences: that decode; the luck of a few evens out.
            like: of something similar.
            deviation: standard deviation of what the gain differs by from that.
        """
        estimate = cls()
        if like is not None:
            estimate.level, estimate.gain = like.level, like.gain
            estimate.gain_var = like.gain_var + deviation**2
        num_even = min(num_sequences, MOST_EVEN)
        estimate._noise_var = {key: sigma**2 / num_even for key, sigma in NOISE.items()}
        return estimate

    @property
    def deviation(self) -> float:
        """The gain's standard deviation."""
        return math.sqrt(self.gain_var)

    @property
    def lowest(self) -> float:
        """What the gain is very likely above."""
        return self.gain - CONFIDENCE * self.deviation

    @property
    def highest(self) -> float:
        """What the gain is very likely below."""
        return self.gain + CONFIDENCE * self.deviation

    def observe(self, speed: float, *, is_speculative: bool) -> None:
        """Takes in a window."""
        share = 1.0 if is_speculative else 0.0
        self.level_var += LEVEL_DRIFT**2
        self.gain_var += GAIN_DRIFT**2
        surprise = speed - self.level - share * self.gain
        surprise = min(max(surprise, -LARGEST_SURPRISE), LARGEST_SURPRISE)
        noise_var = self._learn_noise(speed, is_speculative=is_speculative)
        is_surprise = surprise**2 > SURPRISING**2 * (self._seen_var(share) + noise_var)
        self.is_surprised = is_surprise and not self._has_surprised[is_speculative]
        self._has_surprised[is_speculative] = is_surprise
        if self.is_surprised:  # by a stall or by a change: the next window tells
            return
        if is_surprise:
            self.level_var += surprise**2
            self.gain_var += share * surprise**2
        seen_var = self._seen_var(share) + noise_var
        level_cov = self.level_var + share * self.covariance
        gain_cov = self.covariance + share * self.gain_var
        self.level += level_cov / seen_var * surprise
        self.gain += gain_cov / seen_var * surprise
        self.level_var -= level_cov**2 / seen_var
        self.gain_var -= gain_cov**2 / seen_var
        self.covariance -= level_cov * gain_cov / seen_var

    def doubt(self, deviation: float) -> None:
        """Something changed that the gain depends on."""
        self.gain_var += deviation**2

    def forget_gain(self) -> None:
        """The gain is no longer what it was."""
        self.gain, self.gain_var, self.covariance = 0.0, FIRST_DEVIATION**2, 0.0

    def _seen_var(self, share: float) -> float:
        """Variance of a window's speed but for its noise."""
        return self.level_var + share * (2.0 * self.covariance + self.gain_var)

    def _learn_noise(self, speed: float, *, is_speculative: bool) -> float:
        """Takes the noise from what windows of a kind that follow each other differ by, which the
        wandering hardly touches.

        Source: the mean square successive difference; von Neumann et al., 1941.
        """
        last, self._last = self._last, (is_speculative, speed)
        noise_var = self._noise_var[is_speculative]
        if last is not None and last[0] == is_speculative:
            sample = (speed - last[1]) ** 2 / 2.0
            sample = min(sample, SURPRISING**2 * noise_var)
            noise_var += NOISE_SMOOTHING * (sample - noise_var)
            self._noise_var[is_speculative] = max(noise_var, LEAST_NOISE**2)
        return self._noise_var[is_speculative]
