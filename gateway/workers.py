"""The workers of one gateway: where they find each other, and requests that all of them answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

_TIMEOUT_S = 10.0
_FORWARDED = (b"authorization", b"x-api-key", b"content-type", b"x-request-id")
_JSON = "application/json"
_COUNTS = frozenset(
    {
        *("aborted_request_count", "open_request_count", "live_request_count", "server_load"),
        *("reserved_token_count", "received_token_count"),
        *("verified_round_count", "accepted_token_count"),
    }
)
_SUMMED = frozenset(
    {
        *("/load", "/server_info", "/get_server_info", "/speculation_history"),
        "/abort_request",
    }
)
_RUNNING = ("queued", "in_progress")
_KEPT = re.compile(r"/v1/responses/[^/]+")
_CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker among all of a gateway.

    Attributes:
        index: from 0.
        count: of the workers.
        folder: of their sockets, which only this user may enter.
    """

    index: int
    count: int
    folder: Path

    @property
    def http_path(self) -> Path:
        """The socket on which the worker answers the others."""
        return self.folder / f"{self.index}.http"

    @property
    def maintenance_address(self) -> str:
        return f"unix:{self.folder / str(self.index)}.maintenance"

    @property
    def others(self) -> list[WorkerPlace]:
        """The other workers."""
        places = (WorkerPlace(index, self.count, self.folder) for index in range(self.count))
        return [place for place in places if place.index != self.index]


class Reply(NamedTuple):
    """The answer of one worker; `status` is 503 if it did not answer."""

    status: int
    media_type: str
    body: bytes


Merge = Callable[[Sequence[Reply]], Reply]


class ForAllWorkers:
    """Asks every worker, this one included, and sends on one answer.

    What comes in over a worker's own socket is from another worker, and is for this one alone.
    """

    def __init__(self, app: ASGIApp, place: WorkerPlace) -> None:
        self._app = app
        self._place = place

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        merge = _merge(scope["method"], scope["path"]) if _is_from_client(scope) else None
        if merge is None:
            await self._app(scope, receive, send)
            return
        message = _message(scope, await Request(scope, receive).body())
        asked = sorted((self._place, *self._place.others), key=lambda place: place.index)
        reply = merge(await asyncio.gather(*(_ask(place, message) for place in asked)))
        response = Response(reply.body, reply.status, media_type=reply.media_type)
        await response(scope, receive, send)


def _is_from_client(scope: Scope) -> bool:
    """Whether a request came over the public port; a worker's own socket has no port."""
    return scope["type"] == "http" and scope["server"] is not None and bool(scope["server"][1])


def _merge(method: str, path: str) -> Merge | None:
    """Returns how answers become one; None for what one worker answers alone."""
    if path in ("/health", "/ready"):
        return _health
    if path == "/metrics":
        return _metrics
    if path in _SUMMED:
        return _summed
    if (method == "DELETE" and _KEPT.fullmatch(path)) or _CANCEL.fullmatch(path):
        return _best
    return None


def _message(scope: Scope, body: bytes) -> bytes:
    """Returns the same request, as HTTP/1.0: its answer ends with the connection."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    lines = [scope["method"].encode() + b" " + target + b" HTTP/1.0"]
    lines += [name + b": " + value for name, value in scope["headers"] if name in _FORWARDED]
    lines += [b"content-length: %d" % len(body), b"", body]
    return b"\r\n".join(lines)


async def _ask(place: WorkerPlace, message: bytes) -> Reply:
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(place.http_path)
            try:
                writer.write(message)
                answer = await reader.read()
            finally:
                writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return Reply(int(head.split(b" ", 2)[1]), _media_type(head), body)
    except (OSError, TimeoutError, IndexError):
        body = orjson.dumps({"status": "not_serving", "detail": "the worker does not answer"})
        return Reply(HTTPStatus.SERVICE_UNAVAILABLE, _JSON, body)


def _media_type(head: bytes) -> str:
    found = re.search(rb"\r\ncontent-type: ([^\r]*)", head, re.IGNORECASE)
    return _JSON if found is None else found[1].decode()


def _health(replies: Sequence[Reply]) -> Reply:
    """The worst of them: a connection may come to any worker."""
    worst = max(replies, key=lambda reply: reply.status)
    states = [orjson.loads(reply.body)["status"] for reply in replies]
    body = orjson.dumps({**orjson.loads(worst.body), "workers": states})
    return Reply(worst.status, _JSON, body)


def _best(replies: Sequence[Reply]) -> Reply:
    """The one that found something and tells its end."""

    def rank(reply: Reply) -> tuple[int, bool]:
        is_found = reply.status == HTTPStatus.OK
        return reply.status, is_found and orjson.loads(reply.body).get("status") in _RUNNING

    return min(replies, key=rank)


def _summed(replies: Sequence[Reply]) -> Reply:
    """The first one that is well, with counts of all."""
    well = [reply for reply in replies if reply.status == HTTPStatus.OK]
    if not well:
        return _best(replies)
    return Reply(HTTPStatus.OK, _JSON, orjson.dumps(_sum([orjson.loads(r.body) for r in well])))


def _sum(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [_sum(each) for each in zip(*values, strict=False)]
    if not isinstance(first, dict):
        return first
    found: dict[str, Any] = {}
    for key in first:
        each = [value[key] for value in values if key in value]
        found[key] = sum(each) if key in _COUNTS else _sum(each)
    return found


def _metrics(replies: Sequence[Reply]) -> Reply:
    """All samples, each with a label that names its worker."""
    return Reply(HTTPStatus.OK, replies[0].media_type, generate_latest(_Labelled(replies)))


class _Labelled(Collector):
    def __init__(self, replies: Sequence[Reply]) -> None:
        self._replies = replies

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for index, reply in enumerate(self._replies):
            if reply.status != HTTPStatus.OK:
                continue
            for family in text_string_to_metric_families(reply.body.decode()):
                kept = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "worker": str(index)}
                    kept.samples.append(sample._replace(labels=labels))
        yield from families.values()
