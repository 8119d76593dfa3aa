"""Compiles grammars on threads of its own: neither the event loop nor the engine waits for one.

Each is compiled in a process first that may be killed; only what ends well there, in time and in
little memory, is compiled here.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from services.target.grammars.matcher import CompiledGrammar
from services.target.grammars.source import (
    STACK_BYTES,
    Vocabulary,
    compiled,
    read_vocabulary,
    too_complex,
)
from services.target.grammars.trial import Answer, Request
from shared.errors import EngineFailed, FailedPrecondition, InvalidArgument, QueueFull
from shared.grammar import Grammar

_NUM_THREADS = 2
_NUM_CACHED = 256


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one grammar.

    Attributes:
        max_bytes: of its text.
        compile_timeout_s: of compiling it.
        compile_bytes: that compiling it may take.
        cached_bytes: that all grammars may keep which are there for another request.
    """

    max_bytes: int
    compile_timeout_s: float
    compile_bytes: int = 256 * 2**20
    cached_bytes: int = 512 * 2**20


@dataclass(frozen=True, slots=True)
class _Compiled:
    grammar: CompiledGrammar
    num_bytes: int


class GrammarCompiler:
    """Compiles each grammar once while it stays among the last few hundred.

    Args:
        folder: of the tokenizer. It is read at the first grammar: a large one takes a second.
        vocab_size: rows of the model's output, which may be more than the tokenizer has tokens.
        eos_token_ids: tokens that may end an output which matches; the tokenizer's when empty.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: GrammarLimits,
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._limits = limits
        self._threads = _deep_threads()
        self._vocabulary: asyncio.Future[Vocabulary] | None = None
        self._compiled: OrderedDict[Grammar, asyncio.Future[_Compiled]] = OrderedDict()
        self._trials = GrammarTrials(
            *(folder / "tokenizer.json", vocab_size, self._eos_token_ids),
            *(limits.compile_bytes, limits.compile_timeout_s),
        )

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises:
        InvalidArgument: the grammar is wrong, too large or too slow to compile.
        QueueFull: the grammars of others keep this one from being compiled.
        FailedPrecondition: the target has no tokenizer that grammars could be applied to.
        """
        limits = self._limits
        if grammar.size_bytes > limits.max_bytes:
            raise too_complex(
                f"the {grammar.kind.value} has {grammar.size_bytes:,} bytes; "
                f"at most {limits.max_bytes:,} are accepted"
            )
        found = (await self._shared(grammar)).grammar
        self._make_room()
        return found

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept for later requests."""
        return sum(_num_bytes(each) for each in self._compiled.values())

    def close(self) -> None:
        """Lets the threads end; grammars still waiting are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

    def _make_room(self) -> None:
        while (
            len(self._compiled) > _NUM_CACHED or self.num_cached_bytes > self._limits.cached_bytes
        ):
            self._compiled.popitem(last=False)

    def _shared(self, grammar: Grammar) -> asyncio.Future[_Compiled]:
        """Returns the one compilation of a grammar, which outlives whoever waits for it."""
        compiled = self._compiled.get(grammar)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = asyncio.ensure_future(self._compile(grammar))
            compiled.add_done_callback(_note_exception)
            self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        self._make_room()
        return asyncio.shield(compiled)

    async def _compile(self, grammar: Grammar) -> _Compiled:
        loop = asyncio.get_running_loop()
        if self._vocabulary is None:
            self._vocabulary = loop.run_in_executor(self._threads, self._read_vocabulary)
        vocabulary = await asyncio.shield(self._vocabulary)
        num_bytes = await self._trials.run(grammar)
        found = await loop.run_in_executor(self._threads, compiled, grammar, vocabulary)
        return _Compiled(found, num_bytes)

    def _read_vocabulary(self) -> Vocabulary:
        try:
            path = self._folder / "tokenizer.json"
            return read_vocabulary(path, self._vocab_size, self._eos_token_ids)
        except (ImportError, OSError, ValueError) as error:
            message = f"this target cannot constrain output: {error}"
            raise FailedPrecondition(message, reason="GRAMMAR_UNAVAILABLE") from error


def _deep_threads() -> ThreadPoolExecutor:
    """Returns threads that rules which name each other in a long chain cannot overflow."""
    threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
    # Each waits for the others, so that all of them start, and start now.
    together = threading.Barrier(_NUM_THREADS)
    usual = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(_NUM_THREADS):
            threads.submit(together.wait)
    except RuntimeError:  # the host has no room for one; the others must not wait for it for ever
        together.abort()
        raise
    finally:
        threading.stack_size(usual)
    return threads


def _num_bytes(compiled: asyncio.Future[_Compiled]) -> int:
    has_ended_well = compiled.done() and not compiled.cancelled() and not compiled.exception()
    return compiled.result().num_bytes if has_ended_well else 0


def _note_exception(compiled: asyncio.Future[_Compiled]) -> None:
    """Marks a failure as seen: whoever asked may have given up."""
    if not compiled.cancelled():
        compiled.exception()


# Trials are made by a process of their own, started at the first grammar.

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
