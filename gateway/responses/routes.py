"""Routes of `/v1/responses`, of conversations and of stored chats."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse

from gateway.answer import Answer
from gateway.api_keys import current_quota, owner_of_request
from gateway.bodies import chat_completion
from gateway.choice import Choice, FinalChoice
from gateway.event_stream import OnEnd, respond, whole_answer
from gateway.failures import Aborted, ClientGone, Problem, give_notice, json_response
from gateway.planner import Plan
from gateway.responses.answer import ResponseEncoder
from gateway.responses.chat import (
    COMPACTION_PROMPT,
    History,
    ResponsePlan,
    compacted,
    history_of,
    response_plan,
    store_ended,
)
from gateway.responses.schema import (
    ConversationItems,
    ConversationRequest,
    InputItem,
    NewMetadata,
    ResponseAnswer,
    ResponsesRequest,
)
from gateway.responses.store import (
    CHAT,
    CONVERSATION,
    RESPONSE,
    Item,
    Order,
    ResponseStore,
    StoredResponse,
    item_list,
    list_page,
    log_failure,
    stored_items,
)
from gateway.schema import ChatCompletionRequest, ChatMessage
from gateway.serving import Gateway
from shared.errors import InvalidArgument, NotFound, OutriderError, QueueFull
from shared.text import Tokenizer

_log = logging.getLogger(__name__)
_MAX_RUNNING = 256
_POLL_S = 0.25
_CHATS, _CONVERSATIONS = "/v1/chat/completions", "/v1/conversations"
_METADATA = re.compile(r"metadata\[(.+)\]")
Limit = Annotated[int, Query(ge=1, le=100)]


class BackgroundResponse:
    """One background response and the events of its stream.

    Attributes:
        body: the body of the response in its present state.
        events: events of the stream so far; element n has sequence number n.
        is_wanted: False once the client has deleted the response.
    """

    def __init__(self, plan: ResponsePlan, answer: Answer, tokenizer: Tokenizer) -> None:
        self.plan = plan
        self.answer = answer
        self.encoder = ResponseEncoder(plan, tokenizer, self._set_body)
        self.body: dict[str, Any] = self.encoder.response() | {"status": "queued"}
        self.events: list[bytes] = []
        self.is_wanted = True
        self._is_over = False
        self._news = asyncio.Event()

    @property
    def stored(self) -> StoredResponse:
        is_stream = self.plan.chat.body.stream
        events = self.events if is_stream else None
        return StoredResponse(self.body, self.plan.history.new_items, events)

    def add(self, chunk: bytes) -> int:
        """Adds the events of a chunk; returns how many of its bytes are kept."""
        if not self.plan.chat.body.stream:
            return 0
        self.events += [event + b"\n\n" for event in chunk.split(b"\n\n")[:-1]]
        self._wake()
        return len(chunk)

    def end(self) -> None:
        self._is_over = True
        self._wake()

    async def follow(self, after: int = -1) -> AsyncIterator[bytes]:
        """Yields the events that follow sequence number `after`, until the response ends."""
        position = after + 1
        while True:
            news = self._news
            if position < len(self.events):
                chunk, position = b"".join(self.events[position:]), len(self.events)
                yield chunk
            elif self._is_over:
                return
            else:
                await news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _set_body(self, body: dict[str, Any]) -> None:
        self.body = body


class BackgroundResponses:
    """Runs background responses and holds the ones that have not ended."""

    def __init__(self, store: ResponseStore, tokenizer: Tokenizer) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._running: dict[tuple[str, str], BackgroundResponse] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_bytes = 0

    async def start(self, owner: str, plan: ResponsePlan, answer: Answer) -> BackgroundResponse:
        """Raises:
        QueueFull: `_MAX_RUNNING` background responses run already.
        """
        if len(self._running) >= _MAX_RUNNING:
            raise QueueFull.of(len(self._running), _MAX_RUNNING)
        response = BackgroundResponse(plan, answer, self._tokenizer)
        self._running[owner, plan.chat.request_id] = response
        log_failure(self._store.put(owner, response.stored))
        task = asyncio.create_task(self._run(owner, response))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return response

    def find(self, owner: str, response_id: str) -> BackgroundResponse | None:
        return self._running.get((owner, response_id))

    def forget(self, owner: str, response_id: str) -> None:
        """Aborts a response, if it runs, and does not store it."""
        response = self.find(owner, response_id)
        if response is not None:
            response.is_wanted = False
            response.answer.abort()

    async def cancel(self, owner: str, response_id: str) -> None:
        """Aborts a response, if it runs, and waits until it has ended and is being stored."""
        response = self.find(owner, response_id)
        if response is not None:
            response.answer.abort()
            async for _ in response.follow(len(response.events)):
                pass

    async def _run(self, owner: str, response: BackgroundResponse) -> None:
        quota = current_quota.get()
        num_bytes = 0
        try:
            with nullcontext() if quota is None else quota.place():
                async for chunk in self._chunks(owner, response):
                    added = response.add(chunk)
                    num_bytes += added
                    self._num_bytes += added
                    self._check_room()
        except Aborted:
            self._fail(response, "cancelled", None)
        except OutriderError as error:
            problem = Problem.of(error)
            fields = {"code": "server_error", "message": problem.message}
            self._fail(response, "failed", fields)
        except Exception:
            _log.exception("response %s failed", response.plan.chat.request_id)
            fields = {"code": "server_error", "message": "the gateway failed; see its log"}
            self._fail(response, "failed", fields)
        finally:
            self._num_bytes -= num_bytes
            del self._running[owner, response.plan.chat.request_id]
            if response.is_wanted:
                store_ended(self._store, owner, response.plan, response.stored)
            response.end()

    async def _chunks(self, owner: str, response: BackgroundResponse) -> AsyncIterator[bytes]:
        encoder, answer = response.encoder, response.answer
        async with answer.running():
            response.body = encoder.response()
            if response.is_wanted:
                log_failure(self._store.put(owner, response.stored))
            (choice,) = answer.choices
            yield encoder.opening(choice)
            yield encoder.news(choice)
            while answer.num_open:
                await answer.step()
                yield encoder.news(choice)
            yield encoder.closing(answer.choices)

    def _fail(
        self, response: BackgroundResponse, status: str, error: dict[str, Any] | None
    ) -> None:
        response.body = response.encoder.response() | {"status": status, "error": error}
        response.add(response.encoder.ended(response.body))

    def _check_room(self) -> None:
        """Raises:
        QueueFull: the events of all running responses take more bytes than the store may hold.

        """
        limit = self._store.max_bytes
        if self._num_bytes > limit:
            message = f"events of background responses take {self._num_bytes:,} bytes of {limit:,}"
            raise QueueFull(message, reason="BACKGROUND_FULL")


def add_response_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes. The routes of stored responses need a store."""
    store = gateway.response_store
    background = None
    if store is not None:
        background = BackgroundResponses(store, gateway.text.tokenizer)
    _add_generation(app, gateway, store, background)
    _add_counting(app, gateway)
    if store is not None and background is not None:
        _add_stored(app, store, background)

    @app.get("/v1/responses/{path:path}", tags=["openai"])
    @app.delete("/v1/responses/{path:path}", tags=["openai"])
    @app.post("/v1/responses/{path:path}", tags=["openai"])
    async def not_here(path: str) -> Response:
        reason = "; nothing is kept without --response-store" if store is None else ""
        message = f"there is no response {path[:128]!r} here{reason}"
        raise NotFound(message, reason="RESPONSE_NOT_STORED")


async def _planned(
    gateway: Gateway, body: ResponsesRequest, history: History | None = None
) -> ResponsePlan:
    model = gateway.pool.model(body.model)
    if history is None:
        history = await history_of(body, gateway.response_store, owner_of_request())
    return await response_plan(body, history, gateway.planner, model)


def _add_generation(
    app: FastAPI,
    gateway: Gateway,
    store: ResponseStore | None,
    background: BackgroundResponses | None,
) -> None:
    tokenizer = gateway.text.tokenizer

    @app.post("/v1/responses", tags=["openai"], responses={200: {"model": ResponseAnswer}})
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        plan = await _planned(gateway, body)
        answer = Answer(plan.chat, gateway, "responses")
        owner = owner_of_request()

        def on_end(response: dict[str, Any]) -> None:
            if store is not None:
                stored = StoredResponse(response, plan.history.new_items)
                store_ended(store, owner, plan, stored)

        if body.background and background is not None:
            running = await background.start(owner, plan, answer)
            return _events(running.follow()) if body.stream else json_response(running.body)
        return await respond(answer, ResponseEncoder(plan, tokenizer, on_end), request.receive)


def _add_counting(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/v1/responses/input_tokens", tags=["openai"])
    async def input_tokens(body: ResponsesRequest) -> dict[str, str | int]:
        plan = await _planned(gateway, body.model_copy(update={"store": None}))
        return {"object": "response.input_tokens", "input_tokens": plan.chat.num_prompt_tokens}

    @app.post("/v1/responses/compact", tags=["openai"])
    async def compact(body: ResponsesRequest, request: Request) -> Response:
        history = await history_of(body, gateway.response_store, owner_of_request())
        prompt_item = InputItem(type="message", role="user", content=COMPACTION_PROMPT)
        prompted = History([*history.items, ("input", prompt_item)], (), False)
        plain_body = body.model_copy(update={"tools": None, "tool_choice": None, "text": None})
        plan = await _planned(gateway, plain_body, prompted)
        answer = Answer(plan.chat, gateway, "responses")
        encoder = ResponseEncoder(plan, gateway.text.tokenizer)
        response = encoder.whole(await whole_answer(answer, request.receive))
        compaction = {
            "id": plan.chat.request_id,
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": compacted([item for _, item in history.items], encoder.message_text),
            "usage": response["usage"],
        }
        return json_response(compaction)


def _add_stored(app: FastAPI, store: ResponseStore, background: BackgroundResponses) -> None:
    @app.get("/v1/responses/{response_id}", tags=["openai"])
    async def retrieve(
        request: Request, response_id: str, stream: bool = False, starting_after: int = -1
    ) -> Response:
        owner = owner_of_request()
        running = background.find(owner, response_id)
        if not stream:
            return json_response((await store.response(owner, response_id)).body)
        if running is not None and running.plan.chat.body.stream:
            return _events(running.follow(starting_after))
        stored = await _ended(store, owner, response_id, request)
        if stored.events is None:
            message = "stream is true; the response was not made with stream and background"
            raise InvalidArgument.of("STREAM_NOT_KEPT", "stream", message)
        content = b"".join(stored.events[max(starting_after + 1, 0) :])
        return Response(content, media_type="text/event-stream")

    @app.delete("/v1/responses/{response_id}", tags=["openai"])
    async def delete(response_id: str) -> dict[str, Any]:
        owner = owner_of_request()
        await store.response(owner, response_id)
        background.forget(owner, response_id)  # first, so that its end does not store it again
        await store.delete(owner, response_id, RESPONSE)
        return {"id": response_id, "object": "response", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel", tags=["openai"])
    async def cancel(response_id: str) -> Response:
        owner = owner_of_request()
        await background.cancel(owner, response_id)
        body = (await store.response(owner, response_id)).body
        if not body["background"]:
            message = "Cannot cancel a synchronous response."  # OpenAI's words
            raise InvalidArgument.of("NOT_IN_BACKGROUND", "response_id", message)
        return json_response(body)

    @app.get("/v1/responses/{response_id}/input_items", tags=["openai"])
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Limit = 20,
        order: Order = "desc",
    ) -> dict[str, Any]:
        stored = await store.response(owner_of_request(), response_id)
        return item_list(stored.input, after, limit, order)


async def _ended(
    store: ResponseStore, owner: str, response_id: str, request: Request
) -> StoredResponse:
    """Returns a stored response. If it has events, waits until it has ended: a response that runs
    in another worker is stored with its events only then.

    Raises:
        NotFound: no response with this id is stored for `owner`.
        ClientGone: the client went away while it waited.
    """
    while not await request.is_disconnected():
        stored = await store.response(owner, response_id)
        if stored.events is None or not stored.is_running:
            return stored
        await asyncio.sleep(_POLL_S)
    raise ClientGone


def _events(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


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
    async def refuse() -> Response:
        message = f"{subject} are not kept: the gateway runs without --response-store"
        raise NotFound(message, reason="STORE_OFF")


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
        listed = await store.chats(owner_of_request(), after, limit, order, model, metadata)
        return list_page(listed, limit)

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

    Raises:
        InvalidArgument: the client chose an id, which another client's chat may have.
    """
    if store is None:
        give_notice("store has no effect: nothing is kept without --response-store")
        return plan, None
    if body.rid is not None:
        message = f"rid is {body.rid[:64]!r}; it must be unset, as a stored chat gets its own id"
        raise InvalidArgument.of("RID_WITH_STORE", "rid", message)
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
