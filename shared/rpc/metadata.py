"""Request id and trace context of a call, from its metadata."""

from __future__ import annotations

from collections.abc import Iterable

from shared.telemetry.request_id import (
    REQUEST_ID_KEY,
    TRACEPARENT_KEY,
    accepted_request_id,
    current_request_id,
    current_traceparent,
)

Metadata = Iterable[tuple[str, str | bytes]]


def enter_request(metadata: Metadata) -> str:
    """Makes a call's metadata current for its task; returns the request id."""
    texts = {key: value for key, value in metadata if isinstance(value, str)}
    request_id = accepted_request_id(texts.get(REQUEST_ID_KEY))
    current_request_id.set(request_id)
    current_traceparent.set(texts.get(TRACEPARENT_KEY))
    return request_id
