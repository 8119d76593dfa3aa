"""Grammars from text to matcher: what is accepted, what is refused and how it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from llguidance import LLTokenizer

from services.target.grammars import compiler as module
from services.target.grammars.compiler import GrammarCompiler, GrammarLimits
from services.target.grammars.matcher import CompiledGrammar
from services.target.settings import DEMO_MODEL
from shared.errors import FailedPrecondition, InvalidArgument, OutriderError
from shared.grammar import Grammar, GrammarKind

LIMITS = GrammarLimits(max_bytes=4096, compile_timeout_s=20.0)
EOS = (2, 0)


def _compiler(folder: Path = DEMO_MODEL, limits: GrammarLimits = LIMITS) -> GrammarCompiler:
    return GrammarCompiler(folder, vocab_size=8192, eos_token_ids=EOS, limits=limits)


@pytest_asyncio.fixture
async def compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = _compiler()
    yield compiler
    compiler.close()


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    text = (DEMO_MODEL / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=8192, eos_token=list(EOS))


def matches(grammar: CompiledGrammar, text: str, tokenizer: LLTokenizer) -> bool:
    """Returns whether the whole text is a match."""
    matcher = grammar.start.deep_copy()
    token_ids = tokenizer.tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
CHOICES = ("yes", "no", 'say "yes"', "naïve\n\\", "a|b")
CASES = {
    "schema": (Grammar.of(GrammarKind.JSON_SCHEMA, SCHEMA), ['{"n": 1}'], ['{"m": 1}', "1"]),
    "any object": (Grammar.of(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), ["{}"], ["[]"]),
    "any value": (Grammar.of(GrammarKind.JSON_SCHEMA, "true"), ["{}", "[1]", "null"], ["nil"]),
    "regex": (Grammar.of(GrammarKind.REGEX, r"\d{2}|x+"), ["12", "xxx"], ["1", "x1", " 12"]),
    "gbnf": (Grammar.of(GrammarKind.EBNF, 'root ::= "a" [0-9]+ | "b"'), ["a12", "b"], ["a", "ab"]),
    "lark": (Grammar.of(GrammarKind.EBNF, 'start: "a" /[0-9]+/ | "b"'), ["a12", "b"], ["a", "ab"]),
    "choices": (Grammar(GrammarKind.CHOICES, CHOICES), list(CHOICES), ["maybe", "a", "yesno"]),
}


@pytest.mark.parametrize("name", CASES)
async def test_grammar_matches_what_it_says(
    compiler: GrammarCompiler, tokenizer: LLTokenizer, name: str
) -> None:
    grammar, words, others = CASES[name]
    compiled = await compiler.compile(grammar)
    assert all(matches(compiled, word, tokenizer) for word in words)
    assert not any(matches(compiled, word, tokenizer) for word in others)


async def test_white_space_in_json_is_free_but_bounded(
    compiler: GrammarCompiler, tokenizer: LLTokenizer
) -> None:
    compiled = await compiler.compile(Grammar.of(GrammarKind.JSON_SCHEMA, SCHEMA))
    assert matches(compiled, '{\n  "n" : 1\n}', tokenizer)
    assert not matches(compiled, '{"n":' + " " * 17 + "1}", tokenizer)


REFUSALS = {
    "not JSON": (GrammarKind.JSON_SCHEMA, "{", "the JSON schema is wrong: it is not JSON"),
    "no object": (GrammarKind.JSON_SCHEMA, "[1]", "it is not a JSON object"),
    "no such type": (GrammarKind.JSON_SCHEMA, '{"type": "foo"}', "Invalid type: foo"),
    "unsupported": (GrammarKind.JSON_SCHEMA, '{"not": {"type": "null"}}', '"not"'),
    "deep": (GrammarKind.JSON_SCHEMA, "[" * 4000, "not JSON"),
    "open group": (GrammarKind.REGEX, "(ab", "unclosed group"),
    "no rule": (GrammarKind.EBNF, "root ::= a", "a"),
    "no text": (GrammarKind.EBNF, "", "root"),
    "impossible": (GrammarKind.JSON_SCHEMA, '{"enum": []}', "empty"),
    "tag": (GrammarKind.STRUCTURAL_TAG, "{}", "it needs `format`, or `structures`"),
    "tag format": (
        GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "xml"}}', "'xml' is not implemented",
    ),
    "tag field": (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "tag"}}', "KeyError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
async def test_wrong_grammar_is_refused_with_its_reason(
    compiler: GrammarCompiler, name: str
) -> None:
    kind, text, reason = REFUSALS[name]
    with pytest.raises(InvalidArgument) as refusal:
        await compiler.compile(Grammar.of(kind, text))
    error = refusal.value
    assert error.reason == "GRAMMAR_INVALID"
    assert error.message.startswith(f"the {kind.value} is wrong: ")
    assert reason in error.message
    assert len(error.message) < 700
    assert error.violations[0].field == "grammar"


async def test_empty_choices_are_refused(compiler: GrammarCompiler) -> None:
    for source in ((), ("a", "")):
        with pytest.raises(InvalidArgument, match="none may be empty"):
            await compiler.compile(Grammar(GrammarKind.CHOICES, source))


async def test_size_is_bounded_by_name(compiler: GrammarCompiler) -> None:
    with pytest.raises(InvalidArgument, match="has 4,097 bytes; at most 4,096") as refusal:
        await compiler.compile(Grammar.of(GrammarKind.REGEX, "a" * 4097))
    assert refusal.value.reason == "GRAMMAR_TOO_COMPLEX"


# Seconds, and hundreds of MB, within all of llguidance's own bounds.
HOSTILE = Grammar.of(GrammarKind.REGEX, "a{0,9}" * 10_000)
HARMLESS = Grammar.of(GrammarKind.REGEX, "ab")


async def _in_time(compiler: GrammarCompiler, grammar: Grammar) -> None:
    """Compiles a grammar; on a busy machine it may take longer than a short limit a few times."""
    for _ in range(20):
        with contextlib.suppress(InvalidArgument):
            assert await compiler.compile(grammar)
            return
    pytest.fail("it never compiled in time")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compile_timeout_s": 0.5}, r"takes longer than 0\.5 s"),
        ({"compile_bytes": 32 * 2**20}, "takes more than 32 MiB"),
    ],
)
async def test_time_and_memory_of_compiling_are_bounded(
    change: dict[str, Any], message: str
) -> None:
    compiler = _compiler(limits=replace(LIMITS, max_bytes=65_536, **change))
    hostile = asyncio.create_task(compiler.compile(HOSTILE))
    await _in_time(compiler, HARMLESS)  # meanwhile
    with pytest.raises(InvalidArgument, match=message) as refusal:
        await hostile
    assert refusal.value.reason == "GRAMMAR_TOO_COMPLEX"
    compiler.close()


async def test_nobody_waits_for_the_grammars_of_others_for_ever() -> None:
    compiler = _compiler(limits=replace(LIMITS, max_bytes=65_536, compile_timeout_s=0.5))
    await _in_time(compiler, HARMLESS)
    hostile = [
        asyncio.create_task(compiler.compile(Grammar.of(GrammarKind.REGEX, HOSTILE.text + tail)))
        for tail in "abcdefghij"
    ]
    ended = await asyncio.gather(*hostile, return_exceptions=True)
    reasons = {each.reason for each in ended if isinstance(each, OutriderError)}
    assert reasons == {"GRAMMAR_TOO_COMPLEX", "GRAMMARS_BUSY"}
    await _in_time(compiler, Grammar.of(GrammarKind.REGEX, "abc"))
    compiler.close()


async def test_what_the_cache_keeps_is_bounded_in_bytes() -> None:
    limits = replace(LIMITS, max_bytes=65_536, cached_bytes=30 * 2**20)
    compiler = _compiler(limits=limits)
    for tail in "abc":
        large = Grammar.of(GrammarKind.REGEX, ".*a" * 20_000 + tail)  # some 20 MB
        first = await compiler.compile(large)
        assert 10 * 2**20 < compiler.num_cached_bytes <= limits.cached_bytes
    assert await compiler.compile(large) is first
    compiler.close()


async def test_a_process_of_trials_that_died_is_replaced(compiler: GrammarCompiler) -> None:
    await compiler.compile(HARMLESS)
    for trial in compiler._processes:
        trial._process.kill()
        trial._process.wait()
    for text in ("abc", "abcd"):  # for each of the threads
        assert await compiler.compile(Grammar.of(GrammarKind.REGEX, text))


async def test_long_chains_of_references_do_not_overflow_a_stack() -> None:
    """They would end the process, and every request with it."""
    compiler = _compiler(limits=replace(LIMITS, max_bytes=200_000))
    definitions: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(1500)
    }
    definitions["d1500"] = {"type": "null"}
    schema = json.dumps({"$ref": "#/$defs/d0", "$defs": definitions})
    assert await compiler.compile(Grammar.of(GrammarKind.JSON_SCHEMA, schema))
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(3000))
    lark = f'start: r0\n{rules}\nr3000: "x"'
    assert await compiler.compile(Grammar.of(GrammarKind.EBNF, lark))
    compiler.close()


async def test_equal_grammars_are_compiled_once(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Grammar] = []
    compile_really = module.compiled

    def counted(grammar: Grammar, vocabulary: object) -> CompiledGrammar:
        calls.append(grammar)
        return compile_really(grammar, vocabulary)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "compiled", counted)
    grammar = Grammar.of(GrammarKind.REGEX, "ab+")
    found = await asyncio.gather(*(compiler.compile(grammar) for _ in range(8)))
    assert len(calls) == 1
    assert all(each is found[0] for each in found)
    for _ in range(2):  # a failure is not kept
        with pytest.raises(InvalidArgument):
            await compiler.compile(Grammar.of(GrammarKind.REGEX, "(a"))
    assert len(calls) == 1  # it failed in its trial


async def test_one_who_gives_up_does_not_take_the_grammar_from_others(
    compiler: GrammarCompiler,
) -> None:
    grammar = Grammar.of(GrammarKind.REGEX, "ab+")
    leaving, staying = (asyncio.create_task(compiler.compile(grammar)) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert isinstance(await staying, CompiledGrammar)


async def test_folder_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    compiler = _compiler(tmp_path)
    with pytest.raises(FailedPrecondition, match=r"tokenizer\.json") as refusal:
        await compiler.compile(Grammar.of(GrammarKind.REGEX, "a"))
    assert refusal.value.reason == "GRAMMAR_UNAVAILABLE"
    compiler.close()
