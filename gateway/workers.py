"""The workers of one gateway: their sockets, and requests that all workers answer together."""

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
    ("/load", "/server_info", "/get_server_info", "/speculation_history", "/abort_request")
)
_RUNNING = ("queued", "in_progress")
_RESPONSE = re.compile(r"/v1/responses/[^/]+")
_CANCEL = re.compile(r"/v1/responses/[^/]+/cancel")


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """One worker's place among the workers of a gateway.

    Attributes:
        index: index of the worker, from 0.
        count: number of workers.
        folder: folder of the workers' sockets, which only this user may enter.
    """

    index: int
    count: int
    folder: Path

    @property
    def http_path(self) -> Path:
        """The Unix socket on which the worker answers other workers."""
        return self.folder / f"{self.index}.http"

    @property
    def maintenance_address(self) -> str:
        return f"unix:{self.folder / str(self.index)}.maintenance"

    @property
    def all(self) -> list[WorkerPlace]:
        """All workers of the gateway, by index."""
        return [WorkerPlace(index, self.count, self.folder) for index in range(self.count)]


class Reply(NamedTuple):
    """The answer of one worker; `status` is 503 if the worker did not answer."""

    status: int
    media_type: str
    body: bytes


Merge = Callable[[Sequence[Reply]], Reply]


class ForAllWorkers:
    """Asks every worker, this one included, and sends the client one merged answer.

    A request over a worker's own socket comes from another worker and is answered by this one only.
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
        reply = merge(await asyncio.gather(*(_ask(place, message) for place in self._place.all)))
        response = Response(reply.body, reply.status, media_type=reply.media_type)
        await response(scope, receive, send)


def _is_from_client(scope: Scope) -> bool:
    """Whether a request came over the public port; a worker's own socket has no port."""
    return scope["type"] == "http" and scope["server"] is not None and bool(scope["server"][1])


def _merge(method: str, path: str) -> Merge | None:
    """Returns the function that merges the answers; None for requests that one worker answers."""
    if method in ("GET", "HEAD") and path in ("/health", "/ready", "/ping"):
        return _health
    if method == "GET" and path == "/metrics":
        return _metrics
    if path in _SUMMED:
        return _summed
    if (method == "DELETE" and _RESPONSE.fullmatch(path)) or _CANCEL.fullmatch(path):
        return _best
    return None


def _message(scope: Scope, body: bytes) -> bytes:
    """Returns the same request as HTTP/1.0, whose response ends with the connection."""
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    # An answer to HEAD would have no body to merge.
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    lines = [method.encode() + b" " + target + b" HTTP/1.0"]
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
        match = re.search(rb"\r\ncontent-type: ([^\r]*)", head, re.IGNORECASE)
        media_type = _JSON if match is None else match[1].decode()
        return Reply(int(head.split(b" ", 2)[1]), media_type, body)
    except (OSError, TimeoutError, IndexError):
        body = orjson.dumps({"status": "not_serving", "detail": "the worker does not answer"})
        return Reply(HTTPStatus.SERVICE_UNAVAILABLE, _JSON, body)


def _health(replies: Sequence[Reply]) -> Reply:
    """Returns the worst reply: a connection may come to any worker."""
    worst = max(replies, key=lambda reply: reply.status)
    states = [orjson.loads(reply.body)["status"] for reply in replies]
    body = orjson.dumps({**orjson.loads(worst.body), "workers": states})
    return Reply(worst.status, _JSON, body)


def _best(replies: Sequence[Reply]) -> Reply:
    """Returns a successful reply if there is one, preferably of a response that has ended."""

    def rank(reply: Reply) -> tuple[int, bool]:
        is_ok = reply.status == HTTPStatus.OK
        return reply.status, is_ok and orjson.loads(reply.body).get("status") in _RUNNING

    return min(replies, key=rank)


def _summed(replies: Sequence[Reply]) -> Reply:
    """Returns the first successful reply, with its counts summed over all successful replies."""
    bodies = [orjson.loads(reply.body) for reply in replies if reply.status == HTTPStatus.OK]
    if not bodies:
        return _best(replies)
    return Reply(HTTPStatus.OK, _JSON, orjson.dumps(_sum(bodies)))


def _sum(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, list):
        return [_sum(items) for items in zip(*values, strict=False)]
    if not isinstance(first, dict):
        return first
    total: dict[str, Any] = {}
    for key in first:
        fields = [value[key] for value in values if key in value]
        total[key] = sum(fields) if key in _COUNTS else _sum(fields)
    return total


def _metrics(replies: Sequence[Reply]) -> Reply:
    """Returns the samples of all workers, labelled with the worker's index."""
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
