"""The OpenAPI document of the gateway's routes, and the page at `/docs` that shows it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.off_loop import off_loop

_PREFIX = "#/components/schemas/"

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
Schema = dict[str, Any]
_STREAMED = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"}
)
_CHAT = ("/v1/chat/completions", "post")
_DESCRIPTIONS = {
    400: "a field is missing, malformed, out of range or not implemented",
    401: "the API key is missing or wrong",
    403: "the key's scope does not allow it",
    404: "no such model, response or route",
    410: "somebody aborted the request",
    408: "the body did not arrive in time",
    413: "the body is larger than the gateway takes",
    429: "the target's queue is full, or a limit of the key is reached; see `retry-after`",
    500: "the gateway or the engine failed",
    501: "not set up here; the message names the setting",
    503: "no target takes requests, or the gateway is stopping",
    504: "it took longer than allowed",
}
_STATUSES_OF_ALL: tuple[int, ...] = (400, 401, 404, 500, 503, 504)
_STATUSES_OF_BODIES = (408, 413)
_STATUSES_OF_LIMITED = (429,)  # limits of keys count only POST requests
_EVENT: Schema = {
    "type": "object",
    "description": "One event; its data is a JSON object, or `[DONE]` at the end of OpenAI's.",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_NULLABLE_TEXT: Schema = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERRORS: dict[str, Schema] = {
    "Error": {
        "type": "object",
        "description": "OpenAI's shape. `param` names the field as the client sent it.",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE_TEXT,
                    "code": {"type": "string"},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "description": "Anthropic's shape, of the routes below `/v1/messages`.",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            },
            "request_id": {"type": "string"},
        },
    },
}


@dataclass(frozen=True, slots=True)
class Type:
    """A type in words; `schema` is the name of the schema that it refers to, if any."""

    text: str
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class SchemaField:
    """A property of an object."""

    name: str
    types: tuple[Type, ...]
    is_required: bool
    description: str


def fields(schema: Mapping[str, Any]) -> tuple[SchemaField, ...]:
    """Returns the properties of an object in their order."""
    required = schema.get("required", ())
    return tuple(
        SchemaField(name, types(field), name in required, field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    )


def types(schema: Mapping[str, Any]) -> tuple[Type, ...]:
    """Returns the alternative types of a value, without duplicates and without null, which means
    absent."""
    alternatives = schema.get("anyOf") or schema.get("oneOf")
    if alternatives:
        all_types = [kind for alternative in alternatives for kind in types(alternative)]
    else:
        all_types = [_type(schema)]
    return tuple(dict.fromkeys(kind for kind in all_types if kind.text != "null"))


def _type(schema: Mapping[str, Any]) -> Type:
    if "$ref" in schema:
        name = str(schema["$ref"]).removeprefix(_PREFIX)
        return Type(name, name)
    if "const" in schema:
        return Type(repr(schema["const"]))
    if "enum" in schema:
        return Type(" | ".join(map(repr, schema["enum"])))
    if schema.get("type") == "array":
        items = types(schema.get("items", {}))
        text = " or ".join(item.text for item in items)
        return Type(f"list of {text}", next((item.schema for item in items if item.schema), None))
    return Type(str(schema.get("type", "any")))


def add_reference_routes(app: FastAPI) -> None:
    """Adds the page. Like the document, it needs no API key."""
    make = functools.cache(lambda: render(app.openapi()))

    async def page(_request: Request) -> Response:
        content = await off_loop("the page", make)
        return Response(content, headers=_HEADERS, media_type="text/html")

    app.add_route("/docs", page, methods=["GET"], include_in_schema=False)


def render(document: dict[str, Any]) -> str:
    """Returns the page of an OpenAPI document."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        document=document,
        groups=_groups(document),
        schemas=sorted(document["components"]["schemas"].items()),
        fields=fields,
        types=types,
    )


def _groups(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Returns the operations by their tag, in the order of the document."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            entry = {
                **operation,
                "path": path,
                "method": method.upper(),
                "body": _json_schema(operation.get("requestBody", {})),
                "answer": _json_schema(operation["responses"].get("200", {})),
            }
            groups.setdefault(operation["tags"][0], []).append(entry)
    return groups


def _json_schema(message: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the schema of a request's or an answer's JSON; None without one."""
    content = message.get("content", {}).get("application/json", {})
    schema: dict[str, Any] | None = content.get("schema")
    return schema or None


class DocumentedApp(FastAPI):
    """An application whose OpenAPI document also describes its errors and streams."""

    def setup(self) -> None:
        """Adds the route of the document. Making the document takes a second; FastAPI's own route
        would block the event loop, and so every stream, for that time."""
        self._document_lock = threading.Lock()
        make = functools.cache(lambda: orjson.dumps(self.openapi()))

        async def document(_request: Request) -> Response:
            content = await off_loop("the document", make)
            return Response(content, media_type="application/json")

        self.add_route("/openapi.json", document, include_in_schema=False)

    def openapi(self) -> Schema:
        with self._document_lock:
            if self.openapi_schema is None:
                document = super().openapi()
                _complete(document)
                self.openapi_schema = document
            return self.openapi_schema


def _complete(document: Schema) -> None:
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(_ERRORS)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            responses.pop("422", None)
            _add_content(responses, path, method)
            for status in _statuses(path, method, operation["tags"]):
                responses[str(status)] = _error(status, path)


def _add_content(responses: Schema, path: str, method: str) -> None:
    if path in _STREAMED and method != "get":
        responses["200"]["content"]["text/event-stream"] = {"itemSchema": _EVENT}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path in ("/health", "/ready"):
        not_ready = {**responses["200"], "description": "takes no requests now"}
        responses["503"] = not_ready


def _statuses(path: str, method: str, tags: list[str]) -> tuple[int, ...]:
    if "operations" in tags:
        return ()
    statuses = _STATUSES_OF_ALL
    if method in ("post", "put"):
        statuses += _STATUSES_OF_BODIES
    # Routes that generate answer 429 by any method: the target's queue may be full.
    if method == "post" or path in (*_STREAMED, "/health_generate"):
        statuses += _STATUSES_OF_LIMITED
    if path in (*_STREAMED, "/health_generate", "/v1/responses/compact"):
        statuses += (410,)
    is_stored_chat = path.startswith("/v1/chat/completions") and (path, method) != _CHAT
    if path.startswith("/v1/conversations") or is_stored_chat:
        statuses += (501,)
    if path == "/flush_cache" or "rollouts" in tags:
        statuses += (403, 501)
    return statuses


def _error(status: int, path: str) -> Mapping[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    schema = {"$ref": f"#/components/schemas/{name}"}
    content = {"application/json": {"schema": schema}}
    return {"description": _DESCRIPTIONS[status], "content": content}
