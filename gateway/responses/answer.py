"""The answers of `/v1/responses`: one message of text, whole or as its named events."""

from __future__ import annotations

import time
from typing import Any

import orjson

from gateway.choice import Choice, Piece, TokenScore
from gateway.failures import Problem
from gateway.logprobs import chat_logprobs
from gateway.responses.chat import ResponsePlan
from gateway.text.tokenizer import Tokenizer
from gateway.usage import metrics, usage
from shared.errors import OutriderError
from shared.tokens import FinishReason


class ResponseText:
    """Builds the objects of one response from its output so far."""

    def __init__(self, asked: ResponsePlan, tokenizer: Tokenizer) -> None:
        self._asked = asked
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._scores: list[TokenScore] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def item_id(self) -> str:
        return self._asked.item_id

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._scores += piece.scores

    def logprobs(self, piece: Piece | None = None) -> list[dict[str, Any]]:
        """Returns the log probabilities of a piece, or of everything."""
        scores = self._scores if piece is None else piece.scores
        content: list[dict[str, Any]] = chat_logprobs(scores, self._tokenizer)["content"]
        return content

    def part(self) -> dict[str, Any]:
        logprobs = self.logprobs()
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}

    def item(self, choice: Choice | None) -> dict[str, Any]:
        """Returns the message; without content while there is no choice that finished."""
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if choice is None else _status(choice),
            "content": [] if choice is None else [self.part()],
        }

    def response(self, choice: Choice | None) -> dict[str, Any]:
        """Returns the response; in progress while there is no choice that finished."""
        asked, body = self._asked, self._asked.body
        sampling = asked.plan.generations[0].sampling
        response: dict[str, Any] = {
            "id": asked.plan.request_id,
            "object": "response",
            "created_at": asked.plan.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": asked.plan.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }
        return response if choice is None else response | self._ending(choice)

    def _ending(self, choice: Choice) -> dict[str, Any]:
        status = _status(choice)
        return {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "output": [self.item(choice)],
            "usage": self._usage(choice),
            "metrics": metrics((choice,)),
        }

    def _usage(self, choice: Choice) -> dict[str, Any]:
        counted = usage(self._asked.plan, (choice,))
        cached = counted["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": 0,
                **counted["completion_tokens_details"],
            },
            "total_tokens": counted["total_tokens"],
        }


class ResponseChunks:
    """Events of a response stream, numbered from 0."""

    def __init__(self, asked: ResponsePlan, tokenizer: Tokenizer) -> None:
        self._text = ResponseText(asked, tokenizer)
        self._place = {"item_id": asked.item_id, "output_index": 0, "content_index": 0}
        self._number = 0

    def opening(self, choice: Choice) -> bytes:
        response = self._text.response(None)
        return b"".join(
            (
                self._event("response.created", response=response),
                self._event("response.in_progress", response=response),
                self._event(
                    "response.output_item.added", output_index=0, item=self._text.item(None)
                ),
                self._event("response.content_part.added", **self._place, part=self._text.part()),
            )
        )

    def news(self, choice: Choice, usage_so_far: bytes) -> bytes:
        piece = choice.take()
        if piece is None:
            return b""
        self._text.add(piece)
        if not piece.text:
            return b""
        logprobs = self._text.logprobs(piece)
        return self._event(
            "response.output_text.delta", **self._place, delta=piece.text, logprobs=logprobs
        )

    def closing(self, choices: tuple[Choice, ...]) -> bytes:
        (choice,) = choices
        text = self._text
        ending = f"response.{_status(choice)}"
        return b"".join(
            (
                self._event(
                    "response.output_text.done",
                    **self._place,
                    text=text.text,
                    logprobs=text.logprobs(),
                ),
                self._event("response.content_part.done", **self._place, part=text.part()),
                self._event("response.output_item.done", output_index=0, item=text.item(choice)),
                self._event(ending, response=text.response(choice)),
            )
        )

    def failure(self, error: OutriderError) -> bytes:
        problem = Problem.of(error)
        fields = {"code": problem.code, "message": problem.message, "param": problem.param}
        return self._event("error", **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish_reason is FinishReason.LENGTH else "completed"
