"""Whole responses, as the `openai` package's own types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from openai.types import Completion, Model
from openai.types.chat import ChatCompletion

from gateway.chat_parts import message_fields
from gateway.choice import Choice
from gateway.final_choice import FinalChoice, best_choices, stop_fields
from gateway.logprobs import chat_logprobs, completion_logprobs
from gateway.plan import Plan
from gateway.prompt_logprobs import echoed_logprobs, vllm_prompt_logprobs
from gateway.rounds import round_fields
from gateway.usage import metrics, timings, usage
from shared.text.tokenizer import Tokenizer


def chat_completion(
    plan: Plan, final_choices: Sequence[FinalChoice], tokenizer: Tokenizer
) -> ChatCompletion:
    """Returns the response of `/v1/chat/completions`."""
    body = _body(plan, final_choices, "chat.completion")
    body["choices"] = [_chat_choice(plan, each, tokenizer) for each in final_choices]
    prompt, choice = plan.generations[0].prompt_token_ids, final_choices[0].choice
    body["prompt_token_ids"] = prompt if plan.return_token_ids else None
    body["prompt_logprobs"] = _prompt_logprobs(plan, prompt, choice, tokenizer)
    return ChatCompletion.model_validate(body)


def completion(
    plan: Plan, final_choices: Sequence[FinalChoice], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the response of `/v1/completions`."""
    body = _body(plan, final_choices, "text_completion")
    shown = best_choices(plan, final_choices)
    body["choices"] = [_completion_choice(plan, each, tokenizer) for each in shown]
    checked = Completion.model_validate(body).model_dump(mode="json", exclude_unset=True)
    if plan.echoes_scores:
        # The package's type has no place for the null of the first token.
        for choice, final_choice in zip(checked["choices"], shown, strict=True):
            choice["logprobs"] = _echoed(plan, final_choice, tokenizer)
    return checked


def model(name: str, created: int, max_context_tokens: int, root: str) -> dict[str, Any]:
    """Returns an entry of `/v1/models`.

    Args:
        root: the model's own name; another than `name` for an alias.
    """
    entry = Model(id=name, created=created, object="model", owned_by="outrider")
    shown = entry.model_dump(exclude_unset=True)
    return {**shown, "root": root, "max_model_len": max_context_tokens}


def _body(plan: Plan, final_choices: Sequence[FinalChoice], kind: str) -> dict[str, Any]:
    choices = [each.choice for each in final_choices]
    return {
        "id": plan.request_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model,
        "system_fingerprint": plan.fingerprint,
        **({} if plan.service_tier is None else {"service_tier": plan.service_tier}),
        "usage": usage(plan, choices),
        "metrics": metrics(choices),
        "timings": timings(plan, choices),
    }


def _chat_choice(plan: Plan, final_choice: FinalChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = final_choice.piece
    fields = message_fields(piece)
    if plan.echoed_texts:
        fields["content"] = plan.echoed_texts[0] + piece.text
    choice: dict[str, Any] = {
        "index": final_choice.index,
        "message": {"role": "assistant", "refusal": None, **fields},
        "logprobs": chat_logprobs(
            piece.scores,
            tokenizer,
            as_ids=plan.tokens_as_ids,
            with_drawn=plan.names_scored_tokens,
        )
        if piece.scores
        else None,
        "finish_reason": final_choice.finish_reason,
        **stop_fields(plan, final_choice.choice),
    }
    choice["token_ids"] = list(piece.token_ids) if plan.return_token_ids else None
    if piece.rounds:
        choice["speculation"] = {"rounds": round_fields(piece.rounds, tokenizer)}
    return choice


def _prompt_logprobs(
    plan: Plan, prompt: Sequence[int], choice: Choice, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    shows = plan.shows_prompt_logprobs
    return vllm_prompt_logprobs(prompt, choice, tokenizer) if shows else None


def _completion_choice(
    plan: Plan, final_choice: FinalChoice, tokenizer: Tokenizer
) -> dict[str, Any]:
    piece, drawn = final_choice.piece, final_choice.choice
    echoed = plan.echoed_texts[drawn.index // plan.num_choices] if plan.echoed_texts else ""
    prompt = plan.generations[drawn.index].prompt_token_ids
    scores = None
    if piece.scores and plan.shows_logprobs and not plan.echoes_scores:
        scores = completion_logprobs(
            piece.scores, tokenizer, echo_length=len(echoed), as_ids=plan.tokens_as_ids
        )
    choice: dict[str, Any] = {
        "index": final_choice.index,
        "text": echoed + piece.text,
        "logprobs": scores,
        "finish_reason": final_choice.finish_reason,
        **stop_fields(plan, final_choice.choice),
    }
    choice["prompt_token_ids"] = prompt if plan.return_token_ids else None
    choice["token_ids"] = list(piece.token_ids) if plan.return_token_ids else None
    choice["prompt_logprobs"] = _prompt_logprobs(plan, prompt, drawn, tokenizer)
    if piece.rounds:
        choice["speculation"] = {"rounds": round_fields(piece.rounds, tokenizer)}
    return choice


def _echoed(plan: Plan, final_choice: FinalChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    index = final_choice.choice.index
    return echoed_logprobs(
        plan.generations[index].prompt_token_ids,
        final_choice.choice,
        final_choice.piece.scores,
        tokenizer,
        echo_length=len(plan.echoed_texts[index // plan.num_choices]),
        as_ids=plan.tokens_as_ids,
    )
