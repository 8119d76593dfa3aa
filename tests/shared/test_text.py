"""Incremental text equals the text of all tokens at once, for both families of tokenizers, and stop
strings do not depend on how it is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from shared.text import Detokenizer, StopStrings, Tokenizer

WORDS = ["▁the", "▁fox", "x", "▁"]


def byte_level() -> FastTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def sentencepiece() -> FastTokenizer:
    """As Llama 2 and Mistral write it."""
    spellings = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {spelling: number for number, spelling in enumerate(spellings)}
    tokenizer = FastTokenizer(
        models.BPE(
            vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def incremental(tokenizer: Tokenizer, token_ids: list[int], per_step: int) -> str:
    detokenizer = Detokenizer(tokenizer)
    steps = [token_ids[i : i + per_step] for i in range(0, len(token_ids), per_step)]
    return "".join(map(detokenizer.push, steps)) + detokenizer.flush()


@given(st.text(), st.integers(1, 5))
def test_text_survives_byte_level_tokens(text: str, per_step: int) -> None:
    fast = byte_level()
    token_ids = fast.encode(text).ids
    assert incremental(Tokenizer(fast), token_ids, per_step) == text


@given(st.lists(st.integers(0, 256)), st.integers(1, 5))
def test_any_byte_level_tokens_read_as_the_library_reads_them(
    token_ids: list[int], per_step: int
) -> None:
    fast = byte_level()
    expected = fast.decode(token_ids)
    tokenizer = Tokenizer(fast)
    assert incremental(tokenizer, token_ids, per_step) == expected
    assert tokenizer.decode(token_ids) == expected


@given(st.text(), st.integers(1, 5))
def test_text_survives_sentencepiece_tokens(text: str, per_step: int) -> None:
    text = text.replace("▁", "")
    fast = sentencepiece()
    token_ids = fast.encode(text).ids
    assert incremental(Tokenizer(fast), token_ids, per_step) == text == fast.decode(token_ids)


def test_half_a_character_waits_and_a_hopeless_one_does_not() -> None:
    tokenizer = Tokenizer(byte_level())
    first, *rest = byte_level().encode("🦊").ids
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in (first, *rest)] == ["", "", "", "🦊"]
    assert detokenizer.push([first]) == ""
    letter = byte_level().encode("a").ids
    assert detokenizer.push(letter) == "\ufffda"
    assert detokenizer.flush() == ""


def test_a_special_token_between_bytes_does_not_break_the_character() -> None:
    fast = byte_level()
    end = fast.token_to_id("<|end|>")
    (first, second) = fast.encode("é").ids
    assert Detokenizer(Tokenizer(fast)).push([first, end, second]) == "é"


def test_what_one_output_has_shown_is_not_shown_by_another() -> None:
    fast = byte_level()
    tokenizer, end = Tokenizer(fast), fast.token_to_id("<|end|>")
    token_ids = [*fast.encode("a").ids, end]
    shows, skips = Detokenizer(tokenizer, skip_special_tokens=False), Detokenizer(tokenizer)
    for _ in range(2):
        assert (shows.push(token_ids), skips.push(token_ids)) == ("a<|end|>", "a")
    assert skips.push([len(tokenizer.token_bytes)]) == ""  # a row that pads the vocabulary


def test_a_decoder_of_neither_family_is_refused() -> None:
    fast = byte_level()
    fast.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        Tokenizer(fast)


texts = st.text("ab-", max_size=30)
stops = st.lists(st.text("ab-", min_size=1, max_size=4), min_size=1, max_size=3)


def pushed(matcher: StopStrings, pieces: list[str]) -> str:
    sent = ""
    for piece in pieces:
        sent += matcher.push(piece)
        if matcher.matched is not None:
            return sent
    return sent + matcher.flush()


def first_completed(text: str, stop_strings: list[str]) -> str | None:
    """Reads character by character: the plain meaning of a stop string."""
    for end in range(1, len(text) + 1):
        ended = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if ended:
            return max(ended, key=len)
    return None


@given(texts, stops, st.lists(st.integers(0, 30)))
def test_any_cut_gives_the_text_before_the_first_completed_stop(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    borders = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    matcher = StopStrings(stop_strings)
    sent = pushed(matcher, pieces)
    matched = first_completed(text, stop_strings)
    assert matcher.matched == matched
    if matched is None:
        assert sent == text
        return
    end = next(e for e in range(len(text) + 1) if text[:e].endswith(matched))
    assert sent == text[: end - len(matched)]


@given(texts, stops)
def test_kept_stop_strings_end_the_text(text: str, stop_strings: list[str]) -> None:
    without, within = StopStrings(stop_strings), StopStrings(stop_strings, include_in_output=True)
    sent = pushed(without, list(text))
    assert pushed(within, list(text)) == sent + (without.matched or "")


def test_only_a_proper_prefix_is_held_back() -> None:
    matcher = StopStrings(["<end>"])
    assert matcher.push("one <e") == "one "
    assert matcher.push("x <") == "<ex "
    assert matcher.push("a") == "<a"
    assert matcher.flush() == ""


def test_without_stop_strings_nothing_is_held_back() -> None:
    matcher = StopStrings([])
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""
