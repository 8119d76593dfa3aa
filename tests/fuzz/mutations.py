"""Requests that are nearly right: bodies of every route with values that break parsers, codecs and
arithmetic."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "then"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "ok"},
    {"role": "user", "content": "the"},
]
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
_SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "stop": ["x"],
    "stop_token_ids": [3],
    "min_tokens": 1,
    "ignore_eos": False,
    "priority": 1,
    "truncate_prompt_tokens": 50,
    "stream": False,
    "speculation": {"num_steps": 3, "algorithm": "NGRAM", "trace": False},
}
_GENERATION = {**_SAMPLING, "n": 1, "max_tokens": 4, "return_token_ids": True}
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **_GENERATION,
        "model": "fake",
        "messages": _MESSAGES,
        "tools": _TOOLS,
        "tool_choice": "auto",
        "logprobs": True,
        "top_logprobs": 2,
        "chat_template_kwargs": {"a": 1},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": _SCHEMA},
        },
    },
    "/v1/completions": {
        **_GENERATION,
        "model": "fake",
        "prompt": ["the", "then"],
        "logprobs": 2,
        "echo": True,
        "best_of": 2,
        "regex": "a+",
    },
    "/v1/responses": {
        **_SAMPLING,
        "model": "fake",
        "input": [
            {"type": "message", "role": "user", "content": "then"},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "ok"},
        ],
        "max_output_tokens": 4,
        "tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        "metadata": {"a": "b"},
        "store": True,
        "background": True,
        "previous_response_id": None,
        "conversation": None,
    },
    "/v1/messages": {
        **_SAMPLING,
        "model": "fake",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": "then"},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "1", "content": "ok"}],
            },
        ],
        "tools": [{"name": "f", "input_schema": _SCHEMA}],
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    },
    "/v1/messages/count_tokens": {
        "model": "fake",
        "messages": [{"role": "user", "content": "then"}],
    },
    "/generate": {
        "text": "then",
        "sampling_params": {"max_new_tokens": 4, "temperature": 0.5, "n": 1, "stop": "x"},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "logprob_start_len": 0,
        "rid": "r",
        "stream": False,
    },
    "/v1/responses/input_tokens": {"model": "fake", "input": "then", "instructions": "the"},
    "/v1/responses/compact": {
        "model": "fake",
        "input": [{"role": "user", "content": "then"}],
        "max_output_tokens": 4,
    },
    "/v1/conversations": {
        "items": [{"type": "message", "role": "user", "content": "then"}],
        "metadata": {"a": "b"},
    },
    "/tokenize": {"prompt": "then", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6], "skip_special_tokens": True},
    "/abort_request": {"rid": "nobody"},
    "/flush_cache": {},
    "/v1/embeddings": {"model": "fake", "input": "a"},
}
_WORDS = (
    "",
    "\ud800",
    "\x00",
    "a" * 5000,
    "é" * 300,
    "<|end|>",
    "{",
    "[" * 3000,
    "NaN",
    "\U0001f98a",
)
_NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63, -(2**63) - 1, 2**64, 10**30)
_FLOATS = (0.5, -0.0, 1e-320, 1e308, -1e308, float("nan"), float("inf"))


_PATHS = (
    "/v1/responses/{}",
    "/v1/responses/{}/cancel",
    "/v1/responses/{}/input_items",
    "/v1/responses/{}?stream=true&starting_after=-1",
    "/v1/responses/{}/input_items?limit=0&after={}",
    "/v1/conversations/{}",
    "/v1/conversations/{}/items",
    "/v1/conversations/{}/items/{}?order=asc",
    "/v1/models/{}",
    "/{}",
)
_NAMES = ("resp_1", "conv_1", "msg_1", "%00", "%ff%fe", "a" * 3000, "%2f..%2f", "%F0%9F%A6%8A", "")


def nasty_path(rng: random.Random) -> str:
    """Returns a path of a route with odd names in it."""
    path = rng.choice(_PATHS)
    return path.format(*(rng.choice(_NAMES) for _ in range(path.count("{}"))))


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


def nasty(rng: random.Random) -> Any:
    """Returns a value that some layer may not expect."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(_WORDS)
    if kind == 1:
        return rng.choice(_NUMBERS)
    if kind == 2:
        return rng.choice(_FLOATS)
    if kind == 3:
        return rng.choice((None, True, False, [], {}, [[]], [None], {"": None}))
    if kind == 4:
        return [nasty(rng) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {rng.choice(_WORDS)[:20]: nasty(rng) for _ in range(rng.randrange(3))}
    return _deep(rng.choice((3, 50, 127, 200, 400)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Returns every container of a value with each of its keys."""
    places, left = [], [value]
    while left:
        inside = left.pop()
        keys = inside if isinstance(inside, dict) else range(len(inside))
        for key in keys:
            places.append((inside, key))
            if isinstance(inside[key], (dict, list)):
                left.append(inside[key])
    return places


def mutated(body: dict[str, Any], rng: random.Random) -> Any:
    """Returns a body with some of its values changed, dropped or added."""
    body = copy.deepcopy(body)
    for key in list(body):
        if rng.random() < 0.3 and key not in ("model", "messages", "prompt", "input", "text"):
            del body[key]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        places = _places(body)
        if not places:
            break
        inside, last = rng.choice(places)
        if isinstance(inside, dict) and rng.random() < 0.1:
            del inside[last]
        else:
            inside[last] = nasty(rng)
    if rng.random() < 0.2:
        body["stream"] = True
    return body


def written(body: Any, rng: random.Random) -> bytes:
    """Returns a body as JSON, now and then not quite."""
    try:
        text = json.dumps(body, ensure_ascii=rng.random() < 0.8)
    except RecursionError:  # deep values inside deep values
        text = "[" * 3000
    content = text.encode(errors="surrogatepass")
    kind = rng.randrange(20)
    if kind == 0:
        return content[: rng.randrange(len(content) + 1)]
    if kind == 1:
        place = rng.randrange(len(content) + 1)
        return content[:place] + rng.randbytes(rng.randrange(1, 8)) + content[place:]
    if kind == 2:
        return rng.randbytes(rng.randrange(200))
    return content
