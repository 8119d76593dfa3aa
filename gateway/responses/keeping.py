"""Stores a response that has ended."""

from __future__ import annotations

from gateway.responses.chat import ResponsePlan
from gateway.responses.store import ResponseStore, StoredResponse


def keep(store: ResponseStore, owner: str, asked: ResponsePlan, stored: StoredResponse) -> None:
    """Keeps a response that has ended, as far as it was asked for."""
    if asked.history.is_kept:
        store.put_soon(owner, stored)
    conversation_id = asked.body.conversation_id
    if conversation_id is not None and stored.body["status"] in ("completed", "incomplete"):
        store.append_soon(owner, conversation_id, [*stored.input, *stored.body["output"]])
