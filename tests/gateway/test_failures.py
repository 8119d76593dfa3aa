"""What is refused, by which name and with which status, before any header of an answer; and what
each gRPC status becomes."""

from __future__ import annotations

import gzip
import re
from typing import Any

import httpx
import orjson
import pytest

from gateway.app import Gateway
from gateway.failures import Problem
from gateway.settings import GatewaySettings
from shared.errors import OutriderError, StatusCode, error_class
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.gateway.driving import CHAT, MakeGateway, error_of, http_client
from tests.helpers.fake_target import FakeTarget

# Clients try 408, 409, 429 and 5xx again; 501 is for people, and only operators' routes have it.
EXPECTED = {
    StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_request_error"),
    StatusCode.PERMISSION_DENIED: (403, "invalid_request_error", "permission_error"),
    StatusCode.NOT_FOUND: (404, "invalid_request_error", "not_found_error"),
    StatusCode.CANCELLED: (410, "invalid_request_error", "invalid_request_error"),
    StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_error"),
    StatusCode.INTERNAL: (500, "server_error", "api_error"),
    StatusCode.FAILED_PRECONDITION: (501, "server_error", "api_error"),
    StatusCode.UNIMPLEMENTED: (501, "server_error", "api_error"),
    StatusCode.UNAVAILABLE: (503, "service_unavailable_error", "overloaded_error"),
    StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "timeout_error"),
}


@pytest.mark.parametrize("code", StatusCode)
def test_every_code_has_its_status_and_names(code: StatusCode) -> None:
    error = error_class(code)("it failed", reason="REASON")
    problem = Problem.of(error)
    kinds = (problem.openai_body()["error"]["type"], problem.anthropic_body()["error"]["type"])
    assert (Problem.of(error).status, *kinds) == EXPECTED[code]


def test_a_code_nobody_of_ours_answers_with_is_a_500() -> None:
    assert Problem.of(OutriderError("gone", reason="DATA_LOSS")).status == 500


COMPLETION = {"model": "fake", "prompt": "the"}


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("temperature", 2.5, "[0, 2]"),
        ("temperature", -0.1, "[0, 2]"),
        ("top_p", 0.0, "(0, 1]"),
        ("min_p", 1.5, "[0, 1]"),
        ("top_k", -2, "0 (off) or more"),
        ("frequency_penalty", 3, "[-2, 2]"),
        ("presence_penalty", -3, "[-2, 2]"),
        ("repetition_penalty", 0, "(0, 2]"),
        ("seed", 2**63, "[-2^63, 2^63)"),
        ("n", 0, "[1, 128]"),
        ("n", 129, "[1, 128]"),
        ("max_tokens", 0, "at least 1"),
        ("min_tokens", 99999, "], the most tokens of the output"),
        ("logit_bias", {"512": 1}, "[0, 512)"),
    ],
)
async def test_a_value_out_of_range_is_refused_by_name(
    client: httpx.AsyncClient, target: FakeTarget, field: str, value: Any, limit: str
) -> None:
    for url, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for stream in (False, True):
            response = await client.post(url, json={**body, field: value, "stream": stream})
            status, param, _, message = await error_of(response)
            assert (status, param) == (400, field)
            assert limit in message
    assert target.submits == []


async def test_a_bias_out_of_range_names_its_token(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "logit_bias": {"5": 101}})
    assert (await error_of(response))[:2] == (400, "logit_bias[5]")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("modalities", ["text", "audio"]),
        ("mirostat", 2),
        ("repeat_penalty", 1.3),
        ("web_search_options", {}),  # as OpenAI's clients ask for a search
    ],
)
async def test_what_is_not_implemented_is_refused_by_name(
    client: httpx.AsyncClient, field: str, value: Any
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, field: value})
    assert (await error_of(response))[:3] == (400, field, "not_implemented")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"speculation": {"fan_out": 3}}, "speculation.fan_out"),
    ],
)
async def test_what_completions_cannot_do_is_refused_by_name(
    client: httpx.AsyncClient, extra: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, **extra})
    assert (await error_of(response))[:3] == (400, param, "not_implemented")


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "none"},
        {"tools": None, "functions": None, "response_format": None},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"repeat_penalty": 1.0, "mirostat": 0, "n_predict": -1},
        {"user": "me", "metadata": {"a": "b"}, "store": False, "n": None, "stop": None},
        {"frobnicate": 1},
    ],
)
async def test_what_asks_for_nothing_else_is_accepted(
    client: httpx.AsyncClient, extra: dict[str, Any]
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **extra, "max_tokens": 2})
    assert response.status_code == 200


async def test_a_client_is_told_of_fields_that_nobody_knows(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    body = {**CHAT, "frob\nnicate": 1, "max_tokens": 2}
    response = await client.post("/v1/chat/completions", json=body)
    for told in (caplog.text, response.headers["x-outrider-notice"]):
        assert "'frob\\nnicate'" in told


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            "messages[0].content[0].type",
        ),
    ],
)
async def test_messages_that_need_old_calls_or_media_are_refused(
    client: httpx.AsyncClient, message: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": [message]})
    assert (await error_of(response))[:3] == (400, param, "not_implemented")


async def test_malformed_json_is_a_400(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/chat/completions", content=b'{"model":', headers=headers)
    status, param, code, message = await error_of(response)
    assert (status, param, code) == (400, None, "json_invalid")
    assert "not JSON" in message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "fake"}, "messages"),
        ({**CHAT, "temperature": "hot"}, "temperature"),
        ({**CHAT, "messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
        ({**CHAT, "stop": 5}, "stop"),
        ({**CHAT, "stream_options": {"include_usage": True}}, "stream_options"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs"),
        ({**CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "stop": [""]}, "stop"),
        ({**CHAT, "stop": ["x"] * 17}, "stop"),
    ],
)
async def test_a_wrong_field_is_a_400_with_its_name(
    client: httpx.AsyncClient, body: dict[str, Any], param: str
) -> None:
    response = await client.post("/v1/chat/completions", json=body)
    assert (await error_of(response))[:2] == (400, param)


@pytest.mark.parametrize(
    ("extra", "shown"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': "),
        ({"tool_choice": "maybe"}, "tool_choice is 'maybe': "),
        (
            {"stream_options": {"include_usage": "x" * 99}},
            f"stream_options.include_usage is '{'x' * 63}…: ",
        ),
        ({"messages": [{"content": "x"}]}, "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing",
        ),
        ({"response_format": "json"}, "response_format is 'json': it must be an object"),
        ({"max_tokens": 10**30}, "max_tokens is 1e+30: it must be an integer in [-2^63, 2^63)"),
        # Of forms that a field may have, the one that is meant.
        (
            {"messages": [{"role": "user", "content": [{"text": "x"}]}]},
            "messages[0].content[0].type is missing",
        ),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.function is missing",
        ),
    ],
)
async def test_a_field_of_the_wrong_type_is_shown_with_its_value(
    client: httpx.AsyncClient, extra: dict[str, Any], shown: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, **extra})
    assert (await error_of(response))[3].startswith(shown)


@pytest.mark.parametrize(
    ("content", "kind", "shown"),
    [
        (orjson.dumps(CHAT), "text/plain", "the body's content-type is 'text/plain', not"),
        (orjson.dumps(CHAT), None, "the body's content-type is None, not 'application/json'"),
        (b"[1]", "application/json", "the body is [1]; it must be a JSON object"),
        (b"", "application/json", "the body is empty; it must be a JSON object"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_400(
    client: httpx.AsyncClient, content: bytes, kind: str | None, shown: str
) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = await client.post("/v1/chat/completions", content=content, headers=headers)
    status, _, code, message = await error_of(response)
    assert (status, code) == (400, "body_invalid")
    assert message.startswith(shown)


async def test_a_compressed_body_is_refused(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    content = gzip.compress(orjson.dumps(CHAT))
    response = await client.post("/v1/chat/completions", content=content, headers=headers)
    status, _, code, message = await error_of(response)
    assert (status, code) == (415, "body_encoded")
    assert "content-encoding is 'gzip'" in message


@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/score"), ("PUT", "/v1/models")])
async def test_what_has_no_route_is_named(
    client: httpx.AsyncClient, method: str, path: str
) -> None:
    status, _, _, message = await error_of(await client.request(method, path))
    assert status == (404 if path == "/v1/score" else 405)
    assert message == f"there is no {method} {path}; see /docs"


@pytest.mark.parametrize(
    ("path", "body", "shown"),
    [
        ("/v1/responses", {"input": "a", "max_tokens": 3}, "max_tokens is named max_output_tokens"),
        (
            "/generate",
            {"text": "a", "max_tokens": 3},
            "max_tokens is named sampling_params.max_new_tokens here",
        ),
        (
            "/generate",
            {"text": "a", "sampling_params": {"max_tokens": 3}},
            "sampling_params.max_tokens is named sampling_params.max_new_tokens here",
        ),
    ],
)
async def test_a_field_with_another_name_here_is_told_it(
    client: httpx.AsyncClient, path: str, body: dict[str, Any], shown: str
) -> None:
    status, _, _, message = await error_of(await client.post(path, json=body))
    assert status == 400
    assert message.startswith(shown)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [("", "prompt_empty"), ([], "prompts_out_of_range"), ([512], "token_out_of_range")],
)
async def test_prompts_that_cannot_be_served(
    client: httpx.AsyncClient, prompt: Any, code: str
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": prompt})
    assert (await error_of(response))[:3] == (400, "prompt", code)


async def test_too_many_choices_of_too_many_prompts(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, settings=GatewaySettings(max_generations=3, max_prompts=2))
    async with http_client(gateway) as client:
        body = {**COMPLETION, "prompt": ["a", "b"], "n": 2}
        response = await client.post("/v1/completions", json=body)
        assert (await error_of(response))[:3] == (400, "n", "choices_out_of_range")
        body = {**COMPLETION, "prompt": ["a", "b", "c"]}
        response = await client.post("/v1/completions", json=body)
        assert (await error_of(response))[:3] == (400, "prompt", "prompts_out_of_range")


async def test_a_prompt_that_fills_the_context_is_openais_error(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    response = await client.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 4096})
    status, param, code, message = await error_of(response)
    assert (status, param, code) == (400, "prompt", "context_length_exceeded")
    assert "4,096" in message
    assert "4,095" in message


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_length_beyond_the_context_is_refused_with_value_and_limit(
    client: httpx.AsyncClient, field: str
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, field: 5000})
    status, param, code, message = await error_of(response)
    assert (status, param, code) == (400, field, "context_length_exceeded")
    found = re.search(
        rf"{field} is 5,000; it must be at most ([\d,]+), because this model's maximum context "
        r"length is 4,096 tokens and the prompt has (\d+)$",
        message,
    )
    assert found is not None, message
    num_left, num_prompt = (int(each.replace(",", "")) for each in found.groups())
    assert num_left + num_prompt == 4096
    fits = await client.post("/v1/chat/completions", json={**CHAT, field: num_left})
    assert fits.status_code == 200
    assert "x-outrider-notice" not in fits.headers


async def test_completions_and_generate_refuse_a_length_beyond_the_context(
    client: httpx.AsyncClient,
) -> None:
    body = {**COMPLETION, "prompt": [5] * 96, "max_tokens": 4001}
    response = await client.post("/v1/completions", json=body)
    assert (await error_of(response))[:3] == (400, "max_tokens", "context_length_exceeded")
    native = {"input_ids": [5] * 96, "sampling_params": {"max_new_tokens": 4001}}
    response = await client.post("/generate", json=native)
    assert response.status_code == 400
    assert "sampling_params.max_new_tokens is 4,001; it must be at most 4,000" in response.text
    cut = {**body, "truncate_prompt_tokens": -1}
    assert (await client.post("/v1/completions", json=cut)).status_code == 200


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        ("/v1/messages", {"messages": CHAT["messages"]}, "max_tokens"),
        ("/v1/responses", {"input": "hello"}, "max_output_tokens"),
    ],
)
async def test_agents_get_what_the_context_leaves_and_a_notice(
    client: httpx.AsyncClient, route: str, body: dict[str, Any], field: str
) -> None:
    response = await client.post(route, json={"model": "fake", **body, field: 32_000})
    assert response.status_code == 200
    assert f"{field} is 32,000; the context leaves 4," in response.headers["x-outrider-notice"]


async def test_an_unknown_model_is_a_404_that_names_the_known_ones(
    client: httpx.AsyncClient,
) -> None:
    response = await client.post("/v1/chat/completions", json={**CHAT, "model": "gpt"})
    status, _, code, message = await error_of(response)
    assert (status, code) == (404, "model_not_found")
    assert "'gpt'" in message
    assert "fake" in message


async def test_an_unknown_route_and_method_have_openais_shape(client: httpx.AsyncClient) -> None:
    assert (await error_of(await client.get("/v1/nothing")))[0] == 404
    assert (await error_of(await client.get("/v1/completions")))[0] == 405


async def test_a_large_body_is_a_413_with_and_without_a_length(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, settings=GatewaySettings(max_body_bytes=1000))
    body = orjson.dumps({**COMPLETION, "prompt": "x" * 2000})
    headers = {"content-type": "application/json"}

    async def in_pieces() -> Any:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    async with http_client(gateway) as client:
        for content, num_bytes in ((body, f"{len(body):,}"), (in_pieces(), "1,100")):
            response = await client.post("/v1/completions", content=content, headers=headers)
            *error, message = await error_of(response)
            assert error == [413, None, "body_too_large"]
            assert message == f"the body has {num_bytes} bytes or more; it may have 1,000"


async def test_a_full_target_is_a_429_with_retry_after(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    refusal = pb.RequestFailure(code=8, reason="QUEUE_FULL", message="9 wait; the queue holds 9")
    refusal.retry_delay.FromMilliseconds(1500)
    for stream in (False, True):
        target.refusals.append(refusal)
        response = await client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
        assert (await error_of(response))[::2] == (429, "queue_full")
        assert response.headers["retry-after"] == "2"


async def test_a_refusal_by_the_target_keeps_its_field(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    failure = pb.RequestFailure(code=3, reason="BAD", message="x is 1", field="x")
    target.refusals.append(failure)
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert await error_of(response) == (400, "x", "bad", "x is 1")


async def test_a_failed_engine_is_a_500(client: httpx.AsyncClient, target: FakeTarget) -> None:
    target.refusals.append(pb.RequestFailure(code=13, reason="ENGINE_FAILED", message="see log"))
    response = await client.post("/v1/chat/completions", json=CHAT)
    assert (await error_of(response))[::2] == (500, "engine_failed")


async def test_a_bug_is_a_500_that_tells_nothing(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("gateway.event_stream.chat_completion", explode)
    response = await client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 2})
    assert (await error_of(response))[::2] == (500, "gateway_failed")
    assert "secret" not in response.text


async def test_a_key_is_asked_for_below_v1_only(
    make_gateway: MakeGateway, target: FakeTarget
) -> None:
    gateway = await make_gateway(target, api_key="sesame")
    async with http_client(gateway) as client:
        for headers in ({}, {"authorization": "Bearer open"}, {"authorization": "sesame"}):
            response = await client.get("/v1/models", headers=headers)
            assert (await error_of(response))[::2] == (401, "invalid_api_key")
        allowed = await client.get("/v1/models", headers={"authorization": "Bearer sesame"})
        assert allowed.status_code == 200
        assert (await client.get("/health")).status_code == 200


async def test_the_request_id_comes_back_and_reaches_the_target(
    client: httpx.AsyncClient, target: FakeTarget
) -> None:
    body = {**CHAT, "max_tokens": 2}
    headers = {"x-request-id": "abc-1"}
    response = await client.post("/v1/chat/completions", json=body, headers=headers)
    assert response.headers["x-request-id"] == "abc-1"
    assert target.submits[0].trace_request_id == "abc-1"
    harmful = {"x-request-id": "a b"}
    response = await client.post("/v1/chat/completions", json=body, headers=harmful)
    assert response.headers["x-request-id"] not in ("a b", "")


async def test_models_are_listed_and_found(
    client: httpx.AsyncClient, make_gateway: MakeGateway, target: FakeTarget
) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["fake"]
    assert listed["data"][0]["max_model_len"] == 4096
    assert (await client.get("/v1/models/fake")).json() == listed["data"][0]
    assert (await client.get("/v1/models/other")).status_code == 404
    named: Gateway = await make_gateway(target, settings=GatewaySettings(model_name="org/name"))
    async with http_client(named) as other:
        assert (await other.get("/v1/models/org/name")).json()["id"] == "org/name"
        body = {**CHAT, "model": "org/name", "max_tokens": 2}
        assert (await other.post("/v1/chat/completions", json=body)).status_code == 200
