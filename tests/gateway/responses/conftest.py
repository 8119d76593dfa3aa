"""A gateway that keeps responses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from gateway.app import Gateway
from gateway.responses.store import ResponseStore
from tests.gateway.driving import MakeGateway, http_client
from tests.helpers.fake_target import FakeTarget


@pytest.fixture
def store() -> ResponseStore:
    return ResponseStore()


@pytest_asyncio.fixture
async def keeping(make_gateway: MakeGateway, target: FakeTarget, store: ResponseStore) -> Gateway:
    return await make_gateway(target, response_store=store)


@pytest_asyncio.fixture
async def keeper(keeping: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(keeping) as client:
        yield client
