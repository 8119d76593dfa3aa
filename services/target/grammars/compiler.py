"""Compiles grammars on threads of its own: neither the event loop nor the engine waits for one."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from services.target.grammars.matcher import CompiledGrammar
from shared.errors import FailedPrecondition, InvalidArgument
from shared.grammar import Grammar

if TYPE_CHECKING:
    # A target decodes where llguidance is not installed; it refuses grammars there.
    from services.target.grammars.compilation import Vocabulary

_NUM_THREADS = 2
_NUM_CACHED = 256
_STACK_BYTES = 512 * 2**20  # of address space; what is not used costs no memory


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """Bounds of one grammar.

    Attributes:
        max_bytes: of its text.
        compile_timeout_s: from the request to the compiled grammar.
    """

    max_bytes: int
    compile_timeout_s: float


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
        self._compiled: OrderedDict[Grammar, asyncio.Future[CompiledGrammar]] = OrderedDict()

    async def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises:
        InvalidArgument: the grammar is wrong, too large or too slow to compile.
        FailedPrecondition: the target has no tokenizer that grammars could be applied to.
        """
        limits = self._limits
        if grammar.size_bytes > limits.max_bytes:
            raise _too_complex(
                f"the {grammar.kind.value} has {grammar.size_bytes:,} bytes; "
                f"at most {limits.max_bytes:,} are accepted"
            )
        try:
            return await asyncio.wait_for(self._shared(grammar), limits.compile_timeout_s)
        except TimeoutError as error:
            raise _too_complex(
                f"the {grammar.kind.value} takes longer than {limits.compile_timeout_s:g} s to "
                "compile"
            ) from error

    def close(self) -> None:
        """Lets the threads end; grammars still waiting are dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _shared(self, grammar: Grammar) -> asyncio.Future[CompiledGrammar]:
        """Returns the one compilation of a grammar, which outlives whoever waits for it."""
        compiled = self._compiled.get(grammar)
        if compiled is None or (compiled.done() and compiled.exception() is not None):
            compiled = asyncio.ensure_future(self._compile(grammar))
            compiled.add_done_callback(_note_exception)
            self._compiled[grammar] = compiled
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > _NUM_CACHED:
            self._compiled.popitem(last=False)
        return asyncio.shield(compiled)

    async def _compile(self, grammar: Grammar) -> CompiledGrammar:
        loop = asyncio.get_running_loop()
        if self._vocabulary is None:
            self._vocabulary = loop.run_in_executor(self._threads, self._read_vocabulary)
        vocabulary = await asyncio.shield(self._vocabulary)
        return await loop.run_in_executor(self._threads, _compiled, grammar, vocabulary)

    def _read_vocabulary(self) -> Vocabulary:
        try:
            from services.target.grammars.compilation import read_vocabulary

            path = self._folder / "tokenizer.json"
            return read_vocabulary(path, self._vocab_size, self._eos_token_ids)
        except (ImportError, OSError, ValueError) as error:
            message = f"this target cannot constrain output: {error}"
            raise FailedPrecondition(message, reason="GRAMMAR_UNAVAILABLE") from error


def _deep_threads() -> ThreadPoolExecutor:
    """Returns threads that rules which name each other in a long chain cannot overflow: llguidance
    bounds how deeply they are written, not how deeply they refer."""
    threads = ThreadPoolExecutor(_NUM_THREADS, "grammar")
    # Each waits for the others, so that all of them start, and start now.
    together = threading.Barrier(_NUM_THREADS)
    usual = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_NUM_THREADS):
            threads.submit(together.wait)
    except RuntimeError:  # the host has no room for one; the others must not wait for it for ever
        together.abort()
        raise
    finally:
        threading.stack_size(usual)
    return threads


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    from services.target.grammars.compilation import compiled

    return compiled(grammar, vocabulary)


def _too_complex(message: str) -> InvalidArgument:
    return InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


def _note_exception(compiled: asyncio.Future[CompiledGrammar]) -> None:
    """Marks a failure as seen: whoever asked may have given up."""
    if not compiled.cancelled():
        compiled.exception()
