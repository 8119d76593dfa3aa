"""Stop strings do not depend on how the text is cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from shared.text.stop_strings import StopStrings

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
