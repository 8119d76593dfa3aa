"""Notices to a client, for which no interface has a field: the header `x-outrider-notice` and a log
line."""

from __future__ import annotations

import logging
from contextvars import ContextVar

NOTICE_HEADER = "x-outrider-notice"
_MAX_CHARACTERS = 1024
_log = logging.getLogger(__name__)
current_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)
"""Where the notices of the request that is served go to."""


def give_notice(text: str) -> None:
    """Tells the client, if its headers are not out yet."""
    _log.warning("%s", text[:_MAX_CHARACTERS])
    notices = current_notices.get()
    if notices is not None:
        notices.append(text)


def header_value(notices: list[str]) -> str:
    """Returns the notices as one header, in ASCII and of bounded length."""
    text = "; ".join(notices)[:_MAX_CHARACTERS]
    return "".join(c if " " <= c <= "~" else "?" for c in text)
