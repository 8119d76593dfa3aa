"""Chats that are kept: `/v1/chat/completions/{id}` and their list."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request

from gateway.api_keys import owner_of_request
from gateway.bodies import chat_completion
from gateway.choice import Choice, FinalChoice
from gateway.event_stream import OnEnd
from gateway.notices import give_notice
from gateway.planner import Plan
from gateway.responses.routes import add_refusals
from gateway.responses.store import CHAT, ChatFilter, Item, Order, ResponseStore, item_list, listed
from gateway.schema import Body, ChatCompletionRequest, ChatMessage
from shared.text import Tokenizer

_ROOT = "/v1/chat/completions"
_PATH = _ROOT + "/{completion_id}"
_METADATA = re.compile(r"metadata\[(.+)\]")
_Limit = Annotated[int, Query(ge=1, le=100)]


class ChatUpdate(Body):
    """Body of `/v1/chat/completions/{id}`."""

    metadata: dict[str, str] | None = None


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
        final = [FinalChoice(choice, choice.hold(), choice.index) for choice in choices]
        answered = chat_completion(plan, final, tokenizer)
        answered["metadata"] = body.metadata or {}
        messages = [
            _stored(f"{plan.request_id}-{index}", message)
            for index, message in enumerate(body.messages)
        ]
        kept.put_entry_soon(owner, answered, messages)

    return replace(plan, text=replace(plan.text, keeps_output=True)), keep


def _stored(item_id: str, message: ChatMessage) -> Item:
    """Returns a message as it is listed: with an id, and its text apart from its parts."""
    given = message.model_dump(exclude_none=True)
    content = given.get("content")
    if not isinstance(content, list):
        return {"name": None, "content": None, **given, "id": item_id, "content_parts": None}
    return {"name": None, **given, "id": item_id, "content": None, "content_parts": content}


def add_stored_chat_routes(app: FastAPI, store: ResponseStore | None) -> None:
    """Adds the routes; without a store they refuse."""
    if store is None:
        add_refusals(app, _ROOT, "GET", "stored chats")
        return

    @app.get(_ROOT, tags=["openai"])
    async def chats(
        request: Request,
        after: str | None = None,
        limit: _Limit = 20,
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

    @app.get(_PATH, tags=["openai"])
    async def retrieve(completion_id: str) -> dict[str, Any]:
        return await store.entry(owner_of_request(), completion_id, CHAT)

    @app.post(_PATH, tags=["openai"])
    async def update(completion_id: str, body: ChatUpdate) -> dict[str, Any]:
        owner = owner_of_request()
        chat = await store.entry(owner, completion_id, CHAT)
        chat["metadata"] = body.metadata or {}
        await store.update_entry(owner, chat, CHAT)
        return chat

    @app.delete(_PATH, tags=["openai"])
    async def delete(completion_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.entry(owner, completion_id, CHAT)
        await store.delete(owner, completion_id)
        return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}

    @app.get(f"{_PATH}/messages", tags=["openai"])
    async def messages(
        completion_id: str, after: str | None = None, limit: _Limit = 20, order: Order = "asc"
    ) -> dict[str, Any]:
        found = await store.entry_items(owner_of_request(), completion_id, CHAT)
        return item_list(found, after, limit, order)
