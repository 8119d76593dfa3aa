"""Field masks over a tree shape: which of its numbers a request changes, and whether it may.

The wire's names are checked here, so that a refusal names the field its sender wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from services.draft.fan_out import MAX_BUDGET, FanOut
from shared.errors import FieldViolation, InvalidArgument
from shared.tokens import TreeShape


class ShapeFields(Protocol):
    """A `TreeShape` message; 0 stands for an absent field, as it is in no field's range."""

    @property
    def step_count(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def draft_token_count(self) -> int: ...


# Wire name: attribute of `TreeShape` and limits.
_FIELDS = {
    "step_count": ("num_steps", 1, 32),
    "topk": ("topk", 1, 16),
    "draft_token_count": ("num_draft_tokens", 2, 257),
}


def updated_shape(
    current: TreeShape | None, fields: ShapeFields, *, paths: Sequence[str] | None, prefix: str
) -> TreeShape:
    """Returns `current` with the fields of a request.

    Args:
        current: None when the request must bring all three numbers.
        paths: paths of a field mask, `shape`, `shape.<field>`, `pinned` or `outcome_budget`, which
            are no fields of the shape; None changes the set fields.
        prefix: path of the message in its request, for errors.

    Raises:
        InvalidArgument: an unknown path, or a value out of range; names every one of them.
    """
    values = {name: int(getattr(fields, name)) for name in _FIELDS}
    names = _changed(values, paths, is_partial=current is not None)
    violations = tuple(
        FieldViolation(f"{prefix}.{name}", _problem(name, values[name]))
        for name in names
        if not _FIELDS[name][1] <= values[name] <= _FIELDS[name][2]
    )
    if violations:
        message = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgument(message, reason="TREE_SHAPE_INVALID", violations=violations)
    changes: dict[str, Any] = {_FIELDS[name][0]: values[name] for name in names}
    return TreeShape(**changes) if current is None else replace(current, **changes)


def updated_pin(
    current: bool, wanted: bool | None, *, changes_shape: bool, paths: Sequence[str] | None
) -> bool:
    """Returns whether trees keep to the shape after a request.

    Args:
        wanted: what the request says; None when it does not.
        changes_shape: the request brings a shape, which pins it unless it says otherwise.
        paths: see `updated_shape`.
    """
    if wanted is not None and (paths is None or "pinned" in paths):
        return wanted
    is_named = paths is None or any(path.startswith("shape") for path in paths)
    return current or (changes_shape and is_named)


def updated_fan_out(
    current: FanOut, wanted: int | None, *, paths: Sequence[str] | None, prefix: str
) -> FanOut:
    """Returns which verdicts are prepared for after a request.

    Args:
        wanted: budget in the request; None when it names none.
        paths, prefix: see `updated_shape`.

    Raises:
        InvalidArgument: the budget is out of range.
    """
    if wanted is None or not (paths is None or "outcome_budget" in paths):
        return current
    if not 0 <= wanted <= MAX_BUDGET:
        message = f"outcome_budget is {wanted}; it must be in [0, {MAX_BUDGET}]"
        raise InvalidArgument.of("OUTCOME_BUDGET_INVALID", f"{prefix}.outcome_budget", message)
    return replace(current, budget=wanted)


def _changed(
    values: dict[str, int], paths: Sequence[str] | None, *, is_partial: bool
) -> Sequence[str]:
    if paths is None:
        return [name for name, value in values.items() if value or not is_partial]
    known = {f"shape.{name}": [name] for name in values}
    known |= {"shape": list(values), "pinned": [], "outcome_budget": []}
    unknown = [path for path in paths if path not in known]
    if unknown:
        message = f"update_mask names {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        raise InvalidArgument.of("FIELD_MASK_INVALID", "update_mask", message)
    return sorted({name for path in paths for name in known[path]})


def _problem(name: str, value: int) -> str:
    _, low, high = _FIELDS[name]
    return f"is {value}; it must be in [{low}, {high}]"
