"""Routes of conversations and of stored chats."""

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
    list_page,
    log_failure,
    stored_items,
)
from gateway.schema import ChatCompletionRequest, ChatMessage
from shared.errors import FailedPrecondition, NotFound
from shared.text import Tokenizer

_CHATS, _CONVERSATIONS = "/v1/chat/completions", "/v1/conversations"
_METADATA = re.compile(r"metadata\[(.+)\]")
Limit = Annotated[int, Query(ge=1, le=100)]


def add_stored_routes(app: FastAPI, store: ResponseStore | None) -> None:
    """Adds the routes. Without a store every request is refused."""
    if store is None:
        _add_refusals(app, _CHATS, "GET", "stored chats")
        _add_refusals(app, _CONVERSATIONS, "POST", "conversations")
        return
    _add_chat_lists(app, store)
    _add_conversations(app, store)
    _add_entries(app, store, _CHATS, CHAT, "chat.completion.deleted")
    _add_entries(app, store, _CONVERSATIONS, CONVERSATION, "conversation.deleted")


def _add_refusals(app: FastAPI, root: str, method: str, subject: str) -> None:
    """Adds refusals of `method` at the root path and of every method below it."""

    @app.api_route(root, methods=[method], tags=["openai"])
    @app.get(f"{root}/{{path:path}}", tags=["openai"])
    @app.delete(f"{root}/{{path:path}}", tags=["openai"])
    @app.post(f"{root}/{{path:path}}", tags=["openai"])
    async def refuse(path: str = "") -> Response:
        message = f"{subject} ({path[:128]!r}) need --response-store"
        raise FailedPrecondition(message, reason="STORE_OFF")


def _add_entries(app: FastAPI, store: ResponseStore, root: str, kind: str, deleted: str) -> None:
    """Adds the routes that retrieve, update and delete a chat or a conversation."""
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
        items = await store.entry_items(owner_of_request(), conversation_id, CONVERSATION)
        return item_list(items, after, limit, order)

    @app.post(items_path, tags=["openai"])
    async def add_items(conversation_id: str, body: ConversationItems) -> dict[str, Any]:
        added = stored_items(body.items)
        await store.append(owner_of_request(), conversation_id, added)
        return item_list(added, None, max(len(added), 1), "asc")

    @app.get(f"{items_path}/{{item_id}}", tags=["openai"])
    async def item(conversation_id: str, item_id: str) -> dict[str, Any]:
        for item in await store.entry_items(owner_of_request(), conversation_id, CONVERSATION):
            if item["id"] == item_id:
                return item
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
            match[1]: value
            for name, value in request.query_params.items()
            if (match := _METADATA.fullmatch(name))
        }
        chat_filter = ChatFilter(after, limit, order, model, metadata)
        return list_page(await store.chats(owner_of_request(), chat_filter), limit)

    @app.get(f"{_CHATS}/{{completion_id}}/messages", tags=["openai"])
    async def messages(
        completion_id: str, after: str | None = None, limit: Limit = 20, order: Order = "asc"
    ) -> dict[str, Any]:
        items = await store.entry_items(owner_of_request(), completion_id, CHAT)
        return item_list(items, after, limit, order)


def stored_chat(
    store: ResponseStore | None, body: ChatCompletionRequest, plan: Plan, tokenizer: Tokenizer
) -> tuple[Plan, OnEnd | None]:
    """Prepares a chat for being stored.

    Returns:
        The plan, changed to keep its output, and a callback that stores the chat at its end.
        Without a store, the plan unchanged and None.
    """
    if store is None:
        give_notice("store has no effect: nothing is kept without --response-store")
        return plan, None
    owner = owner_of_request()

    def store_chat(choices: Sequence[Choice]) -> None:
        final = [FinalChoice(choice, choice.whole_output(), choice.index) for choice in choices]
        completion = chat_completion(plan, final, tokenizer)
        completion["metadata"] = body.metadata or {}
        messages = [
            _stored(f"{plan.request_id}-{index}", message)
            for index, message in enumerate(body.messages)
        ]
        log_failure(store.put_entry(owner, completion, messages))

    return replace(plan, text=replace(plan.text, keeps_output=True)), store_chat


def _stored(item_id: str, message: ChatMessage) -> Item:
    """Returns a message in its listed form: with an id, and with `content_parts` for a list."""
    fields = message.model_dump(exclude_none=True)
    content = fields.get("content")
    if not isinstance(content, list):
        return {"name": None, "content": None, **fields, "id": item_id, "content_parts": None}
    return {"name": None, **fields, "id": item_id, "content": None, "content_parts": content}
