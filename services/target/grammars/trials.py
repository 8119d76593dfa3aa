"""The target's side of grammar trials: a process of its own, started at the first grammar."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from services.target.grammars.compiler import too_complex
from services.target.grammars.trial import Answer, Request
from shared.errors import EngineFailed, InvalidArgument, QueueFull
from shared.grammar import Grammar

_NUM_AT_ONCE = 2


class GrammarTrials:
    """Tries grammars out, two at a time.

    Args:
        path: of `tokenizer.json`.
        max_bytes: what compiling one may take.
        timeout_s: of one trial, and of the wait for its turn.
    """

    def __init__(
        self,
        path: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        words = (str(path), str(vocab_size), json.dumps(list(eos_token_ids)))
        self._arguments = (*words, str(max_bytes), str(timeout_s))
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(_NUM_AT_ONCE)
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, grammar: Grammar) -> int:
        """Returns the bytes that a grammar keeps once it is compiled.

        Raises:
            InvalidArgument: it is wrong, takes too long or too much memory.
            QueueFull: others wait for their trials.
        """
        try:
            await asyncio.wait_for(self._turns.acquire(), self._timeout_s)
        except TimeoutError as error:
            message = f"grammars of other requests took the {self._timeout_s:g} s of this one"
            raise QueueFull(message, reason="GRAMMARS_BUSY", retry_after_s=1.0) from error
        try:
            answer = await self._asked(grammar)
        finally:
            self._turns.release()
        if answer["outcome"] == "wrong":
            raise InvalidArgument.of(answer["reason"], "grammar", answer["message"])
        if answer["outcome"] == "slow":
            limit = f"longer than {self._timeout_s:g} s to compile"
            raise too_complex(f"the {grammar.kind.value} takes {limit}")
        if answer["outcome"] == "large":
            limit = f"more than {self._max_bytes / 2**20:,.0f} MiB to compile"
            raise too_complex(f"the {grammar.kind.value} takes {limit}")
        return answer["num_bytes"]

    def close(self) -> None:
        """Ends the process."""
        process, self._process, self._read = self._process, None, b""
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(process.stdout)
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        for waiting in self._waiting.values():
            if not waiting.done():
                message = "the process that tries grammars ended"
                waiting.set_exception(EngineFailed(message, reason="ENGINE_FAILED"))

    async def _asked(self, grammar: Grammar) -> Answer:
        process = self._process or self._start()
        assert process.stdin is not None
        number = next(self._numbers)
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answered
        request = Request(number=number, kind=grammar.kind.value, source=list(grammar.source))
        try:
            # On a thread: it does not read before it has the tokenizer.
            await asyncio.to_thread(_write, process.stdin, request)
            return await answered
        finally:
            del self._waiting[number]

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "services.target.grammars.trial", *self._arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        assert self._process.stdout is not None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.stdout, self._take, self._process)
        return self._process

    def _take(self, process: subprocess.Popen[bytes]) -> None:
        """Resolves the futures of finished trials."""
        assert process.stdout is not None
        read = os.read(process.stdout.fileno(), 1 << 16)
        if not read:
            self.close()
            return
        *lines, self._read = (self._read + read).split(b"\n")
        for line in lines:
            answer: Answer = json.loads(line)
            waiting = self._waiting.get(answer["number"])
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)


def _write(requests: IO[bytes], request: Request) -> None:
    with contextlib.suppress(BrokenPipeError, ValueError):  # it ended, which its reader tells
        requests.write(json.dumps(request).encode() + b"\n")
        requests.flush()
