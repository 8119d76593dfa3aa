"""What FastAPI works out of each route, once for all the applications of a test process.

Each test has an application of its own, and half of what a test of the gateway takes was reading
the signatures of the same 57 routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import fastapi.routing as routing
import fastapi.utils as utils
import pytest

_PARTS = "_build_dependant_with_parameterless_dependencies"


def share_routes(patch: pytest.MonkeyPatch) -> None:
    """Lets routes with the same code and path share what was worked out of their signatures."""
    fields: dict[tuple[str, Any, str], Any] = {}
    built: dict[tuple[str, Any], Any] = {}
    answers: dict[Any, Any] = {}
    build, answer_type = getattr(routing, _PARTS), routing.get_typed_return_annotation

    def field(name: str, type_: Any, mode: str = "validation", **others: Any) -> Any:
        if others:
            return utils.create_model_field(name, type_, mode=mode, **others)
        key = name, type_, mode
        if key not in fields:
            fields[key] = utils.create_model_field(name, type_, mode=mode)
        return fields[key]

    def parts(*, path: str, call: Callable[..., Any], dependencies: Sequence[Any]) -> Any:
        code = getattr(call, "__code__", None)
        if code is None or dependencies:
            return build(path=path, call=call, dependencies=dependencies)
        if (path, code) not in built:
            built[path, code] = build(path=path, call=call, dependencies=dependencies)
        dependant, *others = built[path, code]
        return replace(dependant, call=call), *others

    def answer(call: Callable[..., Any]) -> Any:
        code = getattr(call, "__code__", call)
        if code not in answers:
            answers[code] = answer_type(call)
        return answers[code]

    patch.setattr(routing, "create_model_field", field)
    patch.setattr(routing, "get_typed_return_annotation", answer)
    patch.setattr(routing, _PARTS, parts)
