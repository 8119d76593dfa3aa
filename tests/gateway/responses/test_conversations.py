"""`/v1/conversations`, as the openai package reads it."""

from __future__ import annotations

from typing import Any

import httpx
from openai.types.conversations import Conversation, ConversationItemList
from pydantic import TypeAdapter

from shared.text import Tokenizer
from tests.gateway.driving import error_of, say
from tests.gateway.responses.test_kept_responses import prompts, respond
from tests.helpers.fake_target import FakeTarget

LIST: TypeAdapter[Any] = TypeAdapter(ConversationItemList)
HELLO = {"type": "message", "role": "user", "content": "hello"}


async def test_a_conversation_grows_by_its_responses(
    keeper: httpx.AsyncClient, target: FakeTarget, tokenizer: Tokenizer
) -> None:
    await say(target, tokenizer, "the fox")
    body = {"items": [HELLO], "metadata": {"a": "b"}}
    made = Conversation.model_validate((await keeper.post("/v1/conversations", json=body)).json())
    first = await respond(keeper, conversation=made.id)
    assert first["conversation"] == {"id": made.id}
    await respond(keeper, conversation={"id": made.id}, input="so?", store=False)
    expected = "<|user|>hello<|end|><|user|>then<|end|><|assistant|>"
    again = f"{expected}the fox<|end|><|user|>so?<|end|><|assistant|>"
    assert await prompts(target, tokenizer) == [expected, again]
    listed = (await keeper.get(f"/v1/conversations/{made.id}/items")).json()
    texts = [item.content[0].text for item in LIST.validate_python(listed).data]
    assert texts == ["the fox", "so?", "the fox", "then", "hello"]


async def test_items_are_added_found_and_deleted(keeper: httpx.AsyncClient) -> None:
    made = (await keeper.post("/v1/conversations", json={"items": [HELLO]})).json()
    url = f"/v1/conversations/{made['id']}"
    added = (await keeper.post(f"{url}/items", json={"items": [HELLO, HELLO]})).json()
    assert [LIST.validate_python(added).data[0].role, len(added["data"])] == ["user", 2]
    item_id = added["first_id"]
    assert (await keeper.get(f"{url}/items/{item_id}")).json() == added["data"][0]
    assert (await keeper.delete(f"{url}/items/{item_id}")).json() == made
    for method in ("GET", "DELETE"):
        missing = await keeper.request(method, f"{url}/items/{item_id}")
        assert (await error_of(missing))[::2] == (404, "response_not_stored")
    assert len((await keeper.get(f"{url}/items")).json()["data"]) == 2


async def test_a_conversation_is_changed_and_deleted(keeper: httpx.AsyncClient) -> None:
    made = (await keeper.post("/v1/conversations", json={})).json()
    url = f"/v1/conversations/{made['id']}"
    changed = (await keeper.post(url, json={"metadata": {"c": "d"}})).json()
    assert (await keeper.get(url)).json() == changed == {**made, "metadata": {"c": "d"}}
    assert (await keeper.get(f"/v1/responses/{made['id']}")).status_code == 404
    assert (await keeper.delete(url)).json()["deleted"] is True
    assert (await error_of(await keeper.get(url)))[0] == 404


async def test_without_a_store_they_are_refused(client: httpx.AsyncClient) -> None:
    for method, path in (("POST", ""), ("GET", "/conv_1"), ("POST", "/conv_1/items")):
        response = await client.request(method, f"/v1/conversations{path}", json={})
        assert (await error_of(response))[::2] == (404, "store_off")
