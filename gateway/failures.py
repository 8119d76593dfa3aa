"""Error responses, in the shape of the called interface, and notices, in a header.

All routes use OpenAI's shape, `{"error": {message, type, param, code}}`, except Anthropic's routes:
`{"type": "error", "error": {type, message}, "request_id"}`."""

from __future__ import annotations

import contextlib
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import Cancelled, InvalidArgument, OutriderError, StatusCode
from shared.telemetry.tracing import current_request_id

_FIELD_NAME = re.compile(r"[a-z_][a-z0-9_]*")
_UNION_FORMS = frozenset({"str", "int", "float", "bool"})
_MAX_SHOWN = 64  # characters of a value in a message
_ANTHROPIC_ROUTES = "/v1/messages"
_CLIENT_CLOSED_REQUEST = 499  # nginx's code; only the log sees it

_HTTP_STATUS = {
    StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    # An operator must change something; a retry does not help.
    StatusCode.FAILED_PRECONDITION: HTTPStatus.NOT_IMPLEMENTED,
    StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    # Clients retry 409, 429 and 5xx; an aborted request must not be retried.
    StatusCode.CANCELLED: HTTPStatus.GONE,
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}
_HTTP_CODES = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large"}
_OPENAI_CODES = {
    "PROMPT_TOO_LONG": "context_length_exceeded",
    "OUTPUT_TOO_LONG": "context_length_exceeded",
}
_ANTHROPIC_TYPES = {
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}
# What pydantic says in its own terms, by its name of the error.
_OBJECT, _INTEGER = "it must be an object", "it must be an integer in [-2^63, 2^63)"
_RULES = {
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), _OBJECT),
    **dict.fromkeys(("int_parsing_size", "int_from_float"), _INTEGER),
}
NOTICE_HEADER = "x-outrider-notice"
_MAX_CHARACTERS = 1024
_log = logging.getLogger(__name__)
current_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)
"""Notices of the request that is being served."""


class ClientGone(Exception):
    """The client closed the connection before its answer ended."""


class Aborted(Cancelled):
    """The request was aborted by its id."""


class ClientTooSlow(OutriderError):
    """The client left so much unread that its backlog reached the bound."""

    code = StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True, slots=True)
class Problem:
    """An error before it is written in the shape of an interface."""

    status: HTTPStatus
    message: str
    code: str
    param: str | None = None

    @classmethod
    def of(cls, error: OutriderError) -> Problem:
        status = _HTTP_STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
        param = error.violations[0].field if error.violations else None
        code = _OPENAI_CODES.get(error.reason, error.reason.lower())
        return cls(status, error.message, code, param)

    def openai_body(self) -> dict[str, Any]:
        name = _TYPES.get(self.status, self._type("server_error"))
        error = {"message": self.message, "type": name, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self) -> dict[str, Any]:
        name = _ANTHROPIC_TYPES.get(self.status, self._type("api_error"))
        error = {"type": name, "message": self.message}
        return {"type": "error", "error": error, "request_id": current_request_id.get()}

    def response(self, path: str, headers: Mapping[str, str] | None = None) -> Response:
        """Returns the response in the shape that clients of `path` read."""
        is_anthropic = path == _ANTHROPIC_ROUTES or path.startswith(f"{_ANTHROPIC_ROUTES}/")
        body = self.anthropic_body() if is_anthropic else self.openai_body()
        return json_response(body, self.status, headers)

    def _type(self, server_error: str) -> str:
        is_client_error = self.status < HTTPStatus.INTERNAL_SERVER_ERROR
        return "invalid_request_error" if is_client_error else server_error


def json_response(
    body: Any, status: int = HTTPStatus.OK, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with JSON."""
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def error_response(error: OutriderError, path: str) -> Response:
    """Returns the response of an error, with its `retry-after` if it has one."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return Problem.of(error).response(path, headers)


def refused_by_target(error: OutriderError) -> Response:
    """Returns the answer to a request to administer targets, in SGLang's shape. A target's refusal
    because of its state is a 400, as in SGLang."""
    problem = Problem.of(error)
    is_of_state = error.code is StatusCode.FAILED_PRECONDITION
    status = HTTPStatus.BAD_REQUEST if is_of_state else problem.status
    body = replace(problem, status=status).openai_body()
    return json_response({"success": False, "message": error.message, **body}, status)


FAILURES = (OutriderError, RequestValidationError, HTTPException, ClientGone)
"""Exceptions that end a request and are no bugs of the gateway."""


async def on_error(request: Request, error: Exception) -> Response:
    """Returns the error response of a request that has sent no byte yet."""
    path = request.scope["path"]  # the URL of a worker's own socket has that socket's path
    match error:
        case OutriderError():
            return error_response(error, path)
        case RequestValidationError():  # OpenAI answers 400 where FastAPI would answer 422
            sent_as = request.headers.get("content-type")
            return Problem.of(_invalid_body(error.errors(), sent_as)).response(path)
        case HTTPException(__cause__=OutriderError() as cause):  # FastAPI's, while it reads a body
            return error_response(cause, path)
        case HTTPException():
            status = HTTPStatus(error.status_code)
            code = _HTTP_CODES.get(status, status.name.lower())
            message = str(error.detail)
            if message == status.phrase:  # Starlette's, of a path or a method that has no route
                message = f"there is no {request.method} {path[:_MAX_SHOWN]}; see /docs"
            return Problem(status, message, code).response(path, error.headers)
        case ClientGone():
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
    # The traceback goes to the log; the client learns that the error is not its own.
    message = "the gateway failed; see its log"
    problem = Problem(HTTPStatus.INTERNAL_SERVER_ERROR, message, "gateway_failed")
    # The server closes the connection after an exception; a client must not reuse it.
    return problem.response(path, {"connection": "close"})


def _invalid_body(problems: Sequence[Any], content_type: str | None) -> InvalidArgument:
    """Returns the error of the first wrong field. Of a union's errors it is that of the member that
    was parsed furthest: a list of parts without a type is meant as a list, not as a string."""
    first = problems[0]["loc"][:2]
    same_field = [problem for problem in problems if problem["loc"][:2] == first]
    problem = max(same_field, key=lambda candidate: len(_names(candidate["loc"][1:])))
    field = _field(problem["loc"][1:])
    if not field:
        message = f"{_described(problem['input'], content_type)}; it must be a JSON object"
        return InvalidArgument(message, reason="BODY_INVALID")
    if problem["type"] == "missing":
        return InvalidArgument.of("FIELD_INVALID", field, f"{field} is missing")
    rule = _RULES.get(problem["type"], problem["msg"])
    message = f"{field} is {_shown(problem['input'])}: {rule}"
    return InvalidArgument.of("FIELD_INVALID", field, message)


def _described(body: object, content_type: str | None) -> str:
    """Returns what a body is that is no JSON object."""
    if body is None or body == b"":
        return "the body is empty"
    if isinstance(body, bytes):  # FastAPI parses only what is sent as JSON
        return f"the body's content-type is {_shown(content_type)}, not 'application/json'"
    return f"the body is {_shown(body)}"


def _field(path: Sequence[str | int]) -> str:
    """Returns a field's path as in messages: `messages[0].role`."""
    written = (f"[{n}]" if isinstance(n, int) else f".{n}" for n in _names(path))
    return "".join(written).removeprefix(".")


def _names(path: Sequence[str | int]) -> list[str | int]:
    """Returns the names and indices of a path.

    Pydantic also puts the tried member of a union into the path: `str`, `list[int]`, a class.
    """
    return [
        part
        for part in path
        if isinstance(part, int) or (_FIELD_NAME.fullmatch(part) and part not in _UNION_FORMS)
    ]


def _shown(value: object) -> str:
    """Returns a value for a message, cut if it is long."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"


@contextlib.contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Renames the field of an `InvalidArgument` that the block raises.

    Args:
        names: OpenAI's field name to the name in the client's interface.

    Raises:
        InvalidArgument: the error of the block, with the client's name of the field.
    """
    try:
        yield
    except InvalidArgument as error:
        field = error.violations[0].field if error.violations else ""
        if field not in names:
            raise
        message = re.sub(rf"^{re.escape(field)}\b", names[field], error.message)
        raise InvalidArgument.of(error.reason, names[field], message) from error


def give_notice(text: str) -> None:
    """Logs a notice, and sends it to the client if the headers are not sent yet."""
    _log.warning("%s", text[:_MAX_CHARACTERS])
    notices = current_notices.get()
    if notices is not None:
        notices.append(text)


def header_value(notices: list[str]) -> str:
    """Returns the notices as one header, in ASCII and of bounded length."""
    text = "; ".join(notices)[:_MAX_CHARACTERS]
    return "".join(c if " " <= c <= "~" else "?" for c in text)
