"""Scenarios of `simulated_split` in a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from tests.bench.simulated_split import Curve, Scenario


class BadScenario(ValueError):
    """A file that says what cannot be simulated; the message names the key."""


_NUMBERS = {
    "hop_ms": (0.0, 1e6),
    "hit_rate": (0.0, 1.0),
    "nodes_per_step": (1, 16),
    "batch": (1, 100_000),
    "num_drafts": (1, 100_000),
    "tensor_parallel": (1, 1024),
    "all_reduce_ms": (0.0, 1e6),
    "exchange_row_ms": (0.0, 1e6),
    "context_ms": (0.0, 1e6),
    "host_ms": (0.0, 1e6),
    "answer_tokens": (0, 1_000_000),
    "request_ms": (0.0, 1e6),
    "prompt_ms": (0.0, 1e6),
}
_MOST_STEPS = 32
_WHOLE = frozenset({"nodes_per_step", "batch", "num_drafts", "tensor_parallel", "answer_tokens"})
_CURVES = frozenset({"verify_ms", "draft_step_ms"})
_FLAGS = ("is_asynchronous", "is_plain_on_miss")
_KNOWN = frozenset(_NUMBERS) | {"num_steps", "verify_ms", "draft_step_ms", "acceptance", *_FLAGS}


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
        num_steps=_depths(values.get("num_steps", 0)),
        **{key: _flag(key, values.get(key, False)) for key in _FLAGS},
        **numbers,
    )


def _number(key: str, value: object) -> Any:
    low, high = _NUMBERS[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (key in _WHOLE and value != int(value)):
        noun = "a whole number" if key in _WHOLE else "a number"
        raise BadScenario(f"{key} is {value!r}; it must be {noun} in [{low:g}, {high:g}]")
    return int(value) if key in _WHOLE else float(value)


def _depths(given: object) -> tuple[int, ...]:
    depths = given if isinstance(given, list) and given else [given]
    if not all(type(depth) is int and 0 <= depth <= _MOST_STEPS for depth in depths):
        raise BadScenario(
            f"num_steps is {given!r}; it must be a whole number in [0, {_MOST_STEPS}], or a list"
        )
    return tuple(depths)


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
        raise BadScenario(
            f"{key} is {given!r}; its keys must be whole numbers, its times numbers"
        ) from None
    for _, value in points:
        if not math.isfinite(value) or value < 0 or (value == 0 and key == "verify_ms"):
            least = "above 0" if key == "verify_ms" else "at least 0"
            raise BadScenario(f"{key} holds {value:g}; times must be {least}")
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


def write_scenarios(path: Path, measured: Sequence[Measured]) -> None:
    """Writes what `read_scenarios` reads, every key of it."""
    entries = [
        {
            "name": each.name,
            **{key.name: _plain(getattr(each.scenario, key.name)) for key in fields(Scenario)},
            "measured_tokens_per_s": each.tokens_per_s,
        }
        for each in measured
    ]
    path.write_text(json.dumps({"scenarios": entries}, indent=2) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    return {str(int(at)): y for at, y in value.points} if isinstance(value, Curve) else value


def read_scenarios(path: Path) -> ScenarioFile:
    """Reads `{"base": {…}, "parts": {"A": {…}}, "scenarios": [{"name": …, "parts": ["A"], …,
    "measured_tokens_per_s": …}]}`. A scenario's keys replace those of its parts, which replace
    those of the base. Where the measured speed is an object of speeds by batch, there is a scenario
    for each, and any other number may be an object as well.

    Raises:
        BadScenario: names the scenario and the key.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadScenario(f"{path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("scenarios"), list):
        raise BadScenario(f"{path} must hold an object with a list of scenarios")
    base, parts = content.get("base", {}), content.get("parts", {})
    for key, value in (("base", base), ("parts", parts)):
        if not isinstance(value, dict):
            raise BadScenario(f"{path}: {key} is {value!r}; it must be an object")
    named: list[tuple[str, Scenario]] = []
    measured: list[Measured] = []
    for number, entry in enumerate(content["scenarios"], start=1):
        if not isinstance(entry, dict):
            raise BadScenario(f"{path}: scenario {number} is {entry!r}; it must be an object")
        name = str(entry.get("name", f"scenario {number}"))
        try:
            for each_name, values in _by_batch(name, base | _merged(entry, parts) | entry):
                speed = _speed(values.pop("measured_tokens_per_s", None))
                scenario = scenario_of(values)
                named.append((each_name, scenario))
                if speed is not None:
                    measured.append(Measured(each_name, scenario, speed))
        except BadScenario as error:
            raise BadScenario(f"{path}: {name}: {error}") from None
    return ScenarioFile(tuple(named), tuple(measured))


def _merged(entry: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of all parts that a scenario names."""
    found: dict[str, Any] = {}
    for name in entry.get("parts", ()):
        if not isinstance(parts.get(name), dict):
            raise BadScenario(f"there is no part {name!r}")
        found |= parts[name]
    return found


def _by_batch(name: str, values: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a scenario for each batch that it has a speed of."""
    values = {key: value for key, value in values.items() if key not in ("name", "parts")}
    speeds = values.get("measured_tokens_per_s")
    if not isinstance(speeds, dict):
        yield name, values
        return
    for batch in speeds:
        own = {
            key: value.get(batch) if isinstance(value, dict) and key not in _CURVES else value
            for key, value in values.items()
        }
        yield f"{name}, batch {batch}", own | {"batch": int(batch)}


def _speed(value: Any) -> float | None:
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise BadScenario(f"measured_tokens_per_s is {value!r}; it must be a number above 0")
    return float(value)
