"""Errors in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import InvalidArgument, OutriderError, StatusCode

_HTTP_STATUS = {
    StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "service_unavailable_error",
}
_HTTP_CODES = {HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large"}
_OPENAI_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded"}


def error_body(error: OutriderError) -> dict[str, Any]:
    """Returns the JSON object of an error, for a response or an event of a stream."""
    param = error.violations[0].field if error.violations else None
    code = _OPENAI_CODES.get(error.reason, error.reason.lower())
    return _body(http_status(error), error.message, param, code)


def http_status(error: OutriderError) -> HTTPStatus:
    """Returns the HTTP status of an error."""
    return _HTTP_STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)


def error_response(error: OutriderError) -> Response:
    """Returns the response that ends a request before its first byte."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    return _response(http_status(error), error_body(error), headers)


def plain_response(status: HTTPStatus, message: str, code: str) -> Response:
    """Returns an error that is about HTTP itself."""
    return _response(status, _body(status, message, None, code), {})


async def on_outrider_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OutriderError)
    return error_response(error)


async def on_validation_error(_request: Request, error: Exception) -> Response:
    """OpenAI answers 400 where FastAPI would answer 422."""
    assert isinstance(error, RequestValidationError)
    return error_response(_invalid_body(error.errors()))


async def on_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    code = _HTTP_CODES.get(status, status.name.lower())
    body = _body(status, str(error.detail), None, code)
    return _response(status, body, dict(error.headers or {}))


async def on_bug(_request: Request, _error: Exception) -> Response:
    """The traceback goes to the log; the client learns that it is not its fault."""
    message = "the gateway failed; see its log"
    return plain_response(HTTPStatus.INTERNAL_SERVER_ERROR, message, "gateway_failed")


def _invalid_body(problems: Sequence[Any]) -> InvalidArgument:
    """Returns the first problem. Of a union, that is the first form that did not fit."""
    problem = problems[0]
    if problem["type"] == "json_invalid":
        reason = problem.get("ctx", {}).get("error", problem["msg"])
        return InvalidArgument(f"the body is not JSON: {reason}", reason="JSON_INVALID")
    names = [str(part) for part in problem["loc"][1:] if not _is_union_form(part)]
    if not names:
        message = "the body must be a JSON object, sent as content-type application/json"
        return InvalidArgument(message, reason="BODY_INVALID")
    field = ".".join(names)
    return InvalidArgument.of("FIELD_INVALID", field, f"{field}: {problem['msg']}")


def _is_union_form(part: str | int) -> bool:
    """Pydantic puts the form of a union it tried into the path: `str`, `list[int]`."""
    return isinstance(part, str) and (part in ("str", "int") or part.startswith("list["))


def _body(status: HTTPStatus, message: str, param: str | None, code: str) -> dict[str, Any]:
    default = (
        "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    )
    kind = _TYPES.get(status, default)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: HTTPStatus, body: dict[str, Any], headers: dict[str, str]) -> Response:
    content = orjson.dumps(body)
    return Response(content, status, headers, media_type="application/json")
