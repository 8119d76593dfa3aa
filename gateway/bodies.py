"""Whole responses, as the `openai` package's own types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from gateway.choice import Choice, Piece
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.plan import Plan
from gateway.text.tokenizer import Tokenizer
from gateway.usage import metrics, usage


@dataclass(frozen=True, slots=True)
class Finale:
    """A choice with all of its output."""

    choice: Choice
    piece: Piece

    @property
    def finish_reason(self) -> str:
        assert self.choice.finish_reason is not None, "a response is built when all is finished"
        return self.choice.finish_reason.value


def chat_completion(plan: Plan, finales: Sequence[Finale], tokenizer: Tokenizer) -> ChatCompletion:
    """Returns the response of `/v1/chat/completions`."""
    body = _body(plan, finales, "chat.completion")
    body["choices"] = [_chat_choice(plan, each, tokenizer) for each in finales]
    if plan.return_token_ids:
        body["prompt_token_ids"] = plan.generations[0].prompt_token_ids
    return ChatCompletion.model_validate(body)


def completion(plan: Plan, finales: Sequence[Finale], tokenizer: Tokenizer) -> Completion:
    """Returns the response of `/v1/completions`."""
    body = _body(plan, finales, "text_completion")
    body["choices"] = [_completion_choice(plan, each, tokenizer) for each in finales]
    return Completion.model_validate(body)


def model(name: str, created: int, max_context_tokens: int) -> dict[str, Any]:
    """Returns an entry of `/v1/models`."""
    entry = Model(id=name, created=created, object="model", owned_by="outrider")
    return {**entry.model_dump(exclude_unset=True), "max_model_len": max_context_tokens}


def _body(plan: Plan, finales: Sequence[Finale], kind: str) -> dict[str, Any]:
    choices = [each.choice for each in finales]
    return {
        "id": plan.request_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model,
        "usage": usage(plan, choices),
        "metrics": metrics(choices),
    }


def _chat_choice(plan: Plan, finale: Finale, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = finale.piece
    choice: dict[str, Any] = {
        "index": finale.choice.index,
        "message": {"role": "assistant", "content": piece.text, "refusal": None},
        "logprobs": chat_logprobs(piece.scores, tokenizer) if piece.scores else None,
        "finish_reason": finale.finish_reason,
    }
    if plan.return_token_ids:
        choice["token_ids"] = list(piece.token_ids)
    return choice


def _completion_choice(plan: Plan, finale: Finale, tokenizer: Tokenizer) -> dict[str, Any]:
    piece, index = finale.piece, finale.choice.index
    echoed = plan.echoed_texts[index // plan.num_choices] if plan.echoed_texts else ""
    scores = None
    if piece.scores:
        scores = completion_logprobs(piece.scores, tokenizer, echo_length=len(echoed))
    choice: dict[str, Any] = {
        "index": index,
        "text": echoed + piece.text,
        "logprobs": scores,
        "finish_reason": finale.finish_reason,
    }
    if plan.return_token_ids:
        choice["prompt_token_ids"] = plan.generations[index].prompt_token_ids
        choice["token_ids"] = list(piece.token_ids)
    return choice
