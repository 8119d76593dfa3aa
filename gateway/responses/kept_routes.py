"""Routes of what is kept beside responses: `/v1/conversations` and stored chats."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response

from gateway.api_keys import owner_of_request
from gateway.bodies import chat_completion
from gateway.choice import Choice, FinalChoice
from gateway.event_stream import OnEnd
from gateway.notices import give_notice
from gateway.planner import Plan
from gateway.responses.schema import ConversationItems, ConversationRequest, NewMetadata
from gateway.responses.store import (
    CHAT,
    CONVERSATION,
    ChatFilter,
    Item,
    Order,
    ResponseStore,
    item_list,
    listed,
    stored_items,
    unawaited,
)
from gateway.schema import ChatCompletionRequest, ChatMessage
from shared.errors import FailedPrecondition, NotFound
from shared.text import Tokenizer

_CHATS, _CONVERSATIONS = "/v1/chat/completions", "/v1/conversations"
_METADATA = re.compile(r"metadata\[(.+)\]")
Limit = Annotated[int, Query(ge=1, le=100)]


def add_kept_routes(app: FastAPI, store: ResponseStore | None) -> None:
    """Adds the routes; without a store they refuse."""
    if store is None:
        _add_refusals(app, _CHATS, "GET", "stored chats")
        _add_refusals(app, _CONVERSATIONS, "POST", "conversations")
        return
    _add_chat_lists(app, store)
    _add_conversations(app, store)
    _add_entries(app, store, _CHATS, CHAT, "chat.completion.deleted")
    _add_entries(app, store, _CONVERSATIONS, CONVERSATION, "conversation.deleted")


def _add_refusals(app: FastAPI, root: str, method: str, what: str) -> None:
    """Adds a method of the root, and all below it."""

    @app.api_route(root, methods=[method], tags=["openai"])
    @app.get(f"{root}/{{path:path}}", tags=["openai"])
    @app.delete(f"{root}/{{path:path}}", tags=["openai"])
    @app.post(f"{root}/{{path:path}}", tags=["openai"])
    async def refuse(path: str = "") -> Response:
        message = f"{what} ({path[:128]!r}) need --response-store"
        raise FailedPrecondition(message, reason="STORE_OFF")


def _add_entries(app: FastAPI, store: ResponseStore, root: str, kind: str, deleted: str) -> None:
    """Adds what can be done with an entry of either kind."""
    path = f"{root}/{{entry_id}}"

    @app.get(path, tags=["openai"])
    async def retrieve(entry_id: str) -> dict[str, Any]:
        return await store.entry(owner_of_request(), entry_id, kind)

    @app.post(path, tags=["openai"])
    async def update(entry_id: str, body: NewMetadata) -> dict[str, Any]:
        return await store.set_metadata(owner_of_request(), entry_id, kind, body.metadata or {})

    @app.delete(path, tags=["openai"])
    async def delete(entry_id: str) -> dict[str, Any]:
        await store.delete(owner_of_request(), entry_id, kind)
        return {"id": entry_id, "object": deleted, "deleted": True}


def _add_conversations(app: FastAPI, store: ResponseStore) -> None:
    items_path = f"{_CONVERSATIONS}/{{conversation_id}}/items"

    @app.post(_CONVERSATIONS, tags=["openai"])
    async def create(body: ConversationRequest) -> dict[str, Any]:
        conversation = {
            "id": f"{CONVERSATION}{uuid.uuid4().hex}",
            "object": "conversation",
            "created_at": int(time.time()),
            "metadata": body.metadata or {},
        }
        await store.put_entry(owner_of_request(), conversation, stored_items(body.items))
        return conversation

    @app.get(items_path, tags=["openai"])
    async def items(
        conversation_id: str, after: str | None = None, limit: Limit = 20, order: Order = "desc"
    ) -> dict[str, Any]:
        found = await store.entry_items(owner_of_request(), conversation_id, CONVERSATION)
        return item_list(found, after, limit, order)

    @app.post(items_path, tags=["openai"])
    async def add_items(conversation_id: str, body: ConversationItems) -> dict[str, Any]:
        added = stored_items(body.items)
        await store.append(owner_of_request(), conversation_id, added)
        return item_list(added, None, max(len(added), 1), "asc")

    @app.get(f"{items_path}/{{item_id}}", tags=["openai"])
    async def item(conversation_id: str, item_id: str) -> dict[str, Any]:
        for found in await store.entry_items(owner_of_request(), conversation_id, CONVERSATION):
            if found["id"] == item_id:
                return found
        message = f"conversation {conversation_id[:128]!r} has no item {item_id[:128]!r}"
        raise NotFound(message, reason="RESPONSE_NOT_STORED")

    @app.delete(f"{items_path}/{{item_id}}", tags=["openai"])
    async def delete_item(conversation_id: str, item_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.delete_item(owner, conversation_id, item_id)
        return await store.entry(owner, conversation_id, CONVERSATION)


def _add_chat_lists(app: FastAPI, store: ResponseStore) -> None:
    @app.get(_CHATS, tags=["openai"])
    async def chats(
        request: Request,
        after: str | None = None,
        limit: Limit = 20,
        order: Order = "asc",
        model: str | None = None,
    ) -> dict[str, Any]:
        metadata = {
            found[1]: value
            for name, value in request.query_params.items()
            if (found := _METADATA.fullmatch(name))
        }
        asked = ChatFilter(after, limit, order, model, metadata)
        return listed(await store.chats(owner_of_request(), asked), limit)

    @app.get(f"{_CHATS}/{{completion_id}}/messages", tags=["openai"])
    async def messages(
        completion_id: str, after: str | None = None, limit: Limit = 20, order: Order = "asc"
    ) -> dict[str, Any]:
        found = await store.entry_items(owner_of_request(), completion_id, CHAT)
        return item_list(found, after, limit, order)


def kept_chat(
    store: ResponseStore | None, body: ChatCompletionRequest, plan: Plan, tokenizer: Tokenizer
) -> tuple[Plan, OnEnd | None]:
    """Returns a plan whose output is kept, and what keeps it at its end; the same plan, and None,
    without a store."""
    if store is None:
        give_notice("store has no effect: nothing is kept without --response-store")
        return plan, None
    kept, owner = store, owner_of_request()

    def keep(choices: Sequence[Choice]) -> None:
        final = [FinalChoice(choice, choice.whole_output(), choice.index) for choice in choices]
        answered = chat_completion(plan, final, tokenizer)
        answered["metadata"] = body.metadata or {}
        messages = [
            _stored(f"{plan.request_id}-{index}", message)
            for index, message in enumerate(body.messages)
        ]
        unawaited(kept.put_entry(owner, answered, messages))

    return replace(plan, text=replace(plan.text, keeps_output=True)), keep


def _stored(item_id: str, message: ChatMessage) -> Item:
    """Returns a message as it is listed: with an id, and its text apart from its parts."""
    given = message.model_dump(exclude_none=True)
    content = given.get("content")
    if not isinstance(content, list):
        return {"name": None, "content": None, **given, "id": item_id, "content_parts": None}
    return {"name": None, **given, "id": item_id, "content": None, "content_parts": content}
