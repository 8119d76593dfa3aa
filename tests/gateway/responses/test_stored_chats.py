"""Chats with `store: true` are found again, by their own key alone."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from gateway.api_keys import KeyLimits, Quotas, keys_from_texts
from gateway.app import Gateway
from gateway.model_text import ModelText
from gateway.responses.store import ResponseStore
from shared.errors import Unavailable
from shared.text import Tokenizer
from tests.gateway.driving import CHAT, MakeGateway, error_of, events, http_client, say
from tests.gateway.thinking_model import OUTPUT, SCHEMA
from tests.helpers.fake_target import FakeTarget

CHATS = "/v1/chat/completions"
KEPT = {**CHAT, "store": True, "max_tokens": 4}


async def _made(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    response = await client.post(CHATS, json={**KEPT, **more})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


async def test_a_whole_chat_is_kept_as_it_was_answered(keeper: httpx.AsyncClient) -> None:
    made = await _made(keeper, metadata={"a": "b"}, n=2)
    kept = (await keeper.get(f"{CHATS}/{made['id']}")).json()
    assert kept.pop("metadata") == {"a": "b"}
    assert kept == made
    assert len(ChatCompletion.model_validate(kept).choices) == 2


async def test_a_streamed_chat_is_kept_whole(
    make_gateway: MakeGateway,
    target: FakeTarget,
    store: ResponseStore,
    thinking_text: ModelText,
    tokenizer: Tokenizer,
) -> None:
    gateway = await make_gateway(target, response_store=store, text=thinking_text)
    await say(target, tokenizer, OUTPUT, per_step=1)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    body = {**CHAT, "store": True, "stream": True, "tools": tools}
    async with http_client(gateway) as client:
        streamed = events((await client.post(CHATS, json=body)).content)
        kept = (await client.get(f"{CHATS}/{streamed[0]['id']}")).json()
    ids = [
        call["id"]
        for event in streamed[:-1]
        for call in event["choices"][0]["delta"].get("tool_calls", ())
        if "id" in call
    ]
    [choice] = kept["choices"]
    assert [call["id"] for call in choice["message"]["tool_calls"]] == ids
    assert choice["message"]["content"] == "I ask."
    assert choice["message"]["reasoning_content"] == "the fox"
    assert choice["finish_reason"] == "tool_calls"
    assert kept["usage"]["completion_tokens"] > 0


async def test_only_what_is_asked_for_is_kept(keeper: httpx.AsyncClient) -> None:
    made = await _made(keeper, store=False)
    assert (await keeper.get(f"{CHATS}/{made['id']}")).status_code == 404
    assert (await keeper.get(CHATS)).json()["data"] == []


async def test_metadata_changes_and_the_rest_stays(keeper: httpx.AsyncClient) -> None:
    made = await _made(keeper, metadata={"a": "b"})
    url = f"{CHATS}/{made['id']}"
    changed = (await keeper.post(url, json={"metadata": {"c": "d"}})).json()
    assert changed == {**made, "metadata": {"c": "d"}}
    assert (await keeper.get(url)).json() == changed


async def test_messages_are_listed(keeper: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": "x"}]
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": parts}]
    made = await _made(keeper, messages=messages)
    url = f"{CHATS}/{made['id']}/messages"
    page = (await keeper.get(url)).json()
    assert [(each["role"], each["content"], each["content_parts"]) for each in page["data"]] == [
        ("system", "be", None),
        ("user", None, parts),
    ]
    first = page["data"][0]["id"]
    assert (await keeper.get(url, params={"limit": 1})).json()["has_more"] is True
    assert (await keeper.get(url, params={"after": first})).json()["data"] == page["data"][1:]


async def test_chats_are_listed_in_pages(keeper: httpx.AsyncClient) -> None:
    made = [await _made(keeper, metadata={"n": str(n), "all": "yes"}) for n in range(4)]
    ids = [each["id"] for each in made]

    async def listed(**params: Any) -> tuple[list[str], bool]:
        page = (await keeper.get(CHATS, params=params)).json()
        assert page["object"] == "list"
        return [each["id"] for each in page["data"]], page["has_more"]

    assert await listed() == (ids, False)
    assert await listed(order="desc", limit=3) == (ids[:0:-1], True)
    assert await listed(after=ids[1], limit=1) == ([ids[2]], True)
    assert await listed(after=ids[1], order="desc") == ([ids[0]], False)
    assert await listed(**{"metadata[n]": "2", "metadata[all]": "yes"}) == ([ids[2]], False)
    assert await listed(**{"metadata[n]": "2", "metadata[all]": "no"}) == ([], False)
    assert await listed(model="fake") == (ids, False)
    assert await listed(model="other") == ([], False)
    assert (await keeper.get(CHATS, params={"after": "chatcmpl-no"})).status_code == 404
    assert (await keeper.get(CHATS, params={"limit": 0})).status_code == 400


async def test_a_deleted_chat_is_gone(keeper: httpx.AsyncClient) -> None:
    made = await _made(keeper)
    url = f"{CHATS}/{made['id']}"
    deleted = {"id": made["id"], "object": "chat.completion.deleted", "deleted": True}
    assert (await keeper.delete(url)).json() == deleted
    for response in (
        await keeper.get(url),
        await keeper.delete(url),
        await keeper.get(f"{url}/messages"),
    ):
        assert (await error_of(response))[0] == 404


async def test_a_key_finds_its_own_alone(
    make_gateway: MakeGateway, target: FakeTarget, store: ResponseStore
) -> None:
    quotas = Quotas(keys_from_texts(["alice:a", "bob:b"], KeyLimits()))
    gateway = await make_gateway(target, response_store=store, quotas=quotas)
    async with http_client(gateway) as client:
        alice, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
        made = (await client.post(CHATS, json=KEPT, headers=alice)).json()
        url = f"{CHATS}/{made['id']}"
        assert (await client.get(CHATS, headers=bob)).json()["data"] == []
        for path in (url, f"{url}/messages"):
            assert (await client.get(path, headers=bob)).status_code == 404
        assert (await client.post(url, json={"metadata": {}}, headers=bob)).status_code == 404
        assert (await client.delete(url, headers=bob)).status_code == 404
        assert (
            await client.get(CHATS, params={"after": made["id"]}, headers=bob)
        ).status_code == 404
        assert (await client.get(url, headers=alice)).status_code == 200


async def test_a_stored_chat_has_an_id_that_no_client_chose(keeper: httpx.AsyncClient) -> None:
    """It could be that of another client's chat."""
    refused = await keeper.post(CHATS, json={**KEPT, "rid": "chatcmpl-1"})
    assert (await error_of(refused))[:3] == (400, "rid", "rid_with_store")


async def test_an_entry_is_replaced_by_its_owner_alone(store: ResponseStore) -> None:
    body = {"id": "chatcmpl-1", "object": "chat.completion"}
    await store.put_entry("alice", body, [])
    with pytest.raises(Unavailable):
        await store.put_entry("bob", body, [])
    assert await store.entry("alice", "chatcmpl-1", "chatcmpl-") == body


async def test_kinds_are_kept_apart(keeper: httpx.AsyncClient) -> None:
    made = await _made(keeper)
    for path in (f"/v1/conversations/{made['id']}", f"/v1/responses/{made['id']}"):
        assert (await keeper.get(path)).status_code == 404
        assert (await keeper.delete(path)).status_code == 404
    assert (await keeper.get(f"{CHATS}/{made['id']}")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_store_the_answer_says_so(client: httpx.AsyncClient, stream: bool) -> None:
    response = await client.post(CHATS, json={**KEPT, "stream": stream})
    assert response.status_code == 200
    assert "store has no effect" in response.headers["x-outrider-notice"]
    for method, path in (("GET", CHATS), ("GET", f"{CHATS}/x"), ("DELETE", f"{CHATS}/x")):
        refused = await client.request(method, path)
        assert (await error_of(refused))[2] == "store_off"


async def test_the_store_is_bounded(make_gateway: MakeGateway, keeping: Gateway) -> None:
    store = keeping.response_store
    assert store is not None
    async with http_client(keeping) as client:
        before = await store.num_bytes()
        await _made(client, messages=[{"role": "user", "content": "then " * 100}])
        assert await store.num_bytes() - before > 500
