"""The page of flags says what the services accept."""

from __future__ import annotations

from tests.helpers.flags_page import PAGE, page


def test_flags_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run `python -m tests.helpers.flags_page`"
