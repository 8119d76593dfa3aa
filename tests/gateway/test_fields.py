"""Fields beyond OpenAI's own: each honoured, whole and streamed, in every interface that has it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from tokenizers import Tokenizer as FastTokenizer

from gateway.app import Gateway
from gateway.generation import TargetModel, fingerprint
from gateway.model_text import ChatTemplate, ModelText
from gateway.settings import GatewaySettings
from shared.text import Tokenizer
from tests.gateway.driving import (
    CHAT,
    MESSAGES,
    PROMPT,
    MakeGateway,
    error_of,
    events,
    http_client,
    ids_of,
    post,
    say,
)
from tests.gateway.test_failures import COMPLETION
from tests.gateway.thinking_model import TEMPLATE
from tests.helpers.fake_target import FakeTarget

BOTH = (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION))


async def _choices(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> list[Any]:
    """Returns the choice of a whole answer, and the last one of a stream."""
    whole = await client.post(url, json=body)
    assert whole.status_code == 200, whole.text
    streamed = events((await client.post(url, json={**body, "stream": True})).content)
    return [whole.json()["choices"][0], streamed[-2]["choices"][0]]


@pytest.mark.parametrize(
    ("fields", "reason", "matched"),
    [
        ({"stop": "fox"}, "fox", "fox"),
        ({}, None, 0),
        ({"max_tokens": 2}, None, None),
    ],
)
async def test_choices_say_what_ended_them(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    fields: dict[str, Any],
    reason: Any,
    matched: Any,
) -> None:
    await say(target, tokenizer, "the quick fox jumps")
    for url, body in BOTH:
        for choice in await _choices(client, url, {"max_tokens": 50, **body, **fields}):
            assert (choice["stop_reason"], choice["matched_stop"]) == (reason, matched)


async def test_a_stop_token_is_a_reason(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    token_ids = await say(target, tokenizer, "the quick fox jumps")
    for url, body in BOTH:
        asked = {**body, "max_tokens": 50, "stop_token_ids": [token_ids[2]]}
        for choice in await _choices(client, url, asked):
            assert choice["stop_reason"] == choice["matched_stop"] == token_ids[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tokens_of_another_model_end_nothing(
    client: httpx.AsyncClient, target: FakeTarget, stream: bool
) -> None:
    for url, body in BOTH:
        asked = {**body, "stop_token_ids": [3, 119_690, -1], "stream": stream}
        response = await client.post(url, json=asked)
        assert response.status_code == 200
        assert "stop_token_ids" in response.headers["x-outrider-notice"]
        assert list(target.submits[-1].request.stop_params.stop_token_ids) == [3]


async def test_what_vllm_always_answers_is_null_unless_asked_for(
    client: httpx.AsyncClient,
) -> None:
    chat = (await client.post("/v1/chat/completions", json=CHAT)).json()
    text = (await client.post("/v1/completions", json=COMPLETION)).json()["choices"][0]
    places = [chat["prompt_token_ids"], chat["prompt_logprobs"], chat["choices"][0]["token_ids"]]
    places += [text["prompt_token_ids"], text["prompt_logprobs"], text["token_ids"]]
    assert places == [None] * 6
    usage = chat["usage"]
    assert usage["reasoning_tokens"] == usage["completion_tokens_details"]["reasoning_tokens"] == 0


async def test_the_stop_string_stays_by_sglangs_name(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the quick fox jumps")
    asked = {"stop": "fox", "no_stop_trim": True, "max_tokens": 50}
    for url, body in BOTH:
        whole = (await client.post(url, json={**body, **asked})).json()["choices"][0]
        streamed = await client.post(url, json={**body, **asked, "stream": True})
        choices = [chunk["choices"][0] for chunk in events(streamed.content)[:-1]]
        deltas = [
            choice.get("delta", {}).get("content") or choice.get("text") for choice in choices
        ]
        text = whole["text"] if "text" in whole else whole["message"]["content"]
        assert text == "the quick fox"
        assert "".join(filter(None, deltas)) == "the quick fox"


async def test_tokens_are_named_by_their_ids(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    (first, *_) = await say(target, tokenizer, "the fox")
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    completion = {**COMPLETION, **asked, "logprobs": 1}
    whole = (await client.post("/v1/completions", json=completion)).json()
    found = whole["choices"][0]["logprobs"]
    assert found["tokens"] == list(found["top_logprobs"][0]) == [f"token_id:{first}"]
    streamed = await client.post("/v1/completions", json={**completion, "stream": True})
    assert b'"tokens":["token_id:%d"]' % first in streamed.content
    chat = {**CHAT, **asked, "logprobs": True, "top_logprobs": 1}
    whole = (await client.post("/v1/chat/completions", json=chat)).json()
    (entry,) = whole["choices"][0]["logprobs"]["content"]
    assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{first}"
    streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True})
    assert b'"token":"token_id:%d"' % first in streamed.content
    echo = {**COMPLETION, **asked, "logprobs": 0, "echo": True}
    whole = (await client.post("/v1/completions", json=echo)).json()
    names = whole["choices"][0]["logprobs"]["tokens"]
    assert all(name.startswith("token_id:") for name in names)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "kept"), [(2, 2), (-1, 4), (4000, 5)])
async def test_only_the_end_of_a_prompt_is_kept(
    client: httpx.AsyncClient, target: FakeTarget, asked: int, kept: int, stream: bool
) -> None:
    prompt = [5, 6, 7, 8, 9]
    max_tokens = 4092 if asked == -1 else 2
    body = {**COMPLETION, "prompt": prompt, "truncate_prompt_tokens": asked, "stream": stream}
    response = await client.post("/v1/completions", json={**body, "max_tokens": max_tokens})
    assert response.status_code == 200
    assert list(target.submits[0].request.prompt_token_ids) == prompt[-kept:]
    for url, sent in (
        ("/v1/completions", {**body, "max_tokens": max_tokens}),
        (
            "/generate",
            {
                "input_ids": prompt,
                "truncate_prompt_tokens": asked,
                "sampling_params": {"max_new_tokens": max_tokens},
            },
        ),
    ):
        await client.post(url, json={**sent, "truncation_side": "right"})
        assert list(target.submits[-1].request.prompt_token_ids) == prompt[:kept]


@pytest.mark.parametrize("side", ["left", "right"])
async def test_what_is_cut_off_a_prompt_is_not_echoed(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, side: str
) -> None:
    body = {**COMPLETION, "prompt": "the quick fox", "echo": True, "max_tokens": 3}
    cut = {**body, "truncate_prompt_tokens": 2, "truncation_side": side, "logprobs": 0}
    choice = (await client.post("/v1/completions", json=cut)).json()["choices"][0]
    kept = tokenizer.decode(target.submits[0].request.prompt_token_ids, skip_special_tokens=False)
    assert choice["text"].startswith(kept)
    tokens, places = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert places == [len("".join(tokens[:number])) for number in range(len(tokens))]
    whole = await client.post("/v1/completions", json={**body, "truncate_prompt_tokens": 2000})
    assert whole.json()["choices"][0]["text"].startswith("the quick fox")


async def test_a_long_text_is_cut_where_it_may_be(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    body = {**COMPLETION, "prompt": "the " * 50_000, "truncate_prompt_tokens": 3, "max_tokens": 2}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    assert len(target.submits[0].request.prompt_token_ids) == 3
    for wrong in (0, -2, 4096):
        response = await client.post(
            "/v1/completions", json={**body, "truncate_prompt_tokens": wrong}
        )
        assert (await error_of(response))[:2] == (400, "truncate_prompt_tokens")


async def test_a_grammar_of_the_whole_output_leaves_no_reasoning(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    """Even if the prompt has opened it: the grammar does not let the model close it."""
    assert thinking_text.template is not None
    opened = thinking_text.template.replaced(f"{TEMPLATE}<think>")
    gateway = await make_gateway(target, text=replace(thinking_text, template=opened))
    await say(target, thinking_text.tokenizer, "the fox")
    body = {**CHAT, "guided_grammar": 'root ::= "the fox"'}
    message = (await post(gateway, "/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert message["content"] == "the fox"
    assert "reasoning_content" not in message
    # What has to be JSON to be combined with reasoning, and is not, is the client's error.
    for field in ("guided_json", "structural_tag"):
        refused = await post(gateway, "/v1/chat/completions", {**CHAT, field: "not json"})
        assert (await error_of(refused))[::2] == (400, "grammar_invalid")


@pytest.mark.parametrize("stop", [None, ["zzz"]])
async def test_reasoning_that_is_cut_off_has_the_outputs_tokens(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText, stop: Any
) -> None:
    assert thinking_text.template is not None
    opened = thinking_text.template.replaced(f"{TEMPLATE}<think>")
    gateway = await make_gateway(target, text=replace(thinking_text, template=opened))
    await say(target, thinking_text.tokenizer, "the quick brown fox jumps")
    body = {**CHAT, "max_tokens": 3, "stop": stop}
    usage = (await post(gateway, "/v1/chat/completions", body)).json()["usage"]
    assert usage["completion_tokens"] == usage["reasoning_tokens"] == 3


@pytest.mark.parametrize("final", ["the quick", "<", "end", "the "])
async def test_the_answer_continues_the_last_message(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, final: str
) -> None:
    """Even where the template's own end of a message holds the same text."""
    messages = [*MESSAGES, {"role": "assistant", "content": final}]
    expected = await ids_of(tokenizer, PROMPT + final)
    body = {**CHAT, "messages": messages, "continue_final_message": True, "max_tokens": 2}
    claude = {"model": "fake", "messages": messages, "max_tokens": 2}
    for url, asked in (("/v1/chat/completions", body), ("/v1/messages", claude)):
        assert (await client.post(url, json=asked)).status_code == 200
        assert list(target.submits[-1].request.prompt_token_ids) == expected
    for wrong in ({"add_generation_prompt": True}, {"messages": [{"role": "user", "content": ""}]}):
        response = await client.post("/v1/chat/completions", json={**body, **wrong})
        assert (await error_of(response))[:2] == (400, "continue_final_message")


ROLES = (
    "{% for m in messages %}{% if m.role == 'critic' %}({{ m.content }})"
    "{% elif m['role'] in ['user', 'system'] %}[{{ m.content }}]"
    "{% elif m.role == 'loud' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_role_may_be_the_templates_own(
    make_gateway: MakeGateway,
    target: FakeTarget,
    text: ModelText,
    tokenizer: Tokenizer,
    stream: bool,
) -> None:
    gateway = await make_gateway(target, text=replace(text, template=ChatTemplate(ROLES, {})))
    mine = [*MESSAGES, {"role": "critic", "content": "the fox"}]
    body = {**CHAT, "messages": mine, "max_tokens": 2, "stream": stream}
    assert (await post(gateway, "/v1/chat/completions", body)).status_code == 200
    sent = target.submits[-1].request.prompt_token_ids
    assert list(sent) == await ids_of(tokenizer, "[then](the fox)")
    for role in ("judge", "loud", "function"):
        wrong = {**body, "messages": [*MESSAGES, {"role": role, "content": "then"}]}
        status, param, code, message = await error_of(
            await post(gateway, "/v1/chat/completions", wrong)
        )
        assert (status, param, code) == (400, "messages[1].role", "role_unknown")
        assert message.endswith("it takes critic, system, user"), message
        assert repr(role) in message
    many = [{"role": f"r{n}", "content": "a"} for n in range(9)]
    refused = await post(gateway, "/v1/chat/completions", {**body, "messages": many})
    assert (await error_of(refused))[:3] == (400, "messages", "roles_out_of_range")


async def test_a_template_that_writes_every_role_takes_it(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    body = {**CHAT, "messages": [{"role": "judge", "content": "then"}], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    expected = await ids_of(tokenizer, "<|judge|>then<|end|><|assistant|>")
    assert list(target.submits[-1].request.prompt_token_ids) == expected


@pytest.mark.parametrize(
    ("role", "asked", "is_echoed"),
    [
        ("assistant", {"continue_final_message": True}, True),
        ("assistant", {}, True),
        ("user", {}, False),
        ("user", {"add_generation_prompt": False}, True),
        ("assistant", {"echo": False}, False),
    ],
)
async def test_a_chat_echoes_the_message_that_it_continues(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    role: str,
    asked: dict[str, Any],
    is_echoed: bool,
) -> None:
    await say(target, tokenizer, " brown fox", per_step=1)
    content = [{"type": "text", "text": "the quick"}]
    messages = [*MESSAGES, {"role": role, "content": content}]
    body = {**CHAT, "messages": messages, "echo": True, "n": 2, **asked}
    expected = "the quick brown fox" if is_echoed else " brown fox"
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == [expected] * 2
    usage = {"include_usage": True, "continuous_usage_stats": True}
    options = {"stream": True, "stream_options": usage}
    streamed = events(
        (await client.post("/v1/chat/completions", json={**body, **options})).content
    )[:-1]
    assert all(event["usage"] for event in streamed)
    for index in range(2):
        choices = [c for event in streamed for c in event["choices"] if c["index"] == index]
        texts = [choice["delta"].get("content", "") for choice in choices]
        assert "".join(texts) == expected
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}


async def test_a_chat_may_bring_its_prompt_as_tokens(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    body = {**CHAT, "input_ids": [5, 6], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert list(target.submits[0].request.prompt_token_ids) == [5, 6]
    response = await client.post("/v1/chat/completions", json={**body, "input_ids": [512]})
    assert (await error_of(response))[:2] == (400, "input_ids")


async def test_thoughts_that_are_not_set_apart_are_text(
    make_gateway: MakeGateway, target: FakeTarget, thinking_text: ModelText
) -> None:
    await say(target, thinking_text.tokenizer, "<think>the fox</think>jumps")
    gateway = await make_gateway(target, text=thinking_text)
    body = {**CHAT, "separate_reasoning": False, "max_tokens": 50}
    message = (await post(gateway, "/v1/chat/completions", body)).json()["choices"][0]["message"]
    assert message["content"] == "<think>the fox</think>jumps"
    assert "reasoning" not in message
    streamed = await post(gateway, "/v1/chat/completions", {**body, "stream": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in events(streamed.content)[:-1]]
    assert "".join(each.get("content") or "" for each in deltas) == message["content"]
    assert not any("reasoning" in each for each in deltas)
    response = await post(gateway, "/v1/chat/completions", {**body, "regex": "a"})
    assert (await error_of(response))[:2] == (400, "separate_reasoning")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/responses", {"model": "fake", "input": "then", "max_output_tokens": 9}),
        ("/v1/messages", {"model": "fake", "messages": MESSAGES, "max_tokens": 9}),
        ("/v1/chat/completions", {**CHAT, "max_tokens": 9}),
        ("/v1/completions", {**COMPLETION, "max_tokens": 9}),
    ],
)
async def test_every_interface_takes_the_sampling_fields(
    client: httpx.AsyncClient,
    target: FakeTarget,
    tokenizer: Tokenizer,
    url: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    body = {**body, "stream": stream}
    fields = {
        "top_k": 7,
        "min_p": 0.25,
        "presence_penalty": 1.0,
        "logit_bias": {"3": 2.0},
        "allowed_token_ids": [3, 4, 3],
        "bad_words": ["fox"],
        "min_tokens": 2,
        "stop_token_ids": [9],
        "ignore_eos": True,
        "priority": 3,
        "cache_salt": "mine",
        "prediction": {"type": "content", "content": [{"type": "text", "text": "the fox"}]},
    }
    response = await client.post(url, json={**body, **fields})
    assert response.status_code == 200, response.text
    request = target.submits[0].request
    params, stop = request.sampling_params, request.stop_params
    assert (params.top_k, params.min_p, params.presence_penalty) == (7, 0.25, 1.0)
    assert dict(params.logit_bias) == {3: 2.0}
    assert list(params.allowed_token_ids) == [3, 4]
    runs = [await ids_of(tokenizer, word) for word in ("fox", " fox")]
    assert [list(run.token_ids) for run in params.bad_words] == runs
    assert (stop.min_output_token_count, list(stop.stop_token_ids)) == (2, [9])
    assert (stop.ignore_eos, request.priority) == (True, 3)
    assert request.cache_salt == "mine"
    assert list(request.predicted_token_ids) == await ids_of(tokenizer, "the fox")
    refused = await client.post(url, json={**body, "min_p": 2})
    assert refused.status_code == 400
    assert "min_p" in refused.text


async def test_answers_carry_a_fingerprint(client: httpx.AsyncClient) -> None:
    found = set()
    for url, body in BOTH:
        whole = (await client.post(url, json={**body, "max_tokens": 2})).json()
        streamed = await client.post(url, json={**body, "max_tokens": 2, "stream": True})
        found |= {whole["system_fingerprint"]}
        found |= {chunk["system_fingerprint"] for chunk in events(streamed.content)[:-1]}
    (fingerprint,) = found
    assert fingerprint.startswith("fp_")


@pytest.mark.parametrize("field", ["lora_path", "custom_logit_processor", "logits_processors"])
async def test_what_needs_more_than_the_target_has_is_refused(
    client: httpx.AsyncClient, gateway: Gateway, field: str
) -> None:
    for url, body in BOTH:
        response = await client.post(url, json={**body, field: "x"})
        assert (await error_of(response))[:3] == (400, field, "not_implemented")


async def test_a_model_has_further_names(make_gateway: MakeGateway, target: FakeTarget) -> None:
    gateway = await make_gateway(target, settings=GatewaySettings(model_alias=("claude", "gpt")))
    async with http_client(gateway) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [(each["id"], each["root"]) for each in listed] == [
            ("claude", "fake"), ("fake", "fake"), ("gpt", "fake"),
        ]  # fmt: skip
        assert (await client.get("/v1/models/gpt")).json()["root"] == "fake"
        body = {**CHAT, "model": "claude", "max_tokens": 2}
        answer = await client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["model"]) == (200, "fake")
        unknown = await client.post("/v1/chat/completions", json={**body, "model": "other"})
        assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [512]}, "allowed_token_ids"),
        ({"bad_words": ["so", " "]}, "bad_words[1]"),
        ({"bad_words": ["x" * 65]}, "bad_words[0]"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        (
            {"prediction": {"content": [{"type": "image_url", "text": "x"}]}},
            "prediction.content[0].type",
        ),
        ({"prediction": {"content": "x" * 5_000_000}}, "prediction"),
        ({"input_ids": []}, "input_ids"),
        ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
async def test_wrong_limits_of_tokens_are_refused_by_name(
    make_gateway: MakeGateway, target: FakeTarget, marked: ModelText, fields: Any, named: str
) -> None:
    gateway = await make_gateway(target, text=marked)
    response = await post(gateway, "/v1/chat/completions", {**CHAT, **fields})
    assert (await error_of(response))[:2] == (400, named)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cache_salt": ""}, "cache_salt has 0 characters; it must have [1, 256]"),
        ({"bad_words": ["x"] * 257}, "bad_words has 257 words; it must have at most 256"),
        ({"stop": ["x"] * 17}, "stop has 17 strings; it must have at most 16"),
        ({"logit_bias": {"512": 1}}, "logit_bias holds token 512; ids must be in [0, 512)"),
    ],
)
async def test_a_limit_says_what_it_counts(
    client: httpx.AsyncClient, fields: dict[str, Any], message: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert (await error_of(response))[::3] == (400, message)


@pytest.fixture(scope="session")
def marked(thinking_text: ModelText, model_folder: Path) -> ModelText:
    """The thinking model with marks of one token each, as models that think have them."""
    tokenizer = FastTokenizer.from_file(str(model_folder / "tokenizer.json"))
    tokenizer.add_tokens(["<think>", "</think>"])
    return replace(thinking_text, tokenizer=Tokenizer(tokenizer))


@pytest.mark.parametrize("is_open", [False, True])
async def test_thoughts_have_a_budget(
    make_gateway: MakeGateway, target: FakeTarget, marked: ModelText, is_open: bool
) -> None:
    gateway = await make_gateway(target, text=marked)
    end = "<think>" if is_open else ""
    messages = [{"role": "user", "content": "then"}, {"role": "assistant", "content": end or "so"}]
    chat = {**CHAT, "messages": messages, "max_tokens": 9}
    start, stop = (marked.tokenizer.encode_word(mark)[0] for mark in ("<think>", "</think>"))
    for body in (
        {"continue_final_message": True},
        {"continue_final_message": True, "stream": True},
    ):
        asked = {**chat, **body, "thinking_token_budget": 2**40}
        assert (await post(gateway, "/v1/chat/completions", asked)).status_code == 200
        budget = target.submits[-1].request.sampling_params.thinking
        assert (budget.max_tokens, budget.end_token_id) == (4096, stop)
        assert budget.HasField("start_token_id") != is_open
        assert is_open or budget.start_token_id == start


async def test_a_model_without_thoughts_needs_no_budget(
    client: httpx.AsyncClient,
    make_gateway: MakeGateway,
    target: FakeTarget,
    thinking_text: ModelText,
) -> None:
    asked = {**CHAT, "max_tokens": 2, "thinking_token_budget": 4}
    assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
    assert not target.submits[-1].request.sampling_params.HasField("thinking")
    for field, value in (
        ("thinking_token_budget", -1),
        ("thinking", {"type": "enabled", "budget_tokens": -1}),
    ):
        for url in ("/v1/chat/completions", "/v1/messages"):
            response = await client.post(url, json={**GENERATING[url], field: value})
            error = response.json()["error"]
            assert (response.status_code, field in error["message"]) == (400, True)
    gateway = await make_gateway(target, text=thinking_text)  # whose marks are many tokens
    for url, body in (("/v1/chat/completions", asked), ("/v1/completions", COMPLETION)):
        response = await post(gateway, url, {**body, "thinking_token_budget": 4})
        assert (await error_of(response))[:3] == (400, "thinking_token_budget", "not_implemented")


async def test_anthropics_budget_bounds_the_thoughts(
    make_gateway: MakeGateway, target: FakeTarget, marked: ModelText, thinking_text: ModelText
) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body = {"model": "fake", "messages": MESSAGES, "max_tokens": 2000, "thinking": thinking}
    for path in ("/v1/messages", "/v1/chat/completions"):
        gateway = await make_gateway(target, text=marked)
        assert (await post(gateway, path, body)).status_code == 200
        assert target.submits[-1].request.sampling_params.thinking.max_tokens == 1024
        gateway = await make_gateway(target, text=thinking_text)
        answer = await post(gateway, path, body)
        assert answer.status_code == 200
        assert "budget_tokens" in answer.headers["x-outrider-notice"]


async def test_usage_is_there_from_the_first_chunk_on(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the quick fox jumps", per_step=2)
    options = {"include_usage": True, "continuous_usage_stats": True}
    for url, body in BOTH:
        asked = {**body, "max_tokens": 50, "stream": True, "stream_options": options}
        chunks = events((await client.post(url, json=asked)).content)[:-1]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        if url.endswith("chat/completions"):
            assert counts[0] == 0  # beside the role nothing is told yet
        assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in chunks)


async def test_answers_tell_their_times_and_their_tier(client: httpx.AsyncClient) -> None:
    for url, body in BOTH:
        asked = {**body, "max_tokens": 7, "service_tier": "flex"}
        whole = (await client.post(url, json=asked)).json()
        options = {"include_usage": True}
        stream = {**asked, "stream": True, "stream_options": options}
        chunks = events((await client.post(url, json=stream)).content)[:-1]
        for answer in (whole, chunks[-1]):
            timings = answer["timings"]
            num_predicted = answer["usage"]["completion_tokens"]
            assert timings["predicted_n"] == num_predicted
            assert timings["prompt_n"] == answer["usage"]["prompt_tokens"]
            assert timings["prompt_ms"] > 0.0
            assert timings["predicted_ms"] > 0.0
            rate = 1e3 * num_predicted / timings["predicted_ms"]
            assert timings["predicted_per_second"] == pytest.approx(rate)
            assert timings["draft_n_accepted"] <= timings["draft_n"]
        tiers = {each["service_tier"] for each in (whole, *chunks)}
        assert tiers == {"default"}
        del asked["service_tier"]
        assert "service_tier" not in (await client.post(url, json=asked)).json()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tier_that_openai_does_not_have_is_refused(
    client: httpx.AsyncClient, stream: bool
) -> None:
    of_responses = {"model": "fake", "input": "then"}
    for url, body in (*BOTH, ("/v1/responses", of_responses)):
        for tier in ("auto", "default", "flex", "scale", "priority", None):
            asked = {**body, "service_tier": tier}
            assert (await client.post(url, json=asked)).status_code == 200
        asked = {**body, "stream": stream, "service_tier": "bogus"}
        status, field, _, message = await error_of(await client.post(url, json=asked))
        assert (status, field) == (400, "service_tier")
        assert "'bogus'" in message
        assert "'flex'" in message


async def test_the_fingerprint_is_that_of_weights_and_settings() -> None:
    model = TargetModel("m", "0", 100, 50, frozenset({0}), output_fingerprint="a")
    others = {
        fingerprint(model),
        fingerprint(replace(model, output_fingerprint="b")),
        fingerprint(replace(model, weight_version="2")),
    }
    assert len(others) == 3
    assert fingerprint(replace(model, draft_algorithms=("NGRAM",))) in others


async def test_tokens_that_a_request_names_have_log_probabilities(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    (first, *_) = await say(target, tokenizer, "the fox")
    asked = {"logprob_token_ids": [7, 9, 7], "max_tokens": 1, "return_tokens_as_token_ids": True}
    chat = {**CHAT, **asked, "logprobs": True, "top_logprobs": 1}
    whole = (await client.post("/v1/chat/completions", json=chat)).json()
    (entry,) = whole["choices"][0]["logprobs"]["content"]
    named = [(each["token"], each["logprob"]) for each in entry["top_logprobs"]]
    # As vLLM does: these and the drawn one, in place of the likeliest.
    assert named == [(f"token_id:{first}", -0.5), ("token_id:7", -7.0), ("token_id:9", -9.0)]
    assert target.submits[-1].request.top_logprob_count == 0
    streamed = await client.post("/v1/chat/completions", json={**chat, "stream": True})
    assert b'"token":"token_id:9","logprob":-9.0' in streamed.content
    completion = {**COMPLETION, **asked, "logprobs": 0}
    whole = (await client.post("/v1/completions", json=completion)).json()
    (top,) = whole["choices"][0]["logprobs"]["top_logprobs"]
    assert top == {"token_id:7": -7.0, "token_id:9": -9.0, f"token_id:{first}": -0.5}
    assert next(iter(top)) == f"token_id:{first}"  # the drawn one
    for url, body in BOTH:
        for wrong in ([512], list(range(129)), [-1]):
            response = await client.post(
                url, json={**body, "logprobs": 1, "logprob_token_ids": wrong}
            )
            assert (await error_of(response))[:2] == (400, "logprob_token_ids")
        response = await client.post(url, json={**body, "logprob_token_ids": [1]})
        assert (await error_of(response))[:3] == (400, "logprob_token_ids", "logprobs_off")
    scored = {**completion, "max_tokens": 0, "echo": True}
    response = await client.post("/v1/completions", json=scored)
    assert (await error_of(response))[:3] == (400, "logprob_token_ids", "output_empty")


GENERATING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": {"model": "fake", "input": "then"},
    "/v1/messages": {"model": "fake", "max_tokens": 4, "messages": MESSAGES},
    "/generate": {"text": "then"},
}
_REFUSED: dict[str, Any] = {
    "custom_logit_processor": "x",
    "documents": [{"a": "b"}],
    "input_embeds": [[0.5]],
    "length_penalty": 0.5,
    "lora_path": "x",
    "mirostat": 2,
    "kv_transfer_params": {"prompt_token_ids": [5]},
    "moderation": {"model": "x"},
    "repetition_detection": {"max_pattern_size": 4},
    "return_sampling_mask": True,
    "return_prompt_token_ids": True,
    "routed_experts_start_len": 3,
    "use_beam_search": True,
    "watermark": {"enabled": True},
}
_OF_OTHERS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "best_of": 2,
        "prompt": "x",
        "reasoning_format": "none",
        "return_routed_experts": True,
        "suffix": "x",
    },
    "/v1/completions": {
        "chat_template_kwargs": {"a": 1},
        "input_ids": [5],
        "enable_thinking": True,
        "max_completion_tokens": 3,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "verbosity": "low",
    },
    "/v1/responses": {
        "echo": True,
        "guided_json": {"type": "object"},
        "input_ids": [5],
        "logprobs": True,
        "max_tokens": 3,
        "n": 2,
        "response_format": {"type": "json_object"},
        "verbosity": "low",
    },
    "/v1/messages": {
        "n": 2,
        "parallel_tool_calls": False,
        "compaction": {"type": "summary"},
        "reasoning_effort": "low",
        "regex": "a",
        "separate_reasoning": False,
        "top_logprobs": 2,
    },
    "/generate": {
        "logit_bias": {"5": 1},
        "max_tokens": 3,
        "stop": "o",
        "stop_regex": "o",
        "temperature": 0.5,
        "max_thinking_tokens": 3,
        "thinking_token_budget": 3,
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", GENERATING)
async def test_what_would_change_the_answer_is_refused_by_name(
    client: httpx.AsyncClient, path: str, stream: bool
) -> None:
    for name, value in (_REFUSED | _OF_OTHERS[path]).items():
        body = {**GENERATING[path], "stream": stream, name: value}
        response = await client.post(path, json=body)
        assert response.status_code == 400, (name, response.text)
        error = response.json()["error"]
        refusal = rf"(.* )?{re.escape(name)} is (not implemented|named \S+ here)"
        assert re.fullmatch(refusal, error["message"])
        assert error.get("param", name) == name
        absent = await client.post(path, json={**body, name: None})
        assert absent.status_code == 200, absent.text


async def test_what_a_message_asks_for_is_refused_by_name(client: httpx.AsyncClient) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "the", "prefix": True}]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert (await error_of(response))[:3] == (400, "messages[1].prefix", "not_implemented")


THINKS = "{{ 'on' if enable_thinking else 'off' if enable_thinking is false else 'free' }}"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "free"),
        ({"thinking": {"type": "enabled"}}, "on"),
        ({"thinking": {"type": "disabled"}}, "off"),
        ({"thinking": {"type": "adaptive"}}, "free"),
        ({"enable_thinking": False}, "off"),
        ({"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}}, "on"),
    ],
)
async def test_the_template_hears_whether_to_think(
    make_gateway: MakeGateway,
    target: FakeTarget,
    text: ModelText,
    fields: dict[str, Any],
    told: str,
    stream: bool,
) -> None:
    gateway = await make_gateway(target, text=replace(text, template=ChatTemplate(THINKS, {})))
    body = {**CHAT, "max_tokens": 2, "stream": stream, **fields}
    assert (await post(gateway, "/v1/chat/completions", body)).status_code == 200
    sent = target.submits[-1].request.prompt_token_ids
    assert list(sent) == await ids_of(text.tokenizer, told)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
async def test_every_chat_hands_variables_to_the_template(
    make_gateway: MakeGateway, target: FakeTarget, text: ModelText, path: str
) -> None:
    gateway = await make_gateway(target, text=replace(text, template=ChatTemplate(THINKS, {})))
    body = {**GENERATING[path], "chat_template_kwargs": {"enable_thinking": True}}
    assert (await post(gateway, path, body)).status_code == 200
    sent = target.submits[-1].request.prompt_token_ids
    assert list(sent) == await ids_of(text.tokenizer, "on")


async def test_caches_are_kept_apart_by_sglangs_name(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    for path, body in GENERATING.items():
        for fields, salt in (
            ({"extra_key": "a"}, "a"),
            ({"extra_key": "a", "cache_salt": "b"}, "ba"),
            ({"extra_key": ""}, ""),
        ):
            assert (await client.post(path, json={**body, **fields})).status_code == 200
            assert target.submits[-1].request.cache_salt == salt, path


async def test_an_id_that_every_chunk_would_repeat_is_short(client: httpx.AsyncClient) -> None:
    for url in ("/v1/chat/completions", "/v1/completions", "/generate"):
        response = await client.post(url, json={**GENERATING[url], "rid": "x" * 129})
        assert (await error_of(response))[:2] == (400, "rid")


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_has_the_id_that_its_request_gives(
    client: httpx.AsyncClient, stream: bool
) -> None:
    for url, body in BOTH:
        answer = await client.post(url, json={**body, "rid": "mine", "stream": stream})
        first = events(answer.content)[0] if stream else answer.json()
        assert first["id"] == "mine"


@pytest.mark.parametrize("path", GENERATING)
async def test_what_asks_for_nothing_is_not_refused(client: httpx.AsyncClient, path: str) -> None:
    neutral = {"best_of": 1, "length_penalty": 1.0, "n": 1, "tools": [], "use_beam_search": False}
    if path == "/v1/responses":
        neutral |= {"image": {"context_compression": "auto"}}
    if path == "/v1/messages":
        neutral |= {"response_format": {"type": "text"}, "separate_reasoning": True}
    if path in ("/v1/completions", "/generate"):  # which tell no thoughts from text
        neutral |= {"separate_reasoning": False, "include_reasoning": False}
    assert (await client.post(path, json={**GENERATING[path], **neutral})).status_code == 200


async def test_counting_needs_no_field_of_sampling(client: httpx.AsyncClient) -> None:
    body = {**GENERATING["/v1/messages"], "temperature": 0.5, "stop": "o", "n": 2}
    assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_repeats_who_asked_and_tells_its_times(
    client: httpx.AsyncClient, stream: bool
) -> None:
    asked = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    body = {"model": "fake", "input": "then", "stream": stream, **asked}
    response = await client.post("/v1/responses", json={**body, "service_tier": "flex"})
    answer = response.json() if not stream else None
    if answer is None:
        answer = orjson.loads(response.text.splitlines()[-2].removeprefix("data: "))["response"]
    assert {name: answer[name] for name in asked} == asked
    assert answer["service_tier"] == "default"
    assert answer["system_fingerprint"].startswith("fp_")
    assert answer["timings"]["predicted_n"] == answer["usage"]["output_tokens"] > 0
    plain = (await client.post("/v1/responses", json={**GENERATING["/v1/responses"]})).json()
    assert [plain[name] for name in (*asked, "service_tier")] == [None] * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_tells_its_times(client: httpx.AsyncClient, stream: bool) -> None:
    body = {**GENERATING["/v1/messages"], "stream": stream}
    response = await client.post("/v1/messages", json=body)
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [orjson.loads(line) for line in data] if stream else [response.json()]
    head = events[0]["message"] if stream else events[0]
    last = events[-2] if stream else events[0]
    assert head["system_fingerprint"].startswith("fp_")
    assert last["timings"]["predicted_n"] == last["usage"]["output_tokens"] > 0
