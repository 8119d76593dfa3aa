"""Context of the request being served: its id and its trace."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"
NO_REQUEST = "-"
MAX_REQUEST_ID_LENGTH = 128

current_request_id: ContextVar[str] = ContextVar("request_id", default=NO_REQUEST)
"""Set by the server interceptor for the time of a call."""

current_traceparent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""W3C trace context of the call, as it came."""


def new_request_id() -> str:
    """Returns a fresh id."""
    return uuid.uuid4().hex


def accepted_request_id(proposed: str | None) -> str:
    """Returns the caller's id, or a fresh one where it has none that is fit for a log line."""
    if proposed and len(proposed) <= MAX_REQUEST_ID_LENGTH and proposed.isprintable():
        return proposed
    return new_request_id()
