"""Responses that are kept: continued, listed, deleted, and run while nobody waits."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseItem
from pydantic import TypeAdapter

from gateway.api_keys import KeyLimits, Quotas, keys_from_texts
from gateway.app import Gateway
from gateway.responses.store import ResponseStore
from shared.text import Tokenizer
from tests.gateway.driving import MakeGateway, error_of, eventually, http_client, ids_of, say
from tests.gateway.responses.test_responses import BODY, typed_events
from tests.helpers.fake_target import FakeTarget

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


async def respond(client: httpx.AsyncClient, **change: Any) -> dict[str, Any]:
    answer = await client.post("/v1/responses", json={**BODY, **change})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


async def prompts(target: FakeTarget, tokenizer: Tokenizer) -> list[str]:
    return [
        tokenizer.decode(submit.request.prompt_token_ids, skip_special_tokens=False)
        for submit in target.submits
    ]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_continued_by_its_id(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, stream: bool
) -> None:
    await say(target, tokenizer, "the fox")
    body = {**BODY, "instructions": "be nice", "stream": stream}
    first = await keeper.post("/v1/responses", json=body)
    answer = typed_events(first.content)[-1].response.model_dump() if stream else first.json()
    assert answer["store"] is True
    second = await respond(keeper, input="what then?", previous_response_id=answer["id"])
    third = await respond(keeper, input="and?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    turns = "<|user|>then<|end|><|assistant|>the fox<|end|><|user|>what then?<|end|>"
    # Instructions are of one response alone.
    assert (await prompts(target, tokenizer))[1:] == [
        f"{turns}<|assistant|>",
        f"{turns}<|assistant|>the fox<|end|><|user|>and?<|end|><|assistant|>",
    ]


async def test_calls_and_their_outputs_are_continued(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, '<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    first = await respond(keeper, tools=[WEATHER])
    (call,) = first["output"]
    await say(target, tokenizer, "sun")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    second = await respond(keeper, input=[output], previous_response_id=first["id"])
    assert second["output"][0]["content"][0]["text"] == "sun"
    assert "sunny" in (await prompts(target, tokenizer))[-1]


async def test_an_item_is_named_by_its_id(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox")
    (item,) = (await respond(keeper))["output"]
    for reference in ({"type": "item_reference", "id": item["id"]}, {"id": item["id"]}):
        await respond(keeper, input=[reference, {"role": "user", "content": "so?"}])
    expected = "<|assistant|>the fox<|end|><|user|>so?<|end|><|assistant|>"
    assert (await prompts(target, tokenizer))[1:] == [expected, expected]
    missing = {**BODY, "input": [{"type": "item_reference", "id": "msg_0"}]}
    response = await keeper.post("/v1/responses", json=missing)
    assert (await error_of(response))[::2] == (404, "response_not_stored")


async def test_openais_client_retrieves_lists_and_deletes(
    keeping: Gateway, serve: Any, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox")
    plain = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(verify=False))
    async with AsyncOpenAI(
        base_url=f"{serve(keeping)}/v1", api_key="unused", max_retries=0, http_client=plain
    ) as client:
        made = await client.responses.create(model="fake", input="a")
        found = await client.responses.retrieve(made.id)
        assert (found.output_text, found.model_dump()) == ("the fox", made.model_dump())
        listed = await client.responses.input_items.list(made.id)
        assert [ITEM.validate_python(each.model_dump()).role for each in listed.data] == ["user"]
        counted = await client.responses.input_tokens.count(model="fake", input="then")
        assert made.usage is not None
        assert counted.input_tokens > 0
        assert counted.object == "response.input_tokens"
        await client.responses.delete(made.id)
        with pytest.raises(Exception, match="not found"):
            await client.responses.retrieve(made.id)


async def test_input_items_come_in_pages(keeper: httpx.AsyncClient) -> None:
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    url = f"/v1/responses/{(await respond(keeper, input=items))['id']}/input_items"
    first = (await keeper.get(url, params={"limit": 2, "order": "asc"})).json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["0", "1"]
    assert first["has_more"]
    rest = (await keeper.get(url, params={"after": first["last_id"], "order": "asc"})).json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "3", "4"]
    assert not rest["has_more"]
    newest = (await keeper.get(url)).json()["data"][0]
    assert ITEM.validate_python(newest).content[0].text == "4"
    wrong = await keeper.get(url, params={"after": "msg_0"})
    assert (await error_of(wrong))[:2] == (400, "after")


async def test_keys_find_only_their_own(
    make_gateway: MakeGateway, target: FakeTarget, store: ResponseStore
) -> None:
    quotas = Quotas(keys_from_texts(["alice:a", "bob:b"], KeyLimits()))
    gateway = await make_gateway(target, response_store=store, quotas=quotas)
    async with http_client(gateway) as client:
        client.headers["authorization"] = "Bearer a"
        made = await respond(client)
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        second = await respond(client, previous_response_id=made["id"])
        client.headers["authorization"] = "Bearer b"
        item_id = made["output"][0]["id"]
        for path in (made["id"], f"{made['id']}/input_items", second["id"]):
            assert (await client.get(f"/v1/responses/{path}")).status_code == 404
        for method, path in (
            ("DELETE", f"/v1/responses/{made['id']}"),
            ("POST", f"/v1/responses/{made['id']}/cancel"),
            ("GET", f"/v1/conversations/{conversation}"),
            ("DELETE", f"/v1/conversations/{conversation}"),
        ):
            assert (await client.request(method, path)).status_code == 404, path
        for change in (
            {"previous_response_id": second["id"]},
            {"conversation": conversation},
            {"input": [{"id": item_id}]},
        ):
            refused = await client.post("/v1/responses", json={**BODY, **change})
            assert refused.status_code == 404, change
            # Nothing is said of what stands before it.
            assert made["id"] not in refused.text
        client.headers["authorization"] = "Bearer a"
        assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 200


async def test_what_is_not_to_be_kept_is_not(
    keeper: httpx.AsyncClient, store: ResponseStore
) -> None:
    made = await respond(keeper, store=False)
    assert made["store"] is False
    assert (await keeper.get(f"/v1/responses/{made['id']}")).status_code == 404
    assert await store.num_bytes() == 0


async def test_a_response_in_the_background_is_asked_for_later(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox", per_step=1)
    target.hold_after = 1
    queued = await respond(keeper, background=True)
    Response.model_validate(queued)
    assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
    url = f"/v1/responses/{queued['id']}"

    async def status() -> str:
        return str((await keeper.get(url)).json()["status"])

    while await status() != "in_progress":
        await asyncio.sleep(0.002)
    running = await keeper.post(
        "/v1/responses", json={**BODY, "previous_response_id": queued["id"]}
    )
    assert (await error_of(running))[1:3] == ("previous_response_id", "response_running")
    target.release.set()
    while await status() == "in_progress":
        await asyncio.sleep(0.002)
    ended = Response.model_validate((await keeper.get(url)).json())
    assert (ended.status, ended.output_text) == ("completed", "the fox")
    streamed = await keeper.get(url, params={"stream": True})
    assert (await error_of(streamed))[1] == "stream"


async def test_a_response_in_the_background_is_cancelled(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox", per_step=1)
    target.hold_after = 1
    queued = await respond(keeper, background=True)
    await eventually(lambda: target.num_open == 1)
    cancelled = await keeper.post(f"/v1/responses/{queued['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    await eventually(lambda: target.num_open == 0)
    again = await keeper.post(f"/v1/responses/{queued['id']}/cancel")
    assert again.json()["status"] == "cancelled"
    waited_for = await respond(keeper, max_output_tokens=1)
    refused = await keeper.post(f"/v1/responses/{waited_for['id']}/cancel")
    assert (await error_of(refused))[::2] == (400, "not_in_background")


async def test_a_response_in_the_background_that_is_deleted_ends(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer, store: ResponseStore
) -> None:
    await say(target, tokenizer, "the fox", per_step=1)
    target.hold_after = 1
    queued = await respond(keeper, background=True)  # not told yet that it runs
    assert (await keeper.delete(f"/v1/responses/{queued['id']}")).json()["deleted"] is True
    await eventually(lambda: target.num_open == 0)
    assert (await keeper.get(f"/v1/responses/{queued['id']}")).status_code == 404
    assert await store.num_bytes() == 0


async def test_a_stream_in_the_background_is_followed_again(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox", per_step=1)
    body = {**BODY, "background": True, "stream": True}
    whole = (await keeper.post("/v1/responses", json=body)).content
    last = typed_events(whole)[-1]
    assert (last.type, last.response.output_text) == ("response.completed", "the fox")
    url = f"/v1/responses/{last.response.id}"
    assert (await keeper.get(url, params={"stream": True})).content == whole
    rest = (await keeper.get(url, params={"stream": True, "starting_after": 2})).content
    assert whole.endswith(rest)
    assert rest.count(b"event: ") == whole.count(b"event: ") - 3


async def test_a_failure_in_the_background_is_kept(
    keeper: httpx.AsyncClient, keeping: Gateway, target: FakeTarget
) -> None:
    target.hold_after = 1
    queued = await respond(keeper, background=True)
    await eventually(lambda: keeping.pool.links[0].num_tokens > 0)
    await target.break_sessions()
    await eventually(lambda: keeping.lifecycle.num_open == 0)
    failed = Response.model_validate((await keeper.get(f"/v1/responses/{queued['id']}")).json())
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.code == "server_error"


async def test_a_response_that_the_gateway_fails_is_kept_as_failed(
    keeper: httpx.AsyncClient,
    keeping: Gateway,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("gateway.responses.answer.ResponseEncoder.closing", fail)
    queued = await respond(keeper, background=True)
    await eventually(lambda: "ZeroDivisionError" in caplog.text)
    await eventually(lambda: keeping.lifecycle.num_open == 0)
    failed = (await keeper.get(f"/v1/responses/{queued['id']}")).json()
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")


async def test_a_response_in_the_background_holds_a_place_of_its_key(
    make_gateway: MakeGateway, target: FakeTarget, store: ResponseStore
) -> None:
    keys = keys_from_texts(["alice:a"], KeyLimits(max_concurrent=1))
    gateway = await make_gateway(target, response_store=store, quotas=Quotas(keys))
    target.hold_after = 1
    async with http_client(gateway) as client:
        client.headers["authorization"] = "Bearer a"
        await respond(client, background=True)
        await eventually(lambda: target.num_open == 1)
        refused = await client.post("/v1/responses", json=BODY)
        assert (await error_of(refused))[::2] == (429, "concurrency_limit_exceeded")
        target.release.set()
        await eventually(lambda: gateway.lifecycle.num_open == 0)
        await respond(client)


async def test_fields_that_do_not_go_together_are_refused(keeper: httpx.AsyncClient) -> None:
    for change, param in (
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
    ):
        response = await keeper.post("/v1/responses", json={**BODY, **change})
        assert (await error_of(response))[:2] == (400, param)


async def test_a_history_is_compacted_to_a_summary(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox")
    first = await respond(keeper)
    await say(target, tokenizer, "over the dog")
    body = {"model": "fake", "previous_response_id": first["id"]}
    compacted = (await keeper.post("/v1/responses/compact", json=body)).json()
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]] == ["message", "compaction"]
    assert compacted["usage"]["output_tokens"] > 0
    follow = [*compacted["output"], {"role": "user", "content": "so?"}]
    await respond(keeper, input=follow)
    expected = "<|user|>then<|end|><|assistant|>over the dog<|end|><|user|>so?<|end|><|assistant|>"
    assert (await prompts(target, tokenizer))[-1] == expected
    foreign = [{"type": "compaction", "encrypted_content": "Zm9v"}]
    response = await keeper.post("/v1/responses", json={**BODY, "input": foreign})
    assert (await error_of(response))[:2] == (400, "input[0].encrypted_content")


async def test_tokens_of_an_input_are_counted(
    client: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    body = {"model": "fake", "input": "then", "instructions": "be nice"}
    counted = (await client.post("/v1/responses/input_tokens", json=body)).json()
    prompt = await ids_of(tokenizer, "<|system|>be nice<|end|><|user|>then<|end|><|assistant|>")
    assert counted == {"object": "response.input_tokens", "input_tokens": len(prompt)}
    assert target.submits == []
