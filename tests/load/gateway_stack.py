"""A gateway in front of a target without a model, as processes of this host."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.settings import DEMO_MODEL
from services.probe import grpc_is_serving, http_is_ready
from shared.text import Tokenizer

HOST = "127.0.0.1"
NUM_PORTS = 5
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class HttpProcess:
    """Something that answers chats."""

    pid: int
    port: int


@dataclass(frozen=True, slots=True)
class GatewayStack:
    """What runs.

    Attributes:
        bare: relays the same steps and does nothing else; shares the target.
        maintenance: of the gateway and of the target, `host:port`.
        vocab_size: of the target.
    """

    gateway: HttpProcess
    bare: HttpProcess
    maintenance: tuple[str, ...]
    vocab_size: int


@asynccontextmanager
async def gateway_stack(
    port: int, step_ms: float, num_workers: int = 1
) -> AsyncIterator[GatewayStack]:
    """Starts everything, waits until it serves, and stops it.

    Args:
        port: first of `NUM_PORTS`.
        step_ms: between the steps of the target.
        num_workers: of the gateway.
    """
    target, tokenizer = f"{HOST}:{port + 2}", ("--tokenizer", str(DEMO_MODEL))
    async with (
        _process(
            *("tests.load.synthetic_target", "--port", str(port + 2), *tokenizer),
            *("--step-ms", str(step_ms)),
        ),
        _process(
            *("gateway", "--port", str(port), "--target", target, *tokenizer),
            *("--workers", str(num_workers)),
        ) as gateway,
        _process("tests.load.bare_gateway", "--port", str(port + 4), "--target", target) as bare,
    ):
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await grpc_is_serving(target):
                await asyncio.sleep(0.1)
            for each in (port, port + 4):
                while not await http_is_ready(HOST, each, "/ready"):
                    await asyncio.sleep(0.1)
        yield GatewayStack(
            gateway=HttpProcess(gateway.pid, port),
            bare=HttpProcess(bare.pid, port + 4),
            maintenance=(f"{HOST}:{port + 1}", f"{HOST}:{port + 3}"),
            vocab_size=len(Tokenizer.read(DEMO_MODEL).token_bytes),
        )


@asynccontextmanager
async def _process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, env={**os.environ, "OUTRIDER_LOG_LEVEL": "warning"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
