"""Whole responses in OpenAI's shapes, and the parts that streams share: calls, reasoning, usage;
and log probabilities in OpenAI's and vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, zip_longest
from typing import Any

from gateway.choice import Choice, FinalChoice, Piece, TokenScore, best_choices, stop_fields
from gateway.generation import TargetModel, fingerprint
from gateway.output.parser import CallArguments, CallBegun, Part, Reasoning
from gateway.planner import Plan
from shared.text import Detokenizer, Tokenizer

_MIN_LOG_PROB = -9999.0  # OpenAI's value for minus infinity, which JSON cannot express


def message_fields(piece: Piece) -> dict[str, Any]:
    """Returns the fields of a whole message with a piece's output."""
    calls = whole_calls(piece.parts)
    fields: dict[str, Any] = {"content": piece.text or None if calls else piece.text}
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": arguments},
            }
            for call, arguments in calls
        ]
    return fields | _reasoning(piece)


def delta_fields(piece: Piece) -> dict[str, Any]:
    """Returns a piece as the `delta` of a stream."""
    fields: dict[str, Any] = {"content": piece.text} if piece.text else {}
    calls = [
        _call_delta(part) for part in piece.parts if isinstance(part, CallBegun | CallArguments)
    ]
    if calls:
        fields["tool_calls"] = calls
    return fields | _reasoning(piece)


def whole_calls(parts: Sequence[Part]) -> list[tuple[CallBegun, str]]:
    """Returns the calls of an output, each with its arguments as written."""
    calls: dict[int, CallBegun] = {}
    arguments: dict[int, str] = {}
    for part in parts:
        if isinstance(part, CallBegun):
            calls[part.index], arguments[part.index] = part, ""
        elif isinstance(part, CallArguments):
            arguments[part.index] += part.text
    return [(call, arguments[index]) for index, call in calls.items()]


def _reasoning(piece: Piece) -> dict[str, Any]:
    """Both names are in use: `reasoning` is vLLM's new name, the other its old and DeepSeek's."""
    text = "".join(part.text for part in piece.parts if isinstance(part, Reasoning))
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _call_delta(part: CallBegun | CallArguments) -> dict[str, Any]:
    if isinstance(part, CallArguments):
        return {"index": part.index, "function": {"arguments": part.text}}
    return {
        "index": part.index,
        "id": part.call_id,
        "type": "function",
        "function": {"name": part.name, "arguments": ""},
    }


def usage(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns OpenAI's `usage`.

    A prompt counts once, whatever `n`; its cached tokens are those of its first choice.
    """
    num_prompt_tokens = plan.num_prompt_tokens
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    num_cached = sum(choice.num_cached_tokens for choice in choices[:: plan.num_choices])
    stats = [choice.stats for choice in choices]
    details: dict[str, int] = {
        "accepted_prediction_tokens": sum(choice.num_accepted for choice in choices),
        "rejected_prediction_tokens": sum(s.num_drafted - s.num_accepted for s in stats),
        "reasoning_tokens": sum(choice.num_reasoning_tokens for choice in choices),
    }
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": details,
        "reasoning_tokens": details["reasoning_tokens"],  # SGLang's place for it
    }


def usage_of_prompt(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the `usage` of a stream's first chunk, without the output that may have arrived."""
    whole = usage(plan, choices)
    return {
        **whole,
        "completion_tokens": 0,
        "total_tokens": whole["prompt_tokens"],
        "completion_tokens_details": dict.fromkeys(whole["completion_tokens_details"], 0),
        "reasoning_tokens": 0,
    }


def metrics(choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the root `metrics` object, summed over the choices.

    Its fields are those that vLLM reports and AIPerf reads. Times run from the first choice's start
    to the last choice's end. `speculative_decoding` is null when no tree was verified.
    """
    begun_s, first_s = min(choice.begun_s for choice in choices), _first_s(choices)
    generation_ms = 1e3 * (max(choice.ended_s for choice in choices) - first_s)
    num_later = max(choice.num_output_tokens for choice in choices) - 1
    num_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "queue_time_ms": 1e3 * (min(choice.started_s for choice in choices) - begun_s),
        "time_to_first_token_ms": 1e3 * (first_s - begun_s),
        "generation_time_ms": generation_ms,
        **({"mean_itl_ms": generation_ms / num_later} if num_later > 0 else {}),
        "tokens_per_second": 1e3 * num_tokens / generation_ms if num_later > 0 else 0.0,
        "speculative_decoding": speculative_decoding(choices),
    }


def _first_s(choices: Sequence[Choice]) -> float:
    """Returns the time of the first token of any choice."""
    return min(choice.ended_s if choice.first_s is None else choice.first_s for choice in choices)


def timings(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns llama.cpp's `timings`, in milliseconds. Prediction runs from the first token of any
    choice to the last token of all. The prompt's time begins when it leaves the target's queue."""
    first_s = _first_s(choices)
    prompt_ms = 1e3 * (first_s - min(choice.started_s for choice in choices))
    predicted_ms = 1e3 * (max(choice.ended_s for choice in choices) - first_s)
    num_cached = sum(choice.num_cached_tokens for choice in choices[:: plan.num_choices])
    num_computed = plan.num_prompt_tokens - num_cached
    num_predicted = sum(choice.num_output_tokens for choice in choices)
    stats = [choice.stats for choice in choices]
    return {
        "queue_ms": 1e3 * min(choice.started_s - choice.begun_s for choice in choices),
        "cache_n": num_cached,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_second": 1e3 * num_computed / prompt_ms if prompt_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_second": 1e3 * num_predicted / predicted_ms if predicted_ms else 0.0,
        "draft_n": sum(counters.num_drafted for counters in stats),
        "draft_n_accepted": sum(counters.num_accepted for counters in stats),
    }


def speculative_decoding(choices: Sequence[Choice]) -> dict[str, Any] | None:
    """Returns the speculation figures; None when no round was verified."""
    stats = [choice.stats for choice in choices]
    num_rounds = sum(counters.num_verified_rounds for counters in stats)
    if num_rounds == 0:
        return None
    num_accepted = sum(counters.num_accepted for counters in stats)
    num_drafted = sum(counters.num_drafted for counters in stats)
    histogram = [sum(counts) for counts in zip_longest(*(s.histogram for s in stats), fillvalue=0)]
    return {
        # Tokens a verified round commits, the bonus token included.
        "mean_acceptance_length": 1 + num_accepted / num_rounds,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        # Element n counts the rounds that accepted n nodes.
        "acceptance_histogram": histogram,
        "num_spec_steps": num_rounds,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        # The wire carries no tree depth; the longest accepted path is its lower bound.
        # AIPerf takes the histogram only when it has one element more than this.
        "num_spec_tokens": len(histogram) - 1,
    }


def chat_completion(
    plan: Plan, final_choices: Sequence[FinalChoice], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the response of `/v1/chat/completions`, a `ChatAnswer`."""
    shown = [_chat_choice(plan, final_choice, tokenizer) for final_choice in final_choices]
    body = _body(plan, final_choices, "chat.completion", shown)
    prompt, choice = plan.generations[0].prompt_token_ids, final_choices[0].choice
    body["prompt_token_ids"] = prompt if plan.body.return_token_ids else None
    body["prompt_logprobs"] = vllm_prompt_logprobs(plan, choice, tokenizer)
    return body


def completion(
    plan: Plan, final_choices: Sequence[FinalChoice], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns the response of `/v1/completions`, a `CompletionAnswer`."""
    best = best_choices(plan, final_choices)
    shown = [_completion_choice(plan, final_choice, tokenizer) for final_choice in best]
    return _body(plan, final_choices, "text_completion", shown)


def model(name: str, created: int, target_model: TargetModel) -> dict[str, Any]:
    """Returns an entry of `/v1/models`; `name` may be an alias."""
    return {
        "id": name,
        "created": created,
        "object": "model",
        "owned_by": "outrider",
        "root": target_model.name,
        "max_model_len": target_model.max_context_tokens,
    }


def head(plan: Plan, kind: str) -> dict[str, Any]:
    """Returns the first fields of OpenAI's answers and of every chunk."""
    return {
        "id": plan.request_id,
        "object": kind,
        "created": plan.created,
        "model": plan.model.name,
        "system_fingerprint": fingerprint(plan.model),
        **({} if plan.body.service_tier is None else {"service_tier": "default"}),
    }


def ending(plan: Plan, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the last fields of an answer: usage, metrics and timings."""
    return {
        "usage": usage(plan, choices),
        "metrics": metrics(choices),
        "timings": timings(plan, choices),
    }


def _body(
    plan: Plan, final_choices: Sequence[FinalChoice], kind: str, shown: list[dict[str, Any]]
) -> dict[str, Any]:
    choices = [final_choice.choice for final_choice in final_choices]
    return {**head(plan, kind), "choices": shown, **ending(plan, choices)}


def rounds_field(piece: Piece) -> dict[str, Any]:
    """Returns the extra field of a choice whose request asks for its rounds."""
    return {} if not piece.rounds else {"speculation": {"rounds": piece.rounds}}


def _chat_choice(plan: Plan, final_choice: FinalChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = final_choice.piece
    fields = message_fields(piece)
    if plan.echoed_texts:
        fields["content"] = plan.echoed_texts[0] + piece.text
    return {
        "index": final_choice.index,
        "message": {"role": "assistant", "refusal": None, **fields},
        "logprobs": chat_logprobs(plan, piece.scores, tokenizer),
        "finish_reason": final_choice.choice.finish_name,
        **stop_fields(plan, final_choice.choice),
        "token_ids": list(piece.token_ids) if plan.body.return_token_ids else None,
        **rounds_field(piece),
    }


def _completion_choice(
    plan: Plan, final_choice: FinalChoice, tokenizer: Tokenizer
) -> dict[str, Any]:
    piece, choice = final_choice.piece, final_choice.choice
    prompt = plan.generations[choice.index].prompt_token_ids
    scores = None
    if plan.echoes_scores:
        scores = echoed_logprobs(plan, choice, piece.scores, tokenizer)
    elif plan.shows_logprobs:
        scores = completion_logprobs(plan, choice, piece.scores, tokenizer)
    return {
        "index": final_choice.index,
        "text": plan.echoed_text_of(choice.index) + piece.text,
        "logprobs": scores,
        "finish_reason": final_choice.choice.finish_name,
        **stop_fields(plan, choice),
        "prompt_token_ids": prompt if plan.body.return_token_ids else None,
        "token_ids": list(piece.token_ids) if plan.body.return_token_ids else None,
        "prompt_logprobs": vllm_prompt_logprobs(plan, choice, tokenizer),
        **rounds_field(piece),
    }


def chat_logprobs(
    plan: Plan, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Returns `logprobs` of a piece of a chat; None without scores. Where the request names tokens,
    the drawn token comes before them."""
    if not scores:
        return None
    content, as_ids = [], plan.body.return_tokens_as_token_ids
    for score in scores:
        drawn = (score.token_id, score.logprobs.log_prob)
        top = score.logprobs.top
        if plan.generations[0].logprob_token_ids:
            top = (drawn, *(named for named in top if named[0] != score.token_id))
        content.append(
            {
                **_entry(*drawn, tokenizer, as_ids),
                "top_logprobs": [_entry(*scored, tokenizer, as_ids) for scored in top],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    plan: Plan, choice: Choice, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any] | None:
    """Returns `logprobs` of a piece of a completion; None without scores."""
    echo_length = len(plan.echoed_text_of(choice.index))
    return _columns(plan, scores, tokenizer, echo_length) if scores else None


def _columns(
    plan: Plan, scores: Sequence[TokenScore], tokenizer: Tokenizer, echo_length: int
) -> dict[str, Any]:
    """Args:
    echo_length: characters of echoed prompt before the tokens.
    """
    as_ids = plan.body.return_tokens_as_token_ids
    return {
        "tokens": [_spelling(score.token_id, tokenizer, as_ids) for score in scores],
        "token_logprobs": [finite(score.logprobs.log_prob) for score in scores],
        "top_logprobs": [_top(score, tokenizer, as_ids) for score in scores],
        "text_offset": [echo_length + score.offset for score in scores],
    }


def _entry(token_id: int, log_prob: float, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    return {
        "token": f"token_id:{token_id}" if as_ids else token_bytes.decode("utf-8", "replace"),
        "logprob": finite(log_prob),
        "bytes": list(token_bytes),
    }


def _top(score: TokenScore, tokenizer: Tokenizer, as_ids: bool) -> dict[str, float]:
    """Returns the drawn token first, as vLLM does, and then the most probable tokens."""
    top: dict[str, float] = {}
    for token_id, log_prob in ((score.token_id, score.logprobs.log_prob), *score.logprobs.top):
        # Two tokens may have the same spelling; the more probable one is shown.
        word = _spelling(token_id, tokenizer, as_ids)
        top[word] = max(top.get(word, _MIN_LOG_PROB), finite(log_prob))
    return top


def _spelling(token_id: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """Returns a token's text in the completions interface: `bytes:\\xe2\\x80` for a fragment."""
    if as_ids:
        return f"token_id:{token_id}"
    token_bytes = tokenizer.token_bytes.get(token_id, b"")
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def finite(log_prob: float) -> float:
    """Returns a log probability that JSON can express."""
    return max(log_prob, _MIN_LOG_PROB)


def echoed_logprobs(
    plan: Plan, choice: Choice, scores: Sequence[TokenScore], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Returns `logprobs` of an echoed prompt, null for its first token, and of the output after it.

    Args:
        scores: scores of the output; empty in a stream's echo chunk.
    """
    prompt = plan.generations[choice.index].prompt_token_ids
    echo_length = len(plan.echoed_text_of(choice.index))
    offsets = _offsets(prompt, tokenizer, echo_length)
    prompt_scores = [
        TokenScore(token_id, offset, logprobs)
        for token_id, offset, logprobs in zip(
            prompt[1:], offsets[1:], choice.prompt_scores, strict=True
        )
    ]
    rest = _columns(plan, prompt_scores, tokenizer, 0)
    output = _columns(plan, scores, tokenizer, echo_length)
    begin = tokenizer.decode(prompt[:1], skip_special_tokens=False)
    first = {
        "tokens": f"token_id:{prompt[0]}" if plan.body.return_tokens_as_token_ids else begin,
        "text_offset": 0,
    }
    return {key: [first.get(key), *rest[key], *output[key]] for key in rest}


def vllm_prompt_logprobs(
    plan: Plan, choice: Choice, tokenizer: Tokenizer
) -> list[dict[str, Any] | None] | None:
    """Returns `prompt_logprobs`: for each prompt token, log probabilities by id of the token and of
    the likeliest ones. None where the request does not ask for them."""
    if plan.body.prompt_logprobs is None:
        return None
    prompt = plan.generations[choice.index].prompt_token_ids
    by_token: list[dict[str, Any] | None] = [None]
    for token_id, logprobs in zip(prompt[1:], choice.prompt_scores, strict=True):
        ranked = [(i, value, rank) for rank, (i, value) in enumerate(logprobs.top, start=1)]
        entries = [(token_id, logprobs.log_prob, logprobs.rank), *ranked]
        by_token.append(
            {
                str(i): {
                    "logprob": finite(value),
                    "rank": rank,
                    "decoded_token": tokenizer.decode([i], skip_special_tokens=False),
                }
                for i, value, rank in entries
            }
        )
    return by_token


def _offsets(prompt: Sequence[int], tokenizer: Tokenizer, echo_length: int) -> list[int]:
    """Returns the number of echoed characters before each token. Text that the tokenizer adds in
    front, such as a begin-of-sequence token, is not echoed and does not count."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    ends = list(accumulate(len(detokenizer.push((token_id,))) for token_id in prompt))
    num_added = ends[-1] + len(detokenizer.flush()) - echo_length
    return [max(end - num_added, 0) for end in [0, *ends[:-1]]]
