"""The playground: one page at `/` and its files below `/playground/`.

There is no build step, and the page loads nothing from other hosts: it works without a network, and
its content security policy allows this server only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

FILES_PREFIX = "/playground/"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "cache-control": "no-cache",  # the browser asks again and gets 304 if nothing has changed
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class _PageFiles(StaticFiles):
    def file_response(self, *arguments: Any, **options: Any) -> Response:
        response = super().file_response(*arguments, **options)
        response.headers.update(_HEADERS)
        return response


def add_playground_routes(app: FastAPI) -> None:
    """Adds the page and its files. They hold no secret, so they need no API key."""
    files = _PageFiles(directory=Path(__file__).parent / "page")

    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    async def file(request: Request) -> Response:
        return await files.get_response(request.path_params["name"], request.scope)

    app.add_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_route(f"{FILES_PREFIX}{{name:path}}", file, methods=["GET"], include_in_schema=False)
