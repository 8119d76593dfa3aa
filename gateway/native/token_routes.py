"""`/tokenize` and `/detokenize`: token counts and ids of prompts, and the text of token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI

from gateway.generation import TargetModel
from gateway.native.schema import DetokenizeRequest, TokenizeRequest
from gateway.off_loop import off_loop
from gateway.prompts import check_prompts
from gateway.schema import ChatCompletionRequest, KnownFields
from gateway.serving import Gateway
from shared.errors import InvalidArgument
from shared.generation import check_token_ids

T = TypeVar("T")

_INLINE_TOKENS = 8_192
_TOKENIZE_FIELDS = KnownFields(frozenset(), frozenset({"documents", "mm_processor_kwargs"}))
_DETOKENIZE_FIELDS = KnownFields(frozenset(), frozenset())


def add_token_routes(app: FastAPI, gateway: Gateway) -> None:
    """Adds the routes, each also below `/v1`."""

    @app.post("/v1/tokenize", tags=["tokens"])
    @app.post("/tokenize", tags=["tokens"])
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        model = gateway.pool.model(body.model)
        _TOKENIZE_FIELDS.refuse(body)
        rows = await _encoded(body, gateway)
        is_batch = isinstance(body.prompt, list)
        answer: dict[str, Any] = {
            "tokens": rows if is_batch else rows[0],
            "count": [len(row) for row in rows] if is_batch else len(rows[0]),
            "max_model_len": model.max_context_tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            tokenizer = gateway.text.tokenizer
            strings = await _inline_if_short(
                "prompt", rows, lambda: list(map(tokenizer.entries, rows))
            )
            answer["token_strs"] = strings if is_batch else strings[0]
        return answer

    @app.post("/v1/detokenize", tags=["tokens"])
    @app.post("/detokenize", tags=["tokens"])
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        model = gateway.pool.model(body.model)
        _DETOKENIZE_FIELDS.refuse(body)
        rows = [row for row in body.tokens if not isinstance(row, int)]
        is_batch = bool(rows)
        if not is_batch:
            rows = [[token_id for token_id in body.tokens if isinstance(token_id, int)]]
        skip = body.skip_special_tokens is not False
        texts = await _inline_if_short(
            "tokens", rows, partial(_decoded, rows, model, skip, gateway)
        )
        text = texts if is_batch else texts[0]
        return {"prompt": text, "text": text}  # vLLM's name and SGLang's


async def _encoded(body: TokenizeRequest, gateway: Gateway) -> list[list[int]]:
    """Returns the token ids of each prompt, or of the single chat."""
    if (body.prompt is None) == (body.messages is None):
        message = "one of prompt and messages must be given"
        raise InvalidArgument.of("PROMPT_AMBIGUOUS", "prompt", message)
    if body.messages is not None:
        chat = ChatCompletionRequest(
            messages=body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
        )
        return [await gateway.planner.chat_prompt(chat)]
    texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
    check_prompts(gateway.settings, len(texts))
    add = body.add_special_tokens is not False
    return [await gateway.text.tokenizer.encode(text, add_special_tokens=add) for text in texts]


async def _inline_if_short(
    field: str, rows: Sequence[Sequence[int]], work: Callable[[], list[T]]
) -> list[T]:
    """Does the work here for few tokens, else off the event loop."""
    if sum(map(len, rows)) <= _INLINE_TOKENS:
        return work()
    return await off_loop(field, work)


def _decoded(
    rows: Sequence[Sequence[int]], model: TargetModel, skip: bool, gateway: Gateway
) -> list[str]:
    for row in rows:
        check_token_ids("tokens", row, model.vocab_size, reason="TOKEN_OUT_OF_RANGE")
    decode = gateway.text.tokenizer.decode
    return [decode(row, skip_special_tokens=skip) for row in rows]
