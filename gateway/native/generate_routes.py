"""`/generate`, SGLang's own interface."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from gateway.answer import Answer
from gateway.event_stream import EventStream, whole_answer
from gateway.inbox import Aborted
from gateway.native.answer_schema import GenerateAnswer
from gateway.native.generate_answer import GenerateChunks, GeneratedText
from gateway.native.generate_plan import generate_plan
from gateway.native.schema import GenerateRequest
from gateway.serving import Gateway
from shared.telemetry.request_id import current_request_id

_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"model": GenerateAnswer | list[GenerateAnswer]}}


def add_generate_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the route."""
    tokenizer = gateway.text.tokenizer

    @app.put("/generate", tags=["sglang"], responses=_ANSWERS)
    @app.post("/generate", tags=["sglang"], responses=_ANSWERS)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        name, model = gateway.pool.model(body.model)
        trace_id = current_request_id.get()
        asked = await generate_plan(body, gateway.planner, name, model, trace_id)
        answer = gateway.answer(asked.plan, "generate")
        if asked.plan.is_stream:
            return EventStream(answer, GenerateChunks(asked, tokenizer))
        texts = [GeneratedText(asked, choice, tokenizer) for choice in answer.choices]
        bodies = await _bodies(answer, texts, request)
        content = orjson.dumps(bodies if asked.is_batch else bodies[0])
        return Response(content, media_type="application/json")


async def _bodies(
    answer: Answer, texts: Sequence[GeneratedText], request: Request
) -> list[dict[str, Any]]:
    """Returns the objects of the whole answer. What was aborted ends with what it had."""
    try:
        final_choices = await whole_answer(answer, request.receive)
    except Aborted as error:
        for text in texts:
            text.add(text.choice.cut())
        return [text.body(None if text.choice.is_finished else error) for text in texts]
    for text, final_choice in zip(texts, final_choices, strict=True):
        text.add(final_choice.piece)
    return [text.body() for text in texts]
