"""How other people's programs are run."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.clients.client import Client, run_client


async def test_a_client_works_in_its_home_whichever_way_it_asks(tmp_path: Path) -> None:
    asks = "import os; print(os.getcwd(), os.environ['PWD'])"
    client = Client("asks", None, (sys.executable, "-c", asks))
    outcome = await run_client(client, client.program, {"HOME": str(tmp_path)})
    assert outcome.is_well
    assert outcome.detail == f"{tmp_path} {tmp_path}"[:90]
