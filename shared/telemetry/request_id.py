"""The id of the request being served, for logs, errors and onward calls."""

from __future__ import annotations

import uuid
from contextvars import ContextVar

REQUEST_ID_KEY = "x-request-id"
TRACEPARENT_KEY = "traceparent"

current_request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""Set by the server interceptor for the time of a call."""


def new_request_id() -> str:
    """Returns a fresh id."""
    return uuid.uuid4().hex
