"""Requests of the bench share one stream, and each gets its own tokens or its own failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from tests.bench.session import RequestFailed, Session
from tests.helpers.fake_target import FakeTarget


@pytest.fixture
async def target() -> AsyncIterator[FakeTarget]:
    async with FakeTarget("0" * 64) as target:
        yield target


@pytest.fixture
async def session(target: FakeTarget) -> AsyncIterator[Session]:
    async with open_channel(target.address) as channel:
        session = Session(channel)
        yield session
        await session.close()


def _request(*prompt: int) -> pb.GenerateRequest:
    stop = sampling_pb2.StopParams(max_output_token_count=7, ignore_eos=True)
    return pb.GenerateRequest(prompt_token_ids=prompt, stop_params=stop)


async def test_answers_are_told_apart(target: FakeTarget, session: Session) -> None:
    counts: list[int] = []
    first, second = await asyncio.gather(
        session.answer(_request(1, 2), counts.append), session.answer(_request(5), None)
    )
    assert first.token_ids == (1, 2, 1, 2, 1, 2, 1)
    assert second.token_ids == (5,) * 7
    assert counts == [3, 3, 1] == [count for _, count in first.arrivals]
    assert target.num_sessions == 1


async def test_a_refusal_is_that_requests_alone(target: FakeTarget, session: Session) -> None:
    target.refusals.append(pb.RequestFailure(reason="QUEUE_FULL", message="9 wait already"))
    with pytest.raises(RequestFailed, match="9 wait already"):
        await session.answer(_request(1), None)
    assert len((await session.answer(_request(1), None)).token_ids) == 7


async def test_a_lost_stream_fails_what_is_open(target: FakeTarget, session: Session) -> None:
    target.is_mute = True
    answering = asyncio.create_task(session.answer(_request(1), None))
    await target.until(lambda: len(target.submits) == 1)
    await target.break_sessions()
    with pytest.raises(RequestFailed):
        await answering
