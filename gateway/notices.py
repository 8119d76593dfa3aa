"""Notices to a client, for which no interface has a field: the header `x-outrider-notice` and a log
line."""

from __future__ import annotations

import logging
from contextvars import ContextVar

NOTICE_HEADER = "x-outrider-notice"
_MAX_CHARACTERS = 1024
_log = logging.getLogger(__name__)
_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)


def collect_notices() -> list[str]:
    """Returns the list that notices of this request go to from now on."""
    notices: list[str] = []
    _notices.set(notices)
    return notices


def give_notice(text: str) -> None:
    """Tells the client, if its headers are not out yet."""
    _log.warning("%s", text[:_MAX_CHARACTERS])
    notices = _notices.get()
    if notices is not None:
        notices.append(text)


def header_value(notices: list[str]) -> str:
    """Returns the notices as one header, in ASCII and of bounded length."""
    text = "; ".join(notices)[:_MAX_CHARACTERS]
    return "".join(c if " " <= c <= "~" else "?" for c in text)
