"""The queue keeps order, never blocks the writer, and never grows past its bound."""

from __future__ import annotations

import asyncio

import pytest

from gateway.answer import AnswerQueue
from gateway.failures import Aborted, ClientGone, ClientTooSlow
from shared.generation import Delta, Started


def queue(max_unread_tokens: int = 100) -> tuple[AnswerQueue, list[str]]:
    overflows: list[str] = []
    return AnswerQueue(max_unread_tokens, lambda: overflows.append("overflow")), overflows


async def test_all_that_waits_is_taken_at_once_and_in_order() -> None:
    box, _ = queue()
    box.put(1, Started(0))
    box.put(0, Delta([5]))
    assert await box.take() == [(1, Started(0)), (0, Delta([5]))]


async def test_a_reader_is_woken() -> None:
    box, _ = queue()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(0, Started(0))
    assert await reader == [(0, Started(0))]


async def test_reading_frees_the_room() -> None:
    box, overflows = queue(max_unread_tokens=3)
    for _ in range(5):
        box.put(0, Delta([1, 2, 3]))
        await box.take()
    assert overflows == []


async def test_the_bound_drops_the_backlog_and_is_reported_once() -> None:
    box, overflows = queue(max_unread_tokens=3)
    for _ in range(5):
        box.put(0, Delta([1, 2]))
    assert overflows == ["overflow"]
    with pytest.raises(ClientTooSlow, match="3 tokens"):
        await box.take()


async def test_closing_wakes_the_reader_with_the_reason() -> None:
    box, _ = queue()
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.close(ClientGone())
    with pytest.raises(ClientGone):
        await reader


async def test_what_came_before_an_abort_is_still_read() -> None:
    box, _ = queue()
    box.put(0, Delta([1, 2]))
    box.end(Aborted("aborted", reason="REQUEST_ABORTED"))
    box.put(0, Delta([3]))
    assert await box.take() == [(0, Delta([1, 2]))]
    with pytest.raises(Aborted):
        await box.take()


async def test_a_delta_is_taken_at_once_only_where_the_reader_waits_for_nothing_else() -> None:
    box, _ = queue()
    at_once: list[int] = []

    def take_now(index: int, delta: Delta) -> bool:
        at_once.extend(delta.token_ids)
        return True

    box.take_now = take_now
    box.put(0, Delta([1]))  # nobody waits
    assert await box.take() == [(0, Delta([1]))]
    reader = asyncio.create_task(box.take())
    await asyncio.sleep(0)
    box.put(0, Delta([2]))
    assert not reader.done()
    box.put(0, Started(0))
    box.put(0, Delta([3]))  # behind what is unread
    assert await reader == [(0, Started(0)), (0, Delta([3]))]
    assert at_once == [2]
