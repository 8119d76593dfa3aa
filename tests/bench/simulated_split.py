"""A split of a model and its drafts over hardware, and how fast it would decode. Pure Python.

The times are measured or published ones; nothing here runs a model. A round of a batch is

    synchronous:   draft, hop, verify, hop, …                        one after the other
    asynchronous:  verify, and meanwhile draft for the verdicts to come; on a hit the next
                   verification starts at once, on a miss the draft is awaited

and commits, per sequence, 1 token and the accepted ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BadScenario(ValueError):
    """A file that says what cannot be simulated; the message names the key."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity by a whole number, interpolated between known points and flat beyond them.

    Attributes:
        points: in ascending order of the number.
    """

    points: tuple[tuple[float, float], ...]

    def __call__(self, at: float) -> float:
        """Returns the value."""
        first, last = self.points[0], self.points[-1]
        if at <= first[0]:
            return first[1]
        for (left, low), (right, high) in zip(self.points, self.points[1:], strict=False):
            if at <= right:
                return low + (high - low) * (at - left) / (right - left)
        return last[1]


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is known of a target, a draft and the way between them.

    Attributes:
        verify_ms: time of a target step by its rows, on one device.
        draft_step_ms: time of one draft forward by the sequences in it.
        acceptance: probability that level d + 1 is accepted where level d was; the last one holds
            for deeper levels.
        hop_ms: round trip of a message between target and draft.
        hit_rate: share of verdicts that a draft that drafts ahead has prepared for.
        num_steps: depth of trees; 0 decodes plainly.
        nodes_per_step: nodes verified for each level; 1 is a chain.
        batch: sequences that decode at once.
        num_drafts: drafts that share them.
        is_asynchronous: drafts draft ahead while the target verifies.
        tensor_parallel: devices that a target step is split over.
        all_reduce_ms: added to a step for each doubling of the devices.
        host_ms: added to each step by the host.
    """

    verify_ms: Curve
    draft_step_ms: Curve
    acceptance: tuple[float, ...]
    hop_ms: float = 0.0
    hit_rate: float = 0.0
    num_steps: int = 0
    nodes_per_step: int = 1
    batch: int = 1
    num_drafts: int = 1
    is_asynchronous: bool = False
    tensor_parallel: int = 1
    all_reduce_ms: float = 0.0
    host_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a scenario gives.

    Attributes:
        round_tokens: committed by a sequence in a round, bonus included.
        verify_ms, draft_ms: of a round, whether or not they overlap.
        wait_ms: part of a round in which the target waits, on average.
    """

    tokens_per_s: float
    round_ms: float
    round_tokens: float
    verify_ms: float
    draft_ms: float
    wait_ms: float


def predict(scenario: Scenario) -> Prediction:
    """Returns the speed of a scenario."""
    verify_ms = step_ms(scenario)
    if scenario.num_steps == 0:
        speed = 1000.0 * scenario.batch / verify_ms
        return Prediction(speed, verify_ms, 1.0, verify_ms, 0.0, 0.0)
    draft_ms = drafting_ms(scenario)
    wait_ms = _wait_ms(scenario, verify_ms, draft_ms)
    tokens = round_tokens(scenario)
    round_ms = verify_ms + wait_ms
    speed = 1000.0 * scenario.batch * tokens / round_ms
    return Prediction(speed, round_ms, tokens, verify_ms, draft_ms, wait_ms)


def step_ms(scenario: Scenario) -> float:
    """Returns the time of a target step over the whole batch."""
    rows = scenario.batch * (1 + scenario.num_steps * scenario.nodes_per_step)
    devices = scenario.tensor_parallel
    doublings = devices.bit_length() - 1
    return (
        scenario.verify_ms(rows) / devices + doublings * scenario.all_reduce_ms + scenario.host_ms
    )


def drafting_ms(scenario: Scenario) -> float:
    """Returns the time of a tree for every sequence; drafts of a pool work side by side."""
    sequences = -(-scenario.batch // scenario.num_drafts)
    return scenario.num_steps * scenario.draft_step_ms(sequences)


def round_tokens(scenario: Scenario) -> float:
    """Returns what a sequence commits in a round, bonus included."""
    total, survival = 1.0, 1.0
    for level in range(scenario.num_steps):
        survival *= scenario.acceptance[min(level, len(scenario.acceptance) - 1)]
        total += survival
    return total


def _wait_ms(scenario: Scenario, verify_ms: float, draft_ms: float) -> float:
    """A hit waits for what a tree and a hop take longer than a verification: its draft begins once
    it has the verdict before. A miss waits for both.

    Misses are private to their rows: those that hit go on, and the share of the batch that misses
    loses a round's wait each.
    """
    miss_ms = scenario.hop_ms + draft_ms
    if not scenario.is_asynchronous:
        return miss_ms
    hit_ms = max(miss_ms - verify_ms, 0.0)
    return scenario.hit_rate * hit_ms + (1 - scenario.hit_rate) * miss_ms


_NUMBERS = {
    "hop_ms": (0.0, 1e6),
    "hit_rate": (0.0, 1.0),
    "num_steps": (0, 32),
    "nodes_per_step": (1, 16),
    "batch": (1, 100_000),
    "num_drafts": (1, 100_000),
    "tensor_parallel": (1, 1024),
    "all_reduce_ms": (0.0, 1e6),
    "host_ms": (0.0, 1e6),
}
_WHOLE = frozenset({"num_steps", "nodes_per_step", "batch", "num_drafts", "tensor_parallel"})
_KNOWN = frozenset(_NUMBERS) | {"verify_ms", "draft_step_ms", "acceptance", "is_asynchronous"}


def scenario_of(values: Mapping[str, Any]) -> Scenario:
    """Returns the scenario of a JSON object.

    Raises:
        BadScenario: a key is missing, unknown or out of range.
    """
    for key in values:
        if key not in _KNOWN:
            raise BadScenario(f"{key} is unknown; known are {', '.join(sorted(_KNOWN))}")
    numbers = {key: _number(key, values[key]) for key in _NUMBERS if key in values}
    return Scenario(
        verify_ms=_curve("verify_ms", values),
        draft_step_ms=_curve(
            "draft_step_ms", values | {"draft_step_ms": values.get("draft_step_ms", {"1": 0.0})}
        ),
        acceptance=_acceptance(values.get("acceptance", [0.0])),
        is_asynchronous=_flag("is_asynchronous", values.get("is_asynchronous", False)),
        **numbers,
    )


def _number(key: str, value: object) -> Any:
    low, high = _NUMBERS[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (key in _WHOLE and value != int(value)):
        noun = "a whole number" if key in _WHOLE else "a number"
        raise BadScenario(f"{key} is {value!r}; it must be {noun} in [{low:g}, {high:g}]")
    return int(value) if key in _WHOLE else float(value)


def _flag(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise BadScenario(f"{key} is {value!r}; it must be true or false")
    return value


def _curve(key: str, values: Mapping[str, Any]) -> Curve:
    given = values.get(key)
    if not isinstance(given, dict) or not given:
        raise BadScenario(f"{key} is {given!r}; it must be an object of times by whole numbers")
    try:
        points = sorted((float(int(at)), float(value)) for at, value in given.items())
    except (TypeError, ValueError):
        raise BadScenario(f"{key} is {given!r}; its keys must be whole numbers") from None
    if any(value < 0 for _, value in points):
        raise BadScenario(f"{key} holds a negative time")
    return Curve(tuple(points))


def _acceptance(given: object) -> tuple[float, ...]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str) and len(given) > 0
    if not is_list or not all(isinstance(p, (int, float)) and 0 <= p <= 1 for p in given):
        raise BadScenario(f"acceptance is {given!r}; it must be a list of numbers in [0, 1]")
    return tuple(float(p) for p in given)


@dataclass(frozen=True, slots=True)
class Measured:
    """A point to compare a prediction with."""

    name: str
    scenario: Scenario
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ScenarioFile:
    """A file of scenarios.

    Attributes:
        named: in the order of the file.
        measured: those with a measured speed.
    """

    named: tuple[tuple[str, Scenario], ...]
    measured: tuple[Measured, ...] = field(default=())


def read_scenarios(path: Path) -> ScenarioFile:
    """Reads `{"base": {…}, "scenarios": [{"name": …, …, "measured_tokens_per_s": …}]}`; a
    scenario's keys replace those of the base.

    Raises:
        BadScenario: names the scenario and the key.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadScenario(f"{path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("scenarios"), list):
        raise BadScenario(f"{path} must hold an object with a list of scenarios")
    base = content.get("base", {})
    if not isinstance(base, dict):
        raise BadScenario(f"{path}: base is {base!r}; it must be an object")
    named: list[tuple[str, Scenario]] = []
    measured: list[Measured] = []
    for number, entry in enumerate(content["scenarios"], start=1):
        if not isinstance(entry, dict):
            raise BadScenario(f"{path}: scenario {number} is {entry!r}; it must be an object")
        values = base | entry
        name = str(values.pop("name", f"scenario {number}"))
        try:
            speed = _speed(values.pop("measured_tokens_per_s", None))
            scenario = scenario_of(values)
        except BadScenario as error:
            raise BadScenario(f"{path}: {name}: {error}") from None
        named.append((name, scenario))
        if speed is not None:
            measured.append(Measured(name, scenario, speed))
    return ScenarioFile(tuple(named), tuple(measured))


def _speed(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise BadScenario(f"measured_tokens_per_s is {value!r}; it must be a number above 0")
    return float(value)
