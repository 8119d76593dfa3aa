"""Compiles grammars on threads of its own: neither the event loop nor the engine waits for one.

Each is compiled in a process first that may be killed; only what ends well there, in time and in
little memory, is compiled here.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.target.grammars.matcher import CompiledGrammar, shown_reason
from services.target.grammars.source import SpecialTokens, grammar_source, invalid_grammar
from shared.errors import FailedPrecondition, InvalidArgument, OutriderError
from shared.grammar import Grammar

if TYPE_CHECKING:
    from services.target.grammars.trials import GrammarTrials


# From a grammar's text to a matcher, by llguidance.

STACK_BYTES = 512 * 2**20
"""Of address space, for rules that name each other in a long chain: llguidance bounds how deeply
they are written, not how deeply they refer. What is not used costs no memory."""


def too_complex(message: str) -> InvalidArgument:
    """Returns the refusal of a grammar that is beyond a bound."""
    return InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)


# Below llguidance's own. Some 50,000 units of fuel take a millisecond, a state 2 kB.
_FIRST_MASK_FUEL = 300_000
_MAX_LEXER_STATES = 50_000
_MAX_STEP_ITEMS = 20_000


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that grammars are applied to."""

    tokenizer: LLTokenizer
    special_tokens: SpecialTokens


def read_vocabulary(path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """Reads a `tokenizer.json`; arguments see `GrammarCompiler`.

    Raises:
        OSError, ValueError: it is missing, or no tokenizer that llguidance knows.
    """
    text = path.read_text("utf-8")
    eos = list(eos_token_ids) or None
    return Vocabulary(LLTokenizer(text, n_vocab=vocab_size, eos_token=eos), SpecialTokens.of(text))


def compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    """Raises:
    InvalidArgument: the grammar is wrong.
    """
    try:
        return _compiled_unguarded(grammar, vocabulary)
    except OutriderError:
        raise
    # Foreign code on a stranger's text; a panic of Rust is no `Exception`.
    except BaseException as error:
        raise invalid_grammar(grammar.kind, shown_reason(str(error))) from error


def _compiled_unguarded(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:
    source = grammar_source(grammar, vocabulary.special_tokens)
    limits = LLParserLimits(
        verbose_errors=False,
        initial_lexer_fuel=_FIRST_MASK_FUEL,
        max_lexer_states=_MAX_LEXER_STATES,
        step_max_items=_MAX_STEP_ITEMS,
    )
    matcher = LLMatcher(vocabulary.tokenizer, source, log_level=0, limits=limits)
    if matcher.is_error():
        raise invalid_grammar(grammar.kind, shown_reason(matcher.get_error()))
    first = matcher.deep_copy()
    if not any(first.compute_bitmask()) or first.is_error():
        reason = first.get_error() or "no token of the vocabulary can begin a match"
        raise invalid_grammar(grammar.kind, shown_reason(reason))
    return CompiledGrammar(matcher, vocabulary.tokenizer.vocab_size)


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
        self._trials: GrammarTrials | None = None

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
        if self._trials is not None:
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
        if self._trials is None:
            self._trials = self._new_trials()
        num_bytes = await self._trials.run(grammar)
        found = await loop.run_in_executor(self._threads, _compiled, grammar, vocabulary)
        return _Compiled(found, num_bytes)

    def _new_trials(self) -> GrammarTrials:
        from services.target.grammars.trials import GrammarTrials

        limits = self._limits
        path = self._folder / "tokenizer.json"
        return GrammarTrials(
            *(path, self._vocab_size, self._eos_token_ids),
            *(limits.compile_bytes, limits.compile_timeout_s),
        )

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


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> CompiledGrammar:

    return compiled(grammar, vocabulary)


def _num_bytes(compiled: asyncio.Future[_Compiled]) -> int:
    has_ended_well = compiled.done() and not compiled.cancelled() and not compiled.exception()
    return compiled.result().num_bytes if has_ended_well else 0


def _note_exception(compiled: asyncio.Future[_Compiled]) -> None:
    """Marks a failure as seen: whoever asked may have given up."""
    if not compiled.cancelled():
        compiled.exception()
