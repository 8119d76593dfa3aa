"""`/v1/conversations`: items that responses continue and add to."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Any

from fastapi import FastAPI, Query
from starlette.responses import Response

from gateway.quota import owner_of_request
from gateway.responses.item_list import Order, item_list
from gateway.responses.schema import ConversationItems, ConversationRequest
from gateway.responses.store import CONVERSATION, ResponseStore
from gateway.responses.stored_items import stored_items
from shared.errors import FailedPrecondition, NotFound

_PATH = "/v1/conversations/{conversation_id}"


def add_conversation_routes(app: FastAPI, store: ResponseStore | None) -> None:
    """Adds the routes; without a store they refuse."""
    if store is None:
        add_refusals(app, "/v1/conversations", "POST", "conversations")
        return

    @app.post("/v1/conversations", tags=["openai"])
    async def create(body: ConversationRequest) -> dict[str, Any]:
        conversation = {
            "id": f"conv_{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await store.put_entry(owner_of_request(), conversation, stored_items(body.items))
        return conversation

    @app.get(_PATH, tags=["openai"])
    async def retrieve(conversation_id: str) -> dict[str, Any]:
        return await store.entry(owner_of_request(), conversation_id, CONVERSATION)

    @app.post(_PATH, tags=["openai"])
    async def update(conversation_id: str, body: ConversationRequest) -> dict[str, Any]:
        owner = owner_of_request()
        conversation = await store.entry(owner, conversation_id, CONVERSATION)
        conversation["metadata"] = body.metadata or {}
        await store.update_entry(owner, conversation, CONVERSATION)
        return conversation

    @app.delete(_PATH, tags=["openai"])
    async def delete(conversation_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.entry(owner, conversation_id, CONVERSATION)
        await store.delete(owner, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    _add_item_routes(app, store)


def _add_item_routes(app: FastAPI, store: ResponseStore) -> None:
    @app.get(f"{_PATH}/items", tags=["openai"])
    async def items(
        conversation_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> dict[str, Any]:
        found = await store.entry_items(owner_of_request(), conversation_id, CONVERSATION)
        return item_list(found, after, limit, order)

    @app.post(f"{_PATH}/items", tags=["openai"])
    async def add_items(conversation_id: str, body: ConversationItems) -> dict[str, Any]:
        added = stored_items(body.items)
        await store.append(owner_of_request(), conversation_id, added)
        return item_list(added, None, max(len(added), 1), "asc")

    @app.get(f"{_PATH}/items/{{item_id}}", tags=["openai"])
    async def item(conversation_id: str, item_id: str) -> dict[str, Any]:
        for found in await store.entry_items(owner_of_request(), conversation_id, CONVERSATION):
            if found["id"] == item_id:
                return found
        message = f"conversation {conversation_id[:128]!r} has no item {item_id[:128]!r}"
        raise NotFound(message, reason="RESPONSE_NOT_STORED")

    @app.delete(f"{_PATH}/items/{{item_id}}", tags=["openai"])
    async def delete_item(conversation_id: str, item_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.delete_item(owner, conversation_id, item_id)
        return await store.entry(owner, conversation_id, CONVERSATION)


def add_refusals(app: FastAPI, root: str, method: str, what: str) -> None:
    """Adds the routes of what would be kept, where nothing is: a method of the root and all below
    it."""

    @app.api_route(root, methods=[method], tags=["openai"])
    @app.get(f"{root}/{{path:path}}", tags=["openai"])
    @app.delete(f"{root}/{{path:path}}", tags=["openai"])
    @app.post(f"{root}/{{path:path}}", tags=["openai"])
    async def refuse(path: str = "") -> Response:
        message = f"{what} ({path[:128]!r}) need --response-store"
        raise FailedPrecondition(message, reason="STORE_OFF")
