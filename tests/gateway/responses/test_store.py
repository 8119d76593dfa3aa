"""The store itself: its bounds, its file, and what a restart leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.responses.store import CONVERSATION, RESPONSE, ResponseStore, StoredResponse
from shared.errors import InvalidArgument, NotFound, SettingsError


def stored(number: int, text: str = "", **fields: Any) -> StoredResponse:
    body = {"id": f"resp_{number}", "status": "completed", "output": [], **fields}
    item = {"id": f"msg_{number}", "type": "message", "role": "user", "content": text}
    return StoredResponse(body, [item])


async def kept(store: ResponseStore, owner: str, numbers: range) -> list[int]:
    found = []
    for number in numbers:
        try:
            await store.response(owner, f"resp_{number}")
        except NotFound:
            continue
        found.append(number)
    return found


async def test_the_oldest_goes_of_whoever_keeps_most() -> None:
    store = ResponseStore(max_bytes=10_000)
    await store.put("bob", stored(0, "x" * 1000))
    for number in range(1, 20):
        await store.put("alice", stored(number, "é" * 500))
        assert await store.num_bytes() <= 10_000
    assert await kept(store, "bob", range(1)) == [0]
    left = await kept(store, "alice", range(20))
    assert left == list(range(20 - len(left), 20))
    assert len(left) > 5


async def test_what_is_too_large_by_itself_is_not_kept() -> None:
    store = ResponseStore(max_bytes=1000)
    await store.put("alice", stored(0, "x" * 2000))
    assert await store.num_bytes() == 0


async def test_a_conversation_that_grows_too_large_goes() -> None:
    store = ResponseStore(max_bytes=1000)
    await store.put_entry("alice", {"id": "conv_0"}, [])
    await store.append("alice", "conv_0", [{"id": "msg_0", "text": "x" * 2000}])
    with pytest.raises(NotFound):
        await store.entry("alice", "conv_0", CONVERSATION)


async def test_what_is_old_is_gone() -> None:
    now = 1000.0
    store = ResponseStore(max_age_s=10.0, now=lambda: now)
    await store.put("alice", stored(0))
    now = 1011.0
    assert await kept(store, "alice", range(1)) == []
    await store.put("alice", stored(1))
    assert await kept(store, "alice", range(2)) == [1]


async def test_a_chain_that_lost_its_beginning_is_not_continued() -> None:
    store = ResponseStore()
    await store.put("alice", stored(0))
    await store.put("alice", stored(1, previous_response_id="resp_0"))
    assert [item["id"] for item in await store.turns("alice", "resp_1")] == ["msg_0", "msg_1"]
    await store.delete("alice", "resp_0", RESPONSE)
    with pytest.raises(NotFound, match="resp_0"):
        await store.turns("alice", "resp_1")


async def test_a_chain_is_bounded() -> None:
    store = ResponseStore(max_history_bytes=1000)
    await store.put("alice", stored(0, "x" * 600))
    await store.put("alice", stored(1, "x" * 600, previous_response_id="resp_0"))
    assert len(await store.turns("alice", "resp_0")) == 1
    with pytest.raises(InvalidArgument, match="at most 1,000"):
        await store.turns("alice", "resp_1")


async def test_a_file_outlives_its_process(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.db")
    store = ResponseStore(path)
    await store.put("alice", stored(0, "hello"))
    await store.put("alice", stored(1, status="in_progress"))
    size = await store.num_bytes()
    with pytest.raises(SettingsError, match="locked"):
        ResponseStore(path)
    store.close()
    again = ResponseStore(path)
    assert (await again.response("alice", "resp_0")).input[0]["content"] == "hello"
    stopped = (await again.response("alice", "resp_1")).body
    assert (stopped["status"], stopped["error"]["code"]) == ("failed", "server_error")
    assert await again.num_bytes() == size
    again.close()


def test_a_file_that_is_none_is_a_settings_error(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    path.write_text("not a database, whatever its name says")
    with pytest.raises(SettingsError, match="--response-store"):
        ResponseStore(str(path))
