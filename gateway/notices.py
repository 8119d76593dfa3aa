"""Notices to a client in the header `x-outrider-notice`; no interface has a field for them."""

from __future__ import annotations

import logging
from contextvars import ContextVar

NOTICE_HEADER = "x-outrider-notice"
_MAX_CHARACTERS = 1024
_log = logging.getLogger(__name__)
current_notices: ContextVar[list[str] | None] = ContextVar("notices", default=None)
"""Notices of the request that is being served."""


def give_notice(text: str) -> None:
    """Logs a notice, and sends it to the client if the headers are not sent yet."""
    _log.warning("%s", text[:_MAX_CHARACTERS])
    notices = current_notices.get()
    if notices is not None:
        notices.append(text)


def header_value(notices: list[str]) -> str:
    """Returns the notices as one header, in ASCII and of bounded length."""
    text = "; ".join(notices)[:_MAX_CHARACTERS]
    return "".join(c if " " <= c <= "~" else "?" for c in text)
