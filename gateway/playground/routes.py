"""The playground: one page at `/`, its files below `/playground/`. No build step, nothing from
elsewhere: the page works without a network, and its policy keeps it to this server."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

PAGE = "index.html"
FILES_PREFIX = "/playground/"

_FOLDER = Path(__file__).parent / "page"
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "cache-control": "no-cache",  # asked for again, answered with 304
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, in memory: what is not read at start is not served.

    Attributes:
        etag: changes with the content.
    """

    content: bytes
    media_type: str
    etag: str


def read_page(folder: Path = _FOLDER) -> Mapping[str, PageFile]:
    """Returns the files of the page by name."""
    return {
        path.name: _read(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in _MEDIA_TYPES
    }


def add_playground_routes(app: FastAPI) -> None:
    """Adds the page and its files. They hold no secret, so they ask for no key."""
    files = read_page()

    async def page(request: Request) -> Response:
        return _response(files[PAGE], request)

    async def file(request: Request) -> Response:
        found = files.get(request.path_params["name"])
        if found is None:
            raise HTTPException(HTTPStatus.NOT_FOUND)
        return _response(found, request)

    app.add_route("/", page, methods=["GET"], include_in_schema=False)
    app.add_route(f"{FILES_PREFIX}{{name:path}}", file, methods=["GET"], include_in_schema=False)


def _read(path: Path) -> PageFile:
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()[:32]
    return PageFile(content, _MEDIA_TYPES[path.suffix], f'"{digest}"')


def _response(file: PageFile, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)
