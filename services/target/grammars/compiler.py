"""Compiles grammars on threads of their own: neither the event loop nor the engine waits for one.

Each grammar is first compiled in a trial process, which may be killed. Only a grammar that compiles
there, in time and within the memory limit, is compiled in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from services.target.grammars import trial
from services.target.grammars.matcher import CompiledGrammar
from services.target.grammars.source import (
    STACK_BYTES,
    Vocabulary,
    compiled,
    read_vocabulary,
    too_complex,
)
from services.target.grammars.trial import TrialResult
from shared.errors import EngineFailed, FailedPrecondition, InvalidArgument, QueueFull
from shared.grammar import Grammar

logger = logging.getLogger(__name__)

_NUM_THREADS = 2
_NUM_CACHED = 256


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one grammar.

    Attributes:
        max_bytes: longest text.
        compile_timeout_s: longest time to compile it, and longest wait for its turn.
        compile_bytes: most memory for compiling it.
        cached_bytes: most memory of all compiled grammars that are kept for later requests.
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
        folder: tokenizer folder, read at the first grammar: a large one takes a second.
        vocab_size: size of the model's output, which may exceed the tokenizer's number of tokens.
        eos_token_ids: tokens that may end a matching output; the tokenizer's when empty.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        eos_token_ids: Collection[int],
        limits: GrammarLimits,
    ) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._limits = limits
        self._threads = _large_stack_threads()
        self._turns = asyncio.Semaphore(_NUM_THREADS)
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, asyncio.Future[_Compiled]] = OrderedDict()
        # Each thread has a trial process, from its first grammar on.
        self._per_thread = threading.local()
        self._processes: list[_TrialProcess] = []

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Returns the compiled grammar, from the cache if it is there.

        Raises:
            InvalidArgument: the grammar is wrong, too large or too slow to compile.
            QueueFull: the grammar waited for others for as long as it may.
            FailedPrecondition: the target has no tokenizer that grammars can be applied to.
        """
        limits = self._limits
        if grammar.size_bytes > limits.max_bytes:
            raise too_complex(
                f"the {grammar.kind.value} has {grammar.size_bytes:,} bytes; "
                f"at most {limits.max_bytes:,} are accepted"
            )
        future = self._compiled.get(grammar)
        if future is None or (future.done() and future.exception() is not None):
            # The compilation goes on even if the request that waits for it is cancelled.
            future = self._compiled[grammar] = asyncio.ensure_future(self._compile_in_turn(grammar))
            future.add_done_callback(_note_exception)
        self._compiled.move_to_end(grammar)
        compiled_grammar = (await asyncio.shield(future)).grammar
        while len(self._compiled) > _NUM_CACHED or self.num_cached_bytes > limits.cached_bytes:
            self._compiled.popitem(last=False)
        return compiled_grammar

    @property
    def num_cached_bytes(self) -> int:
        """Bytes of the compiled grammars that are kept for later requests."""
        return sum(_num_bytes(future) for future in self._compiled.values())

    def close(self) -> None:
        """Lets the threads end; waiting grammars are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in tuple(self._processes):
            process.close()

    async def _compile_in_turn(self, grammar: Grammar) -> _Compiled:
        timeout_s = self._limits.compile_timeout_s
        try:
            await asyncio.wait_for(self._turns.acquire(), timeout_s)
        except TimeoutError as error:
            message = f"grammars of other requests took the {timeout_s:g} s of this one"
            raise QueueFull(message, reason="GRAMMARS_BUSY", retry_after_s=1.0) from error
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, self._compile_after_trial, grammar)
        finally:
            self._turns.release()

    def _compile_after_trial(self, grammar: Grammar) -> _Compiled:
        """Compiles a grammar if its trial succeeds. Runs on one of the threads."""
        vocabulary = self._read_vocabulary()
        process: _TrialProcess | None = getattr(self._per_thread, "process", None)
        if process is None or not process.is_alive:
            if process is not None:
                self._processes.remove(process)
                process.close()
            process = self._per_thread.process = _TrialProcess(
                self._path, self._vocab_size, self._eos_token_ids, self._limits
            )
            self._processes.append(process)
        num_bytes = process.run(grammar)
        return _Compiled(compiled(grammar, vocabulary), num_bytes)

    def _read_vocabulary(self) -> Vocabulary:
        try:
            with self._vocabulary_lock:
                if self._vocabulary is None:
                    self._vocabulary = read_vocabulary(
                        self._path, self._vocab_size, self._eos_token_ids
                    )
                return self._vocabulary
        except (ImportError, OSError, ValueError) as error:
            message = f"this target cannot constrain output: {error}"
            raise FailedPrecondition(message, reason="GRAMMAR_UNAVAILABLE") from error


def _large_stack_threads() -> ThreadPoolExecutor:
    """Returns threads whose stacks are large enough for long chains of rules; see `STACK_BYTES`."""
    threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
    # Each thread waits for the others, so that all of them start, and start now.
    barrier = threading.Barrier(_NUM_THREADS)
    default_bytes = threading.stack_size(STACK_BYTES)
    try:
        for _ in range(_NUM_THREADS):
            threads.submit(barrier.wait)
    except RuntimeError:  # the host has no room for a thread; the others must not wait for ever
        barrier.abort()
        raise
    finally:
        threading.stack_size(default_bytes)
    return threads


def _num_bytes(future: asyncio.Future[_Compiled]) -> int:
    has_succeeded = future.done() and not future.cancelled() and not future.exception()
    return future.result().num_bytes if has_succeeded else 0


def _note_exception(future: asyncio.Future[_Compiled]) -> None:
    """Marks an exception as retrieved: every request that waited for it may have given up."""
    if not future.cancelled():
        future.exception()


class _TrialProcess:
    """Runs `services.target.grammars.trial`; for the arguments see `GrammarCompiler`."""

    def __init__(
        self, path: Path, vocab_size: int, eos_token_ids: list[int], limits: GrammarLimits
    ) -> None:
        self._limits = limits
        arguments = (path, vocab_size, json.dumps(eos_token_ids))
        bounds = (limits.compile_bytes, limits.compile_timeout_s)
        self._process = subprocess.Popen(
            (sys.executable, "-m", trial.__name__, *map(str, (*arguments, *bounds))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[3],
            text=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, grammar: Grammar) -> int:
        """Tries a grammar; returns the memory of the compiled grammar in bytes.

        Raises:
            InvalidArgument: the grammar is wrong, or takes too long or too much memory.
            EngineFailed: the process ended, or the compiler failed.
        """
        process, kind, limits = self._process, grammar.kind.value, self._limits
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # it ended: the answer is empty then
            process.stdin.write(json.dumps([kind, grammar.source]) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            message = "the process that tries grammars ended"
            raise EngineFailed(message, reason="ENGINE_FAILED")
        answer: TrialResult = json.loads(line)
        if answer["outcome"] == "failed":
            logger.error("a %s could not be compiled: %s", kind, answer["message"])
            raise EngineFailed.of()
        if answer["outcome"] == "wrong":
            raise InvalidArgument.of(answer["reason"], "grammar", answer["message"])
        if answer["outcome"] == "slow":
            limit = f"longer than {limits.compile_timeout_s:g} s"
            raise too_complex(f"the {kind} takes {limit} to compile")
        if answer["outcome"] == "large":
            limit = f"more than {limits.compile_bytes / 2**20:,.0f} MiB"
            raise too_complex(f"the {kind} takes {limit} to compile")
        return answer["num_bytes"]

    def close(self) -> None:
        """Ends the process; a trial that runs fails."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError), self._process:
            pass  # closes the pipes
