"""Grammars over the small vocabulary of the tests' engines, and a slow oracle of their tokens."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from services.target.grammars.matcher import (
    CompiledGrammar,
    GrammarMatcher,
    MaskedTree,
    MaskExecutor,
    Masks,
)
from services.target.grammars.source import SpecialTokens, grammar_source
from shared.grammar import Grammar, GrammarKind
from shared.tokens import TokenTree

EOS = 0
SPELLINGS = (
    *("", "a", "b", "c", "d", "ab", "bc", "cd", "abc", "{", "}", '"'),
    *("0", "1", "2", "01", "12", ":", ",", "x", "y", "xy", "xx", " "),
)


class _SmallTokenizer:
    eos_token_id = EOS
    bos_token_id = None
    tokens = tuple(text.encode() for text in ("<eos>", *SPELLINGS[1:]))
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenizes by longest match; skips characters that no token spells."""
        token_ids: list[int] = []
        while text:
            fits = [i for i, token in enumerate(self.tokens) if i and text.startswith(token)]
            longest = max(fits, key=lambda i: len(self.tokens[i]), default=EOS)
            token_ids += [longest] if fits else []
            text = text[max(len(self.tokens[longest]) if fits else 1, 1) :]
        return token_ids


@functools.cache
def small_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_SmallTokenizer()))


def compiled(kind: GrammarKind, text: str, limits: LLParserLimits | None = None) -> CompiledGrammar:
    """Returns a grammar over `SPELLINGS`."""
    source = grammar_source(Grammar.of(kind, text), SpecialTokens({}))
    matcher = LLMatcher(small_tokenizer(), source, log_level=0, limits=limits)
    assert not matcher.is_error(), matcher.get_error()
    return CompiledGrammar(matcher, small_tokenizer().vocab_size)


def tree_tokens(matcher: GrammarMatcher, tree: TokenTree) -> list[set[int] | None]:
    """Returns the tokens that may follow the root and each node; None if no token may follow."""
    masks = np.full((1 + len(tree), matcher.num_words), -1, np.int32)
    MaskExecutor().fill([MaskedTree(matcher, tree, 0)], masks)
    return row_tokens(masks)


def row_tokens(masks: Masks) -> list[set[int] | None]:
    """Returns the tokens of each row of masks; None for none."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) or None for row in bits]


def regex(text: str) -> CompiledGrammar:
    return compiled(GrammarKind.REGEX, text)


def spelled(token_ids: Sequence[int]) -> str:
    """Returns the text of an output; an end token has none."""
    return "".join(SPELLINGS[token_id] for token_id in token_ids)


def is_forced(language: Collection[str], token_ids: Sequence[int]) -> bool:
    """Returns whether all words continue with the same character and none ends here.

    In this case llguidance allows only the tokens that its tokenizer makes of the forced text.
    """
    text = spelled(token_ids)
    rests = {word[len(text) :] for word in language if word.startswith(text)}
    return "" not in rests and len({rest[0] for rest in rests}) == 1


def allowed(language: Collection[str], token_ids: Sequence[int]) -> set[int]:
    """Returns the tokens that may follow, by trying all words of a finite language.

    After a word that no other word extends only the end token may follow.
    """
    if EOS in token_ids:
        return set()
    text = spelled(token_ids)
    tokens = {
        token_id
        for token_id, spelling in enumerate(SPELLINGS)
        if spelling and any(word.startswith(text + spelling) for word in language)
    }
    return tokens | ({EOS} if text in language else set())
