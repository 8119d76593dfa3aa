"""Stop strings end an output at the token that completes one, however steps cut the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.target.vllm.open_choices import TextStop
from shared.text import Tokenizer
from tests.helpers.checkpoints import EOS_TOKEN_ID, write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.read(write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def _stop(tokenizer: Tokenizer, *strings: str, num_ignored: int = 0) -> TextStop:
    return TextStop(
        tokenizer,
        strings,
        skip_special_tokens=False,
        silent_token_ids={EOS_TOKEN_ID},
        num_ignored=num_ignored,
    )


def _taken(stop: TextStop, token_ids: Sequence[int], cuts: Sequence[int]) -> int:
    """Returns how many tokens are taken when they come in pieces."""
    bounds = sorted({0, *(cut for cut in cuts if cut < len(token_ids)), len(token_ids)})
    num_taken = 0
    for start, end in pairwise(bounds):
        num_taken += stop.take(token_ids[start:end])
        if stop.matched is not None:
            break
    return num_taken


@given(st.text("abé", max_size=20), st.lists(st.integers(1, 30), max_size=4))
def test_the_end_does_not_depend_on_the_cuts(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    stop = _stop(tokenizer, "ab", "éa")
    num_taken = _taken(stop, list(text.encode()), cuts)
    ends = [text.find(string) + len(string) for string in ("ab", "éa") if string in text]
    expected = text[: min(ends)] if ends else text
    assert text.encode()[:num_taken] == expected.encode()
    assert (stop.matched is not None) == bool(ends)


def test_text_of_the_first_tokens_is_not_looked_at(tokenizer: Tokenizer) -> None:
    stop = _stop(tokenizer, "ab", num_ignored=3)
    assert stop.take(list(b"abab")) == 4
    assert stop.matched is None
    assert stop.take(list(b"ab")) == 2
    assert stop.matched == "ab"


def test_a_token_that_ends_generation_spells_nothing(tokenizer: Tokenizer) -> None:
    stop = _stop(tokenizer, "</s>")
    assert stop.take([97, EOS_TOKEN_ID]) == 2
    assert stop.matched is None
