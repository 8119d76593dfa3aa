"""Rounds and plain steps by the clock of a cost model, chosen by a real `RoundChooser`."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from services.target.control.adaptive_config import DEFAULT_CONFIG, AdaptiveConfig
from services.target.control.round_chooser import RoundBatch, RoundChooser
from services.target.control.round_times import RoundSize
from services.target.control.step_times import StepTimes
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.rounds.round_meter import RoundMeter
from services.target.sequence import Sequence
from shared.tokens import SamplingParams, StopParams, TreeShape

_LIMITS = ModelLimits(100, 10_000, 10_000, frozenset())
_SIZES = (1, 2, 4, 8, 16, 32, 48, 64)


@dataclass(frozen=True)
class World:
    """Hardware and text.

    Attributes:
        plain_s: seconds of a plain step by its sequences.
        round_s: seconds of a round by shape and sequences.
        right: probability that a level is right where the one before was, by shape and time.
        capacities: most sequences of each shape, the draft's own first.
        entry_s: what the beginning of a run takes beyond a round.
    """

    plain_s: Callable[[int], float]
    round_s: Callable[[TreeShape, int], float]
    right: Callable[[TreeShape, float], float]
    capacities: dict[TreeShape, int]
    entry_s: float = 0.003
    noise: float = 0.03


@dataclass
class Simulation:
    """Serves by one chooser; time goes on from call to call.

    Attributes:
        used: steps of each choice, since the last call.
        num_tokens, duration_s: since the last call.
    """

    world: World
    config: AdaptiveConfig = DEFAULT_CONFIG
    seed: int = 0
    now_s: float = 0.0
    used: Counter[TreeShape | None] = field(default_factory=Counter)
    num_tokens: int = 0
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._plain_s = StepTimes()
        self.chooser = RoundChooser(self.config, self._plain_s)
        self._meter = RoundMeter(self.chooser.times)
        self._shape: TreeShape | None = None
        self._num_opened = 0

    @property
    def rate(self) -> float:
        """Tokens a second of the last call."""
        return self.num_tokens / self.duration_s

    def serve(self, num_sequences: int, duration_s: float, run_length: int = 10**9) -> None:
        """Decodes so many sequences; every `run_length` steps something else comes between."""
        sequences = [self._opened() for _ in range(num_sequences)]
        num_slots = next(size for size in _SIZES if size >= num_sequences)
        size, start_s = RoundSize(num_slots, 0), self.now_s
        capacities = self.world.capacities.items()
        shapes = tuple(shape for shape, most in capacities if most >= num_sequences)
        self.used, self.num_tokens = Counter(), 0
        while self.now_s < start_s + duration_s:
            for _ in range(run_length):
                if self.now_s >= start_s + duration_s:
                    break
                shape = self.chooser.choose(RoundBatch(sequences, shapes, size), self.now_s)
                self.used[shape] += 1
                self._step(shape, sequences, size)
            self._interrupt()
        self.duration_s = self.now_s - start_s
        for sequence in sequences:
            self.chooser.forget(sequence)

    def _step(self, shape: TreeShape | None, sequences: list[Sequence], size: RoundSize) -> None:
        if shape != self._shape:
            self._meter.interrupt()
        if shape is None:
            duration_s = self.world.plain_s(len(sequences)) * self._noise()
            self._plain_s.observe(len(sequences), duration_s)
            self.now_s += duration_s
            self.num_tokens += len(sequences)
        else:
            self._round(shape, sequences, size)
        self._shape = shape

    def _round(self, shape: TreeShape, sequences: list[Sequence], size: RoundSize) -> None:
        if shape != self._shape:
            self._meter.enter(self.now_s)
            self.now_s += self.world.entry_s
        self.now_s += self.world.round_s(shape, len(sequences)) * self._noise()
        self._meter.read(shape, size, self.now_s)
        counts = [self._num_accepted(shape) for _ in sequences]
        self.chooser.observe_round(shape, list(zip(sequences, counts, strict=True)))
        self.num_tokens += len(counts) + sum(counts)

    def _num_accepted(self, shape: TreeShape) -> int:
        right = self.world.right(shape, self.now_s)
        rolls = (self._random.random() < right for _ in range(shape.num_steps))
        return sum(1 for _ in itertools.takewhile(bool, rolls))

    def _interrupt(self) -> None:
        self.chooser.interrupt(self.now_s)
        self._meter.interrupt()
        self._shape = None

    def _opened(self) -> Sequence:
        self._num_opened += 1
        request = GenerationRequest("r", (1,), SamplingParams(), StopParams(10_000), 0.0)
        return Sequence.of(self._num_opened, request, _LIMITS)

    def _noise(self) -> float:
        return max(self._random.gauss(1.0, self.world.noise), 0.5)
