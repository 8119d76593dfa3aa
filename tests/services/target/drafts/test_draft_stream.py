"""Messages from the engine thread reach their reader, in order, whatever wakes it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from services.target.drafts.attachment import DraftMessage, DraftStream


def _message(*closed: int) -> DraftMessage:
    return DraftMessage(closed=list(closed))


def _stream(capacity: int = 2) -> DraftStream:
    return DraftStream(asyncio.get_running_loop(), capacity)


async def test_a_message_from_another_thread_ends_the_wait() -> None:
    stream = _stream()
    waiting = asyncio.create_task(stream.news())
    with ThreadPoolExecutor(1) as engine:
        assert engine.submit(stream.send, _message(1)).result()
    await waiting
    assert stream.take() == _message(1)
    assert stream.take() is None


async def test_a_full_stream_refuses() -> None:
    stream = _stream(capacity=1)
    assert stream.send(_message(1))
    assert not stream.send(_message(2))
    assert stream.take() == _message(1)
    assert stream.send(_message(3))


async def test_a_closed_stream_is_over_once_it_is_empty() -> None:
    stream = _stream()
    stream.send(_message(1))
    stream.close()
    await stream.news()
    assert not stream.is_over
    assert stream.take() == _message(1)
    await stream.news()
    assert stream.is_over


async def test_a_drain_passes_what_is_queued() -> None:
    stream = _stream()
    stream.send(_message(1))
    stream.drain(2.5)
    await stream.news()
    assert stream.take_grace_s() == 2.5
    assert stream.take_grace_s() is None
    assert stream.take() == _message(1)


async def test_what_is_overlooked_is_told_again() -> None:
    stream = _stream()
    stream.drain(1.0)
    await stream.news()
    stream.drain(2.0)
    assert stream.take_grace_s() == 1.0
    await stream.news()
    assert stream.take_grace_s() == 2.0


async def test_a_reader_can_be_woken_for_something_else() -> None:
    stream = _stream()
    waiting = asyncio.create_task(stream.news())
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.wake()
    await waiting
    assert stream.take() is None
    assert not stream.is_over
