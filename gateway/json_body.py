"""Parses clients' JSON and refuses values that cannot be encoded again.

Python's own parser accepts lone surrogates, `NaN`, and integers and nesting of any size. Neither
UTF-8, nor protobuf, nor other JSON writers can encode those.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import InvalidArgument

MAX_DEPTH = 128
_OPENING = (b"{", b"[")
_MAX_SHOWN_PATH = 200  # characters of a field's path in a message


class JsonRoute(APIRoute):
    """A route that reads its body with `parse_json`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def with_parser(request: Request) -> Response:
            return await handle(_JsonRequest(request.scope, request.receive))

        return with_parser


class _JsonRequest(Request):
    async def json(self) -> Any:
        return parse_json(await self.body())


def parse_json(content: bytes, field: str = "") -> Any:
    """Returns the value of JSON text.

    Args:
        field: the field that `content` came in; empty for a whole body.

    Raises:
        InvalidArgument: `content` is not JSON, holds a lone surrogate or is nested too deeply.
    """
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise _malformed(content, field, error) from error
    # With few opening brackets the nesting cannot be too deep.
    if sum(content.count(bracket) for bracket in _OPENING) > MAX_DEPTH:
        _check_depth(value, field)
    return value


def _malformed(content: bytes, field: str, error: orjson.JSONDecodeError) -> InvalidArgument:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    for path, text in _texts(value, field):
        if _has_surrogate(text):
            return _not_unicode(path)
    what = field or "the body"
    if "depth" in error.msg:
        return _too_deep(what)
    message = f"{what} is not JSON: {error.msg} at character {error.pos}"
    return InvalidArgument.of("JSON_INVALID", field, message) if field else InvalidArgument(
        message, reason="JSON_INVALID"
    )  # fmt: skip


def _not_unicode(path: str) -> InvalidArgument:
    message = f"{path or 'the body'} holds half a surrogate pair; text must be Unicode"
    if not path:
        return InvalidArgument(message, reason="TEXT_NOT_UNICODE")
    return InvalidArgument.of("TEXT_NOT_UNICODE", path, message)


def _too_deep(path: str) -> InvalidArgument:
    message = f"{path} is nested too deeply; JSON may have {MAX_DEPTH} levels"
    return InvalidArgument.of("JSON_TOO_DEEP", path, message)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields each text with the path of its field; a key counts as text of its object."""
    unvisited = [(path, value)]
    while unvisited:
        path, value = unvisited.pop()
        if isinstance(value, str):
            yield path, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield path, key
                shown = f"{path}.{key}" if path else key
                unvisited.append((shown[:_MAX_SHOWN_PATH], inner))
        elif isinstance(value, list):
            unvisited += [(f"{path}[{n}]", inner) for n, inner in enumerate(value)]


def _check_depth(value: Any, field: str) -> None:
    """Walks level by level: recursion would use the stack for each level."""
    level: list[tuple[str, Any]] = [(field, value)]
    for _ in range(MAX_DEPTH):
        next_level: list[tuple[str, Any]] = []
        for top, outer in level:
            if isinstance(outer, dict):
                items = outer.items()
                next_level += [(top or key, v) for key, v in items if type(v) in (dict, list)]
            elif isinstance(outer, list):
                next_level += [(top, v) for v in outer if type(v) in (dict, list)]
        if not next_level:
            return
        level = next_level
    raise _too_deep(level[0][0] or "the body")
