"""Events on their way to one RPC: order, and what a reader that does not read may cost."""

from __future__ import annotations

import asyncio

import pytest

from services.target.requests.admission import EventQueue
from shared.errors import QueueFull
from shared.generation import Delta

EVENT = Delta((1,), (), 0, 0)


async def test_steps_that_were_not_read_come_as_one_batch() -> None:
    stream = EventQueue(asyncio.get_running_loop())
    stream.deliver([(1, EVENT), (2, EVENT)])
    stream.deliver([(1, EVENT)])
    await asyncio.sleep(0)
    assert [key for key, _ in await stream.next_batch()] == [1, 2, 1]


async def test_a_reader_that_does_not_read_may_not_ask_for_more() -> None:
    stream = EventQueue(asyncio.get_running_loop(), max_unread_events=3)
    for _ in range(3):
        stream.check_room()
        stream.put([(1, EVENT)])
    with pytest.raises(QueueFull, match="3 events of this session are unread; it may leave 3"):
        stream.check_room()
    await stream.next_batch()
    stream.check_room()
