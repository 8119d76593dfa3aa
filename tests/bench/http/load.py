"""Loads of one server, spread over processes of clients."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from tests.bench.http.answers import Answer, Window, whole
from tests.bench.http.client import Server
from tests.bench.http.worker import Task

_LEAD_S = 0.2  # until what was drawn ahead is sent
_LINE_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Traffic:
    """What every request of a run is.

    Attributes:
        num_repeated: prompts that repeat; 0 makes each new.
        fields: of the body of some requests, beside what every request says.
        fields_every: each so many requests have them.
        timeout_s: in which all clients of a load must have a first token, and then their last.
    """

    prompt_tokens: int
    num_tokens: int
    num_repeated: int = 0
    fields: Mapping[str, object] = field(default_factory=dict)
    fields_every: int = 1
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load brought.

    Attributes:
        windows: in which it was steady.
        busy: share of its core that the busiest client process used; at 1 clients are the limit.
    """

    answers: tuple[Answer, ...]
    windows: tuple[Window, ...]
    busy: float


class ClientFailed(Exception):
    """A process of clients ended or did not answer in time; it has said why on stderr."""


def first_lengths(concurrency: int, num_tokens: int) -> list[int]:
    """Returns the tokens of each client's first request, spread so that answers end one by one, as
    they do in a loop that has run for long, rather than all at once."""
    return [math.ceil(num_tokens * (place + 1) / concurrency) for place in range(concurrency)]


class Load:
    """Sends loads one after the other to one server."""

    def __init__(
        self, processes: Sequence[asyncio.subprocess.Process], server: Server, traffic: Traffic
    ) -> None:
        self._processes = processes
        self._server = server
        self._traffic = traffic
        self._num_tasks = 0

    async def closed(self, concurrency: int, num_windows: int, window_s: float) -> Loaded:
        """Keeps so many requests in flight for windows in a row; the first opens when every client
        has a token."""
        lengths = first_lengths(concurrency, self._traffic.num_tokens)
        step = len(self._processes)
        await self._send(
            [self._task("closed", first_tokens=tuple(lengths[at::step])) for at in range(step)]
        )
        await self._hear()
        start_s = time.monotonic()
        await asyncio.sleep(num_windows * window_s)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(b"stop\n")
        windows = [
            Window(start_s + place * window_s, start_s + (place + 1) * window_s)
            for place in range(num_windows)
        ]
        return await self._loaded(windows)

    async def open(self, rate: float, warm_s: float, window_s: float) -> Loaded:
        """Sends Poisson arrivals, each process its share; the window opens after `warm_s`."""
        start_s = time.monotonic() + _LEAD_S
        window = Window(start_s + warm_s, start_s + warm_s + window_s)
        share = rate / len(self._processes)
        await self._send(
            [
                self._task("open", rate=share, start_s=start_s, end_s=window.end_s)
                for _ in self._processes
            ]
        )
        return await self._loaded([window])

    async def burst(self, num_requests: int) -> Loaded:
        """Sends so many requests at once; its window is all of their time."""
        start_s, step = time.monotonic() + _LEAD_S, len(self._processes)
        lengths = (self._traffic.num_tokens,) * num_requests
        await self._send(
            [
                self._task("burst", first_tokens=lengths[at::step], start_s=start_s)
                for at in range(step)
            ]
        )
        loaded = await self._loaded([])
        return Loaded(loaded.answers, (whole(loaded.answers),), loaded.busy)

    def _task(self, kind: str, **changes: object) -> Task:
        self._num_tasks += 1
        server, traffic = self._server, self._traffic
        return Task(
            kind=kind,
            host=server.host,
            port=server.port,
            model=server.model,
            temperature=server.temperature,
            seed=self._num_tasks,
            prompt_tokens=traffic.prompt_tokens,
            num_tokens=traffic.num_tokens,
            num_repeated=traffic.num_repeated,
            fields=traffic.fields,
            fields_every=traffic.fields_every,
            **changes,  # type: ignore[arg-type]
        )

    async def _send(self, tasks: Sequence[Task]) -> None:
        for process, task in zip(self._processes, tasks, strict=True):
            assert process.stdin is not None
            process.stdin.write(orjson.dumps(asdict(task)) + b"\n")

    async def _loaded(self, windows: Sequence[Window]) -> Loaded:
        said = await self._hear()
        answers = [Answer(**each) for one in said for each in one["answers"]]
        return Loaded(tuple(answers), tuple(windows), max(one["busy"] for one in said))

    async def _hear(self) -> list[dict[str, Any]]:
        """Returns the next line of every process."""
        try:
            async with asyncio.timeout(self._traffic.timeout_s):
                lines = await asyncio.gather(
                    *(each.stdout.readline() for each in self._processes if each.stdout)
                )
        except TimeoutError:
            raise ClientFailed(f"no answer within {self._traffic.timeout_s:g} s") from None
        if not all(lines):
            raise ClientFailed("a process of clients ended")
        return [orjson.loads(line) for line in lines]


@contextlib.asynccontextmanager
async def clients(num_processes: int) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Runs processes of clients until the block ends."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.http.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_BYTES,
        )
        for _ in range(num_processes)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
