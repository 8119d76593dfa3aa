"""Field masks over a tree shape: which of its numbers a request changes, and whether it may.

The wire's names are checked here, so that a refusal names the field its sender wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

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
        paths: paths of a field mask, `shape` or `shape.<field>`; None changes the set fields.
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
    changes = {_FIELDS[name][0]: values[name] for name in names}
    return TreeShape(**changes) if current is None else replace(current, **changes)


def _changed(
    values: dict[str, int], paths: Sequence[str] | None, *, is_partial: bool
) -> Sequence[str]:
    if paths is None:
        return [name for name, value in values.items() if value or not is_partial]
    known = {f"shape.{name}": [name] for name in values} | {"shape": list(values)}
    unknown = [path for path in paths if path not in known]
    if unknown:
        message = f"update_mask names {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        raise InvalidArgument.of("FIELD_MASK_INVALID", "update_mask", message)
    return sorted({name for path in paths for name in known[path]})


def _problem(name: str, value: int) -> str:
    _, low, high = _FIELDS[name]
    return f"is {value}; it must be in [{low}, {high}]"
