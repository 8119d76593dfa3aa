"""Log probabilities of prompts, the best of several choices, and whose turn it is."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.bodies import echoed_logprobs
from gateway.choice import Choice
from gateway.generation import Generation, TargetModel
from gateway.planner import Plan, TextOptions
from gateway.schema import CompletionRequest
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.text import Tokenizer
from shared.tokens import SamplingParams, StopParams, TokenLogprobs
from tests.gateway.driving import CHAT, error_of, events, http_client, ids_of, in_steps
from tests.helpers.fake_target import FakeTarget

BODY = {"model": "fake", "prompt": "then the fox", "max_tokens": 2, "temperature": 0}


async def _post(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Any:
    response = await client.post(url, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_echo_with_logprobs_begins_with_null(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    body = {**BODY, "echo": True, "logprobs": 2}
    [choice] = (await _post(client, "/v1/completions", body))["choices"]
    prompt = await ids_of(tokenizer, "then the fox")
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("then the fox")
    assert len(logprobs["tokens"]) == len(prompt) + 2
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    assert all(value == -0.5 for value in logprobs["token_logprobs"][1:])
    assert len(logprobs["top_logprobs"][1]) == 2
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)
    params = target.submits[-1].request.prompt_logprob_params
    assert (params.start_position, params.top_logprob_count) == (0, 2)


@pytest.mark.parametrize("as_ids", [False, True])
async def test_special_tokens_of_a_prompt_are_echoed(
    client: httpx.AsyncClient, tokenizer: Tokenizer, as_ids: bool
) -> None:
    prompt = "<|end|>then<|end|> fox"
    token_ids = await ids_of(tokenizer, prompt)
    given = token_ids if as_ids else prompt
    body = {**BODY, "prompt": given, "echo": True, "logprobs": 1}
    [choice] = (await _post(client, "/v1/completions", body))["choices"]
    assert choice["text"].startswith(prompt)
    logprobs = choice["logprobs"]
    tokens = logprobs["tokens"][: len(token_ids)]
    assert tokens.count("<|end|>") == 2
    for token, offset in zip(tokens, logprobs["text_offset"], strict=False):
        assert choice["text"][offset:].startswith(token)


def test_what_a_tokenizer_puts_before_a_text_has_no_characters(tokenizer: Tokenizer) -> None:
    choice = Choice(0, tokenizer, TextOptions())
    (word,) = tokenizer.encode_word("the")
    choice.prompt_scores.append(TokenLogprobs(-0.5, 1, ()))
    generation = Generation("r", [0, word], SamplingParams(), StopParams(1))
    body, model = CompletionRequest(prompt="the"), TargetModel("m", "", 9, 320, frozenset())
    plan = Plan("r", 0, body, model, (generation,), 1, TextOptions(), echoed_texts=("the",))
    scores = echoed_logprobs(plan, choice, (), tokenizer)
    assert scores["text_offset"] == [0, 0]


async def test_stream_says_the_same_as_the_whole(client: httpx.AsyncClient) -> None:
    body = {
        **BODY,
        "echo": True,
        "logprobs": 1,
        "prompt": ["then", "the<|end|>fox"],
        "n": 2,
        "seed": 1,
    }
    whole = await _post(client, "/v1/completions", body)
    response = await client.post("/v1/completions", json={**body, "stream": True})
    chunks = events(response.content)[:-1]
    for choice in whole["choices"]:
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(each["text"] for each in own) == choice["text"]
        for key, value in choice["logprobs"].items():
            parts = [each["logprobs"][key] for each in own if each["logprobs"]]
            assert [entry for part in parts for entry in part] == value, key


async def test_scoring_alone_asks_for_no_token(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    body = {**BODY, "echo": True, "logprobs": 0, "max_tokens": 0}
    for stream in (False, True):
        response = await client.post("/v1/completions", json={**body, "stream": stream})
        if stream:
            choices = [chunk["choices"][0] for chunk in events(response.content)[:-1]]
            assert "".join(choice["text"] for choice in choices) == "then the fox"
            assert choices[-1]["finish_reason"] == "length"
            continue
        [choice] = response.json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("then the fox", "length")
        assert len(choice["logprobs"]["tokens"]) == response.json()["usage"]["prompt_tokens"]
        assert response.json()["usage"]["completion_tokens"] == 0
    assert target.submits[-1].request.stop_params.max_output_token_count == 1
    for number in (0, -1):
        refused = await client.post("/v1/completions", json={**BODY, "max_tokens": number})
        assert (await error_of(refused))[:2] == (400, "max_tokens")
        assert f"max_tokens is {number}; it must be at least 1" in refused.text


async def test_prompt_logprobs_by_token_id(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = await _post(client, "/v1/completions", {**BODY, "prompt_logprobs": 1})
    prompt = await ids_of(tokenizer, "then the fox")
    found = answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [set(each) for each in found[1:]] == [{str(token_id)} for token_id in prompt[1:]]
    text = tokenizer.decode(prompt[1:2])
    assert found[1][str(prompt[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": text}
    chat = await _post(
        client, "/v1/chat/completions", {**CHAT, "max_tokens": 1, "prompt_logprobs": 0}
    )
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


@pytest.mark.parametrize("start", [0, 2])
async def test_generate_names_the_inputs_from_where_it_is_asked(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, start: int
) -> None:
    body = {
        "text": "then the fox", "return_logprob": True, "logprob_start_len": start,
        "top_logprobs_num": 1, "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    prompt = await ids_of(tokenizer, "then the fox")
    for stream in (False, True):
        response = await client.post("/generate", json={**body, "stream": stream})
        answer = events(response.content)[-2] if stream else response.json()
        info = answer["meta_info"]
        first = [None] if start == 0 else []
        values = [entry[0] for entry in info["input_token_logprobs"]]
        assert values == first + [-0.5] * (len(prompt) - max(start, 1))
        assert [entry[1] for entry in info["input_token_logprobs"]] == prompt[start:]
        spelled = "".join(entry[2] for entry in info["input_token_logprobs"])
        assert spelled == tokenizer.decode(prompt[start:])
        assert info["input_top_logprobs"][len(first)][0][1] == prompt[max(start, 1)]
        assert (answer["text"], info["completion_tokens"]) == ("", 0)
    assert target.submits[-1].request.prompt_logprob_params.start_position == start


@pytest.mark.parametrize(
    ("url", "fields", "param"),
    [
        ("/v1/completions", {"prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", {"best_of": 500}, "best_of"),
        ("/v1/completions", {"best_of": 3, "stream": True}, "best_of"),
        ("/v1/completions", {"priority": 2**31}, "priority"),
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        (
            "/generate",
            {"text": "a", "return_logprob": True, "logprob_start_len": 99},
            "logprob_start_len",
        ),
    ],
)
async def test_bad_value_is_refused_by_name(
    client: httpx.AsyncClient, target: FakeTarget, url: str, fields: dict[str, Any], param: str
) -> None:
    body = {**BODY, **fields} if url == "/v1/completions" else fields
    response = await client.post(url, json=body)
    assert (await error_of(response))[:2] == (400, param)
    assert target.submits == []


async def test_embeddings_are_not_served(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"model": "fake", "input": "a"})
    assert (await error_of(response))[:3] == (400, "model", "embeddings_not_served")
    response = await client.post("/v1/embeddings", json={"model": "other", "input": "a"})
    assert response.status_code == 404


async def test_priority_reaches_the_target(client: httpx.AsyncClient, target: FakeTarget) -> None:
    await _post(client, "/v1/completions", {**BODY, "priority": -3})
    assert target.submits[-1].request.priority == -3
    await _post(client, "/generate", {"text": "a", "priority": 7})
    assert target.submits[-1].request.priority == 7
    await _post(client, "/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert target.submits[-1].request.priority == 0


async def test_best_of_returns_the_likeliest_and_counts_all(
    gateway: Gateway, target: FakeTarget, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = [await ids_of(tokenizer, text) for text in ("the", "fox", "dog", "lazy")]
    log_probs = {outputs[0][0]: -2.0, outputs[1][0]: -0.1, outputs[2][0]: -3.0, outputs[3][0]: -1.0}

    def scored(token_id: int, num_top: int, named: object) -> Any:
        return pb.TokenLogprobs(log_prob=log_probs.get(token_id, -1.5), rank=1)

    monkeypatch.setattr("tests.helpers.fake_target._logprobs", scored)
    numbers = iter(range(100))
    target.reply = lambda request: in_steps(outputs[next(numbers) % 4][:1], 1)
    async with http_client(gateway) as client:
        body = {**BODY, "best_of": 4, "n": 2, "max_tokens": 1}
        answer = await _post(client, "/v1/completions", body)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [tokenizer.decode(outputs[1][:1]), tokenizer.decode(outputs[3][:1])]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 4
    assert len(target.submits) == 4
