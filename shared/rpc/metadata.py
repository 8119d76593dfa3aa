"""Request id and trace context as call metadata, inwards and onwards."""

from __future__ import annotations

from collections.abc import Iterable

from shared.telemetry.request_id import (
    NO_REQUEST,
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


def onward_metadata() -> tuple[tuple[str, str], ...]:
    """Returns the metadata for a call made on behalf of the current request."""
    request_id, traceparent = current_request_id.get(), current_traceparent.get()
    pairs: list[tuple[str, str]] = []
    if request_id != NO_REQUEST:
        pairs.append((REQUEST_ID_KEY, request_id))
    if traceparent is not None:
        pairs.append((TRACEPARENT_KEY, traceparent))
    return tuple(pairs)
