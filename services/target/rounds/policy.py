"""Chooses what the lanes do next: plain steps, or rounds with trees of one shape. No torch.

The choice is what promises most tokens a second for the whole batch: the expected tokens of a
round, from acceptance that was seen, over its seconds, from a table that was measured at start.
Watching costs nothing. What is not in force is tried for a few rounds now and then, within a share
of the time, because acceptance changes with the text. The choice changes no token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from services.target.acceptance import FORGET_S, Acceptance
from services.target.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.costs import CostTable
from services.target.step_report import compared
from shared.tokens import Choice, TreeShape

MIN_GAIN = 1.03
"""A choice must promise this much more than the one in force to replace it."""
ROUNDS_A_CHOICE = 12
"""Rounds or plain steps between two choices, unless the number of lanes changes."""
PROBE_ROUNDS = 4
PROBE_SHARE = 0.02
"""Share of the time that trying other choices may cost."""
PROBE_PAUSE_S = 0.25
"""Least time between two tries."""
OFFSET_SMOOTHING = 0.1
"""Weight of a round in what steps take beyond the table, and of the first ones at least."""
SETTLED_ROUNDS = 20
"""Timed rounds of a choice from which on a change of what they take is a change for all choices."""
PROBE_WORTH = 0.9
"""What promises less than this share of the choice in force, when it is hopeful, is not tried."""
HOPE = 0.15
"""Added to the acceptance of what was not seen for a while, to find out whether it is tried."""


class LanePolicy:
    """The choice for the lanes of one head.

    Args:
        shapes: there are, the draft's own first.
        costs: measured at start.
        config: depths that may be chosen by lanes, and whether plain steps may.

    Attributes:
        probe_s: time that tries have cost.
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
        self._acceptance = Acceptance()
        self._choice: Choice = shapes[0]
        self._probe: Choice = None
        self._num_probe_steps = 0
        self._num_left = 0
        self._num_lanes = 0
        self._seen_s: dict[Choice, float] = {}
        self._promised: Mapping[Choice, float] = {}
        self._may_probe_s = -math.inf
        # What steps take beyond the table, by size of the batch and by choices that were timed.
        self._offsets_s: dict[int, dict[Choice, float]] = {}
        self._num_timed: Counter[tuple[int, Choice]] = Counter()

    @property
    def is_probing(self) -> bool:
        """Whether something is tried that is not the choice."""
        return self._num_probe_steps > 0

    @property
    def pays(self) -> bool | None:
        """Whether trees are chosen rather than plain steps; None before the first choice."""
        return self._choice is not None if self._promised else None

    def comparison(self) -> str:
        """Returns the tokens a second that the last choice was made by."""
        return f"expected {compared(self._promised, self._num_lanes)}"

    def choose(
        self, num_greedy: int, num_drawn: int, fitting: Iterable[TreeShape], now_s: float
    ) -> Choice:
        """Returns what the next step of the lanes is. Called for each step.

        Args:
            num_greedy: lanes at temperature 0; `num_drawn` the others.
            fitting: shapes whose rounds take so many lanes.
        """
        num_lanes = num_greedy + num_drawn
        if self._num_probe_steps:
            self._num_probe_steps -= 1
            self._seen_s[self._probe] = now_s
            return self._probe
        is_new = num_lanes > 2 * self._num_lanes or 2 * num_lanes < self._num_lanes
        self._num_left -= 1
        if self._num_left <= 0 or is_new:
            self._num_left, self._num_lanes = ROUNDS_A_CHOICE, num_lanes
            self._decide(num_greedy, num_drawn, tuple(fitting), now_s)
        self._seen_s[self._choice] = now_s
        return self._choice

    def observe(self, shape: TreeShape, *, is_greedy: bool, accepted: Sequence[int]) -> None:
        """Learns from a round: the nodes that lanes of one kind accepted."""
        self._acceptance.observe(shape, is_greedy=is_greedy, accepted=accepted)

    def observe_time(self, choice: Choice, num_lanes: int, seconds: float) -> None:
        """Learns from the time of a round or a plain step that nothing else was computed beside.

        What it takes beyond the table is its own where a draft works behind the rounds, and every
        choice's where contexts grow: their keys and values are read by all.
        """
        expected_s = self.costs.seconds(choice, num_lanes)
        if expected_s is None:
            return
        size = _size(num_lanes)
        beyond_s = min(max(seconds - expected_s, 0.0), expected_s)
        num_timed = self._num_timed[size, choice]
        offsets_s = self._offsets_s.setdefault(size, {})
        known_s = offsets_s.get(choice, 0.0)
        change_s = max(OFFSET_SMOOTHING, 1.0 / (num_timed + 1)) * (beyond_s - known_s)
        offsets_s[choice] = known_s + change_s
        self._num_timed[size, choice] += 1
        if num_timed >= SETTLED_ROUNDS:
            for other in offsets_s.keys() - {choice}:
                offsets_s[other] = max(offsets_s[other] + change_s, 0.0)

    def _offset_s(self, choice: Choice, size: int) -> float:
        """Returns what steps take beyond the table: of a choice that was never timed in batches of
        a size, the least that others do in these, or else what it does in batches of the next
        size."""
        known_s = self._offsets_s.get(size, {})
        if choice in known_s:
            return known_s[choice]
        if known_s:
            return min(known_s.values())
        others = [other for other, offsets_s in self._offsets_s.items() if choice in offsets_s]
        nearest = min(others, key=lambda other: abs(other - size), default=None)
        return 0.0 if nearest is None else self._offsets_s[nearest][choice]

    def _decide(
        self, num_greedy: int, num_drawn: int, fitting: tuple[TreeShape, ...], now_s: float
    ) -> None:
        promises = self._promised = self._promises(num_greedy, num_drawn, fitting)
        best = max(promises, key=lambda choice: promises[choice])
        own = promises.get(self._choice)
        if own is None or promises[best] > MIN_GAIN * own:
            self._choice = best
        self._consider_probe(num_greedy, num_drawn, fitting, promises, now_s)

    def _consider_probe(
        self,
        num_greedy: int,
        num_drawn: int,
        fitting: tuple[TreeShape, ...],
        promises: Mapping[Choice, float],
        now_s: float,
    ) -> None:
        """Tries what is most hopeful, if it might be the best."""
        if now_s < self._may_probe_s:
            return
        hopes = {
            choice: promise * self._freshness(choice, now_s)
            for choice, promise in self._promises(
                num_greedy, num_drawn, fitting, is_hopeful=True
            ).items()
            if choice not in (None, self._choice)
        }
        rate = promises[self._choice]
        probe = max(hopes, key=lambda choice: hopes[choice], default=None)
        if probe is None or hopes[probe] < PROBE_WORTH * rate:
            return
        self._probe, self._num_probe_steps = probe, PROBE_ROUNDS
        num_lanes = num_greedy + num_drawn
        seconds = self.costs.seconds(probe, num_lanes) or 0.0
        # The tokens of the choice in force that the tries are expected to lose, in its time. Behind
        # plain steps all lanes have to be given out, which takes about a round.
        lost_s = PROBE_ROUNDS * seconds * max(1.0 - promises[probe] / rate, 0.0)
        lost_s += 0.0 if self._choice else seconds
        self.probe_s += lost_s
        self._may_probe_s = now_s + max(lost_s / PROBE_SHARE, PROBE_PAUSE_S)

    def _freshness(self, choice: Choice, now_s: float) -> float:
        """Returns by how much more is hoped of a choice than when it was seen."""
        return 1.0 + (now_s - self._seen_s.setdefault(choice, now_s)) / FORGET_S

    def _promises(
        self,
        num_greedy: int,
        num_drawn: int,
        fitting: tuple[TreeShape, ...],
        *,
        is_hopeful: bool = False,
    ) -> dict[Choice, float]:
        """Returns the tokens a second of each choice.

        Args:
            is_hopeful: takes acceptance that was not seen for better than it was, and times that
                were not seen for those of the table.
        """
        num_lanes = num_greedy + num_drawn
        size, hope = _size(num_lanes), HOPE if is_hopeful else 0.0
        timed = self._offsets_s.get(size, {})
        candidates = self._config.candidates(num_lanes)
        promises: dict[Choice, float] = {}
        for shape in self._shapes:
            is_allowed = candidates.steps is None or shape.num_steps in candidates.steps
            seconds = self.costs.seconds(shape, num_lanes)
            if not is_allowed or shape not in fitting:
                continue
            tokens = num_greedy * self._acceptance.tokens(shape, is_greedy=True, hope=hope)
            tokens += num_drawn * self._acceptance.tokens(shape, is_greedy=False, hope=hope)
            is_from_table = is_hopeful and shape not in timed
            offset_s = 0.0 if is_from_table else self._offset_s(shape, size)
            # What was never measured is tried.
            promises[shape] = math.inf if seconds is None else tokens / (seconds + offset_s)
        plain_s = self.costs.seconds(None, num_lanes)
        if plain_s is not None and (candidates.may_pause or not promises):
            promises[None] = num_lanes / (plain_s + self._offset_s(None, size))
        return promises or {None: 1.0}


def _size(num_lanes: int) -> int:
    """Returns the size of a batch, as the power of two that holds it."""
    return (num_lanes - 1).bit_length()
