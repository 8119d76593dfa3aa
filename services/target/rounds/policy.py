"""Chooses the next step of the lanes: a plain step, or a round with trees of one shape. No torch.

The policy chooses the highest expected throughput of the batch: the expected tokens of a round,
from observed acceptance, over its seconds, from a table measured at start-up. Other choices are
tried for a few rounds now and then, within a small share of the time, because acceptance changes
with the text. The choice never changes a token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.throughput import FORGET_S, Acceptance, CostTable, compared
from shared.tokens import ShapeOrPlain, TreeShape

MIN_GAIN = 1.03
"""A choice replaces the current one if its expected throughput is so many times as high."""
ROUNDS_A_CHOICE = 12
"""Rounds or plain steps between two decisions, unless the number of lanes changes."""
PROBE_ROUNDS, PROBE_TREES = 4, 16
"""Rounds of a probe, and trees after which it may end earlier if its rounds were timed before."""
PROBE_SHARE = 0.02
"""Share of the time that probes of other choices may cost."""
PROBE_PAUSE_S = 0.25
"""Shortest time between two probes."""
OFFSET_SMOOTHING = 0.1
"""Least weight of a round in the average offset from the table."""
SETTLED_ROUNDS = 20
"""After so many timed rounds of a choice, a change of its offset counts for all choices."""
PROBE_WORTH = 0.9
"""A choice is probed if its optimistic throughput is at least this share of the current one's."""
HOPE = 0.15
"""Added to the acceptance rates of a choice in an optimistic estimate."""


class LanePolicy:
    """The choice for the lanes of one head.

    Args:
        shapes: that may be chosen, the draft's own first.
        costs: step times measured at start-up.
        config: by number of lanes, the depths that are allowed and whether plain steps are.

    Attributes:
        probe_s: total time that probes have cost.
    """

    def __init__(
        self,
        shapes: Sequence[TreeShape],
        costs: CostTable,
        config: AdaptiveConfig = DEFAULT_CONFIG,
    ) -> None:
        self.costs = costs
        self.probe_s = 0.0
        self._shapes = tuple(shapes)
        self._config = config
        self._acceptance = Acceptance(prior_fades=True)
        self._choice: ShapeOrPlain = shapes[0]
        self._probe: ShapeOrPlain = None
        self._num_probe_steps = 0
        self._num_left = 0  # steps until the next decision
        self._num_lanes = 0
        self._seen_s: dict[ShapeOrPlain, float] = {}
        self._rates: Mapping[ShapeOrPlain, float] = {}
        self._may_probe_s = -math.inf
        # Measured seconds minus those of the table, by size of the batch and timed choice.
        self._offsets_s: dict[int, dict[ShapeOrPlain, float]] = {}
        self._last_offset_s: dict[tuple[int, ShapeOrPlain], float] = {}
        self._num_timed: Counter[tuple[int, ShapeOrPlain]] = Counter()

    @property
    def is_probing(self) -> bool:
        """Whether a probe is under way."""
        return self._num_probe_steps > 0

    @property
    def pays(self) -> bool | None:
        """Whether trees are chosen rather than plain steps; None before the first decision."""
        return self._choice is not None if self._rates else None

    def comparison(self) -> str:
        """Returns the expected throughputs behind the last decision, in words."""
        return f"expected {compared(self._rates, self._num_lanes)}"

    def choose(
        self, num_greedy: int, num_drawn: int, fitting: Iterable[TreeShape], now_s: float
    ) -> ShapeOrPlain:
        """Returns the next step of the lanes. Called for each step.

        Args:
            num_greedy: lanes at temperature 0; `num_drawn` counts the others.
            fitting: shapes whose rounds can hold so many lanes.
        """
        num_lanes = num_greedy + num_drawn
        if self._num_probe_steps:
            self._num_probe_steps -= 1
            self._seen_s[self._probe] = now_s
            return self._probe
        has_changed = num_lanes > 2 * self._num_lanes or 2 * num_lanes < self._num_lanes
        self._num_left -= 1
        if self._num_left <= 0 or has_changed:
            self._num_left, self._num_lanes = ROUNDS_A_CHOICE, num_lanes
            self._decide(num_greedy, num_drawn, tuple(fitting), now_s)
        self._seen_s[self._choice] = now_s
        return self._choice

    def observe(
        self, shape: TreeShape, *, is_greedy: bool, accepted: Sequence[int], num_unforeseen: int = 0
    ) -> None:
        """Adds a round of either the greedy lanes or the others; see `Acceptance.observe`."""
        self._acceptance.observe(
            shape, is_greedy=is_greedy, accepted=accepted, num_unforeseen=num_unforeseen
        )

    def observe_time(
        self, choice: ShapeOrPlain, num_lanes: int, seconds: float, *, is_alone: bool = True
    ) -> None:
        """Adds the time of a round or a plain step.

        The offset from the table belongs to this choice alone while it settles: a draft may work
        behind its rounds. Later changes count for every choice: they come from growing contexts,
        whose keys and values each of them reads.

        Args:
            is_alone: nothing else was computed beside it. Otherwise its time is a little long, and
                counts only while no such time is known: where requests come all the time, there
                may never be one.
        """
        expected_s = self.costs.seconds(choice, num_lanes)
        if expected_s is None:
            return
        size = _size(num_lanes)
        offset_s = max(seconds - expected_s, 0.0)
        # A single step may take any time, so of two in a row the shorter one counts.
        before_s = self._last_offset_s.get((size, choice))
        self._last_offset_s[size, choice] = offset_s
        if before_s is None:
            return
        offset_s = min(offset_s, before_s)
        num_timed = self._num_timed[size, choice]
        offsets_s = self._offsets_s.setdefault(size, {})
        if not is_alone:
            if not num_timed:
                mean_s = offsets_s.get(choice, offset_s)
                offsets_s[choice] = mean_s + OFFSET_SMOOTHING * (offset_s - mean_s)
            return
        mean_s = offsets_s.get(choice, 0.0)
        change_s = max(OFFSET_SMOOTHING, 1.0 / (num_timed + 1)) * (offset_s - mean_s)
        offsets_s[choice] = mean_s + change_s
        self._num_timed[size, choice] += 1
        if num_timed >= SETTLED_ROUNDS:
            for other in offsets_s.keys() - {choice}:
                offsets_s[other] = max(offsets_s[other] + change_s, 0.0)

    def _offset_s(self, choice: ShapeOrPlain, size: int) -> float:
        """Returns the measured offset from the table. A choice without one in batches of this size
        takes the smallest offset of the others there, or else its own in the nearest size."""
        offsets_s = self._offsets_s.get(size, {})
        if choice in offsets_s:
            return offsets_s[choice]
        if offsets_s:
            return min(offsets_s.values())
        sizes = [other for other, by_choice in self._offsets_s.items() if choice in by_choice]
        nearest = min(sizes, key=lambda other: abs(other - size), default=None)
        return 0.0 if nearest is None else self._offsets_s[nearest][choice]

    def _decide(
        self, num_greedy: int, num_drawn: int, fitting: tuple[TreeShape, ...], now_s: float
    ) -> None:
        rates = self._rates = self._expected(num_greedy, num_drawn, fitting)
        best = max(rates, key=lambda choice: rates[choice])
        current = rates.get(self._choice)
        if current is None or rates[best] > MIN_GAIN * current:
            self._choice = best
        if now_s >= self._may_probe_s:
            self._consider_probe(num_greedy, num_drawn, fitting, now_s)

    def _consider_probe(
        self, num_greedy: int, num_drawn: int, fitting: tuple[TreeShape, ...], now_s: float
    ) -> None:
        """Begins a probe of the choice with the best optimistic throughput, if it may be the
        fastest."""
        expected = self._expected(num_greedy, num_drawn, fitting, is_hopeful=True)
        hopes: dict[ShapeOrPlain, float] = {
            choice: rate * self._freshness(choice, now_s)
            for choice, rate in expected.items()
            if choice not in (None, self._choice)
        }
        # What rounds take beyond the table, such as for masks of many rows, plain steps may not
        # take. Once they are timed, `_decide` sees to it.
        is_plain_known = None in self._offsets_s.get(_size(num_greedy + num_drawn), {})
        if None in expected and self._choice is not None and not is_plain_known:
            hopes[None] = expected[None]
        rates, current = self._rates, self._rates[self._choice]
        if not hopes:
            return
        probe = max(hopes, key=lambda choice: hopes[choice])
        if hopes[probe] < PROBE_WORTH * current:
            return
        num_lanes, num_rounds = num_greedy + num_drawn, PROBE_ROUNDS
        if probe in self._offsets_s.get(_size(num_lanes), {}):
            num_rounds = min(PROBE_ROUNDS, -(-PROBE_TREES // num_lanes))
        self._probe, self._num_probe_steps = probe, num_rounds
        seconds = self.costs.seconds(probe, num_lanes) or 0.0
        # The tokens that the probe is expected to lose, as time of the current choice. After plain
        # steps all sequences have to be given lanes, which takes about a round.
        lost_s = num_rounds * seconds * max(1.0 - rates[probe] / current, 0.0)
        if None in (probe, self._choice):
            shape = self._choice if probe is None else probe
            lost_s += self.costs.seconds(shape, num_lanes) or 0.0
        else:
            lost_s += self._first_round_s(probe, num_lanes)
            lost_s += self._first_round_s(self._choice, num_lanes)
        self.probe_s += lost_s
        self._may_probe_s = now_s + max(lost_s / PROBE_SHARE, PROBE_PAUSE_S)

    def _first_round_s(self, choice: ShapeOrPlain, num_lanes: int) -> float:
        """Returns what the first round of a choice costs beyond the others, at most. It has no
        trees grown ahead, and waits until the draft is done with those of the shape before."""
        if choice is None or not choice.is_ahead:
            return 0.0
        return self.costs.seconds(replace(choice, is_ahead=False), num_lanes) or 0.0

    def _freshness(self, choice: ShapeOrPlain, now_s: float) -> float:
        """Returns the factor of an optimistic estimate; it grows with the time since use."""
        return 1.0 + (now_s - self._seen_s.setdefault(choice, now_s)) / FORGET_S

    def _expected(
        self,
        num_greedy: int,
        num_drawn: int,
        fitting: tuple[TreeShape, ...],
        *,
        is_hopeful: bool = False,
    ) -> dict[ShapeOrPlain, float]:
        """Returns the expected throughput of each allowed choice, in tokens/s.

        Args:
            is_hopeful: optimistic: adds `HOPE` to acceptance rates, and takes the table's time for
                a choice without a measured offset.
        """
        num_lanes = num_greedy + num_drawn
        size, hope = _size(num_lanes), HOPE if is_hopeful else 0.0
        timed = self._offsets_s.get(size, {})
        candidates = self._config.candidates(num_lanes)
        rates: dict[ShapeOrPlain, float] = {}
        for shape in self._shapes:
            is_allowed = candidates.steps is None or shape.num_steps in candidates.steps
            seconds = self.costs.seconds(shape, num_lanes)
            if not is_allowed or shape not in fitting:
                continue
            tokens = num_greedy * self._acceptance.tokens(shape, is_greedy=True, hope=hope)
            tokens += num_drawn * self._acceptance.tokens(shape, is_greedy=False, hope=hope)
            is_from_table = is_hopeful and shape not in timed
            offset_s = 0.0 if is_from_table else self._offset_s(shape, size)
            # A shape that was never measured is tried.
            rates[shape] = math.inf if seconds is None else tokens / (seconds + offset_s)
        plain_s = self.costs.seconds(None, num_lanes)
        if plain_s is not None and (candidates.may_pause or not rates):
            is_from_table = is_hopeful and None not in timed
            offset_s = 0.0 if is_from_table else self._offset_s(None, size)
            rates[None] = num_lanes / (plain_s + offset_s)
        return rates or {None: 1.0}


def _size(num_lanes: int) -> int:
    """Returns the exponent of the smallest power of two that is not below a number of lanes."""
    return (num_lanes - 1).bit_length()
