"""From a grammar's text to a matcher, by llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.target.grammars.matcher import CompiledGrammar, shown_reason
from services.target.grammars.source import grammar_source, invalid_grammar
from services.target.grammars.structural_tag import SpecialTokens
from shared.errors import InvalidArgument, OutriderError
from shared.grammar import Grammar

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
