"""A process of clients: `python -m tests.bench.http.worker`, a task a line on stdin, in JSON.

A closed loop says `{}` once each of its clients has a first token, and goes on until the line
`stop`; every task ends with a line of answers. Answers under way are read to their end.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import orjson

from services.bound import end_with_parent
from tests.bench.http.answers import Answer
from tests.bench.http.client import Connection, Server
from tests.bench.http.prompts import demo_turns, prompts
from tests.load.arrivals import Poisson


@dataclass(frozen=True, slots=True)
class Task:
    """What one process is to do.

    Attributes:
        kind: `closed`, `open` or `burst`.
        seed: of prompts and arrivals; no two tasks share one.
        first_tokens: of the first request of each client; later ones have `num_tokens`.
        rate: requests a second of an open loop, of this process.
        start_s, end_s: of arrivals, on the monotonic clock; a burst has the start alone.
        num_repeated: prompts that repeat; 0 makes each new.
        fields, fields_every: see `Traffic`.
    """

    kind: str
    host: str
    port: int
    model: str
    temperature: float
    seed: int
    prompt_tokens: int
    num_tokens: int
    first_tokens: tuple[int, ...] = ()
    rate: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    num_repeated: int = 0
    fields: Mapping[str, object] = field(default_factory=dict)
    fields_every: int = 1

    @property
    def server(self) -> Server:
        return Server(self.host, self.port, self.model, self.temperature)

    def prompts(self) -> Iterator[list[int]]:
        return prompts(self.prompt_tokens, self.seed, self.num_repeated)


class Clients:
    """Runs one task after the other, over connections that it keeps."""

    def __init__(self, lines: asyncio.StreamReader) -> None:
        self._lines = lines
        self._free: list[Connection] = []
        self._numbers = itertools.count()

    async def run(self) -> None:
        while line := await self._lines.readline():
            task = Task(**orjson.loads(line))
            busy_s, start_s = time.process_time(), time.monotonic()
            answers = await getattr(self, f"_{task.kind}")(task)
            busy = (time.process_time() - busy_s) / (time.monotonic() - start_s)
            _say({"answers": answers, "busy": busy})

    async def _closed(self, task: Task) -> list[Answer]:
        answers: list[Answer] = []
        source, stopped = task.prompts(), asyncio.Event()
        begun: set[int] = set()

        def begin(client: int) -> None:
            if client not in begun:
                begun.add(client)
                if len(begun) == len(task.first_tokens):
                    _say({})

        async def work(client: int, first_tokens: int) -> None:
            connection, prompt = self._connection(task), next(source)
            on_first = functools.partial(begin, client)
            answer = await connection.ask(
                prompt, first_tokens, fields=self._fields(task), on_first=on_first
            )
            begin(client)  # where it failed
            answers.append(answer)
            # A server that refuses everything must not be asked in a busy loop.
            while not stopped.is_set() and answer.error is None:
                fields = self._fields(task)
                answer = await connection.ask(next(source), task.num_tokens, fields=fields)
                answers.append(answer)
            self._free.append(connection)

        if not task.first_tokens:
            _say({})
        async with asyncio.TaskGroup() as group:
            for client, first_tokens in enumerate(task.first_tokens):
                group.create_task(work(client, first_tokens))
            await self._lines.readline()
            stopped.set()
        return answers

    async def _open(self, task: Task) -> list[Answer]:
        source, tasks = task.prompts(), []
        async with asyncio.TaskGroup() as group:
            for offset_s in Poisson(task.rate, task.seed).offsets_s():
                due_s = task.start_s + offset_s
                if due_s >= task.end_s:
                    break
                prompt = next(source)
                await asyncio.sleep(due_s - time.monotonic())
                tasks.append(group.create_task(self._once(task, prompt, due_s)))
        return [each.result() for each in tasks]

    async def _burst(self, task: Task) -> list[Answer]:
        source = task.prompts()
        drawn = [next(source) for _ in task.first_tokens]
        await asyncio.sleep(task.start_s - time.monotonic())
        return list(
            await asyncio.gather(*(self._once(task, prompt, task.start_s) for prompt in drawn))
        )

    async def _once(self, task: Task, prompt: list[int], due_s: float) -> Answer:
        connection = self._connection(task)
        fields = self._fields(task)
        answer = await connection.ask(prompt, task.num_tokens, fields=fields, due_s=due_s)
        self._free.append(connection)
        return answer

    def _fields(self, task: Task) -> Mapping[str, object]:
        """Returns what the next request says beside what every request does."""
        return {} if next(self._numbers) % task.fields_every else task.fields

    def _connection(self, task: Task) -> Connection:
        """Returns one that is free; a process talks to one server all its life."""
        return self._free.pop() if self._free else Connection(task.server)


def _say(body: object) -> None:
    sys.stdout.buffer.write(orjson.dumps(body) + b"\n")
    sys.stdout.buffer.flush()


async def _main() -> None:
    demo_turns()  # before the first request is due
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    await Clients(lines).run()


if __name__ == "__main__":
    end_with_parent()
    asyncio.run(_main())
