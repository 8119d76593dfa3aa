"""`/docs`: the OpenAPI document as one page, without scripts and without files from elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.reference.fields import fields, types

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}


def add_reference_routes(app: FastAPI) -> None:
    """Adds the page. It asks for no key, like the document."""
    content = ""

    async def page(_request: Request) -> Response:
        nonlocal content
        content = content or render(app.openapi())
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
            entry = {**operation, "path": path, "method": method.upper(), "body": _body(operation)}
            entry["answer"] = _json(operation["responses"].get("200", {}))
            groups.setdefault(operation["tags"][0], []).append(entry)
    return groups


def _body(operation: dict[str, Any]) -> dict[str, Any] | None:
    return _json(operation.get("requestBody", {}))


def _json(message: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the schema of a request's or an answer's JSON, if it says any."""
    content = message.get("content", {}).get("application/json", {})
    schema: dict[str, Any] | None = content.get("schema")
    return schema or None
