"""The probe's exit code says what the server says, and cannot say yes to nobody."""

from __future__ import annotations

import asyncio
import sys

from tests.helpers.scripted_server import scripted_server


async def probe(address: str, *flags: str) -> tuple[int | None, str]:
    """Runs the probe as a container does; returns exit code and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "shared.rpc.healthcheck", address, "--timeout", "20", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    return process.returncode, stderr.decode()


async def test_probe_tells_serving_from_everything_else() -> None:
    async with scripted_server() as other:
        nobody = other.address
    async with scripted_server() as starting, scripted_server() as active:
        await active.lifecycle.activate()
        serving, named, unknown, not_serving, absent = await asyncio.gather(
            probe(active.address),
            probe(active.address, "--service", "scripted.Service"),
            probe(active.address, "--service", "absent.Service"),
            probe(starting.address),
            probe(nobody),
        )
    assert serving == (0, "")
    assert named == (0, "")
    assert unknown[0] == 1
    assert "NOT_FOUND" in unknown[1]
    assert not_serving == (1, f"{starting.address}: NOT_SERVING\n")
    assert absent[0] == 1
    assert "UNAVAILABLE" in absent[1]


async def test_an_address_without_a_port_is_not_dialled_on_443() -> None:
    exit_code, problem = await probe("target")
    assert exit_code == 1
    assert problem.startswith("ADDRESS is 'target'; it must be HOST:PORT")
