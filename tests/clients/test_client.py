"""How other people's programs are run."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from tests.clients import client as clients
from tests.clients.client import Client, run_client


async def test_a_client_works_in_its_home_whichever_way_it_asks(tmp_path: Path) -> None:
    asks = "import os; print(os.getcwd(), os.environ['PWD'])"
    client = Client("asks", None, (sys.executable, "-c", asks))
    outcome = await run_client(client, client.program, {"HOME": str(tmp_path)})
    assert outcome.is_well
    assert outcome.detail == f"{tmp_path} {tmp_path}"[:90]


async def test_what_a_client_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "_TIMEOUT_S", 0.5)
    sleeps = "import subprocess; subprocess.run(['sleep', '600'])"
    client = Client("sleeps", None, (sys.executable, "-c", sleeps))
    async with asyncio.timeout(60.0):
        outcome = await run_client(client, client.program, {"HOME": str(tmp_path)})
    assert outcome.is_well is False
