"""`/v1/messages` and `/v1/messages/count_tokens`, Anthropic's interface."""

from __future__ import annotations

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.answer import Answer
from gateway.event_stream import EventStream, whole_answer
from gateway.messages.answer import MessageChunks, message
from gateway.messages.chat import messages_plan, prompt_chat
from gateway.messages.schema import MessageAnswer, MessagesRequest, Prompt
from gateway.serving import Gateway


def add_message_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes."""

    @app.post("/v1/messages", tags=["anthropic"], responses={200: {"model": MessageAnswer}})
    async def messages(body: MessagesRequest, request: Request) -> Response:
        plan = await messages_plan(body, gateway.planner, gateway.pool.model(body.model))
        answer = Answer(plan, gateway, "messages")
        if plan.is_stream:
            return EventStream(answer, MessageChunks(plan))
        (final_choice,) = await whole_answer(answer, request.receive)
        content = orjson.dumps(message(plan, final_choice.choice, final_choice.piece))
        return Response(content, media_type="application/json")

    @app.post("/v1/messages/count_tokens", tags=["anthropic"])
    async def count_tokens(body: Prompt) -> dict[str, int]:
        gateway.pool.model(body.model)
        planner = gateway.planner
        chat = prompt_chat(body, planner.text.style)
        return {"input_tokens": len(await planner.chat_prompt(chat))}
