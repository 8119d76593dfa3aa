"""The two servers that clients are tried against, as processes of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from gateway.settings import DEMO_MODEL
from services.probe import grpc_is_serving, http_is_ready

_HOST = "127.0.0.1"
_DEMO_PORTS = (18500, 18510, 18520)
DEMO_TARGET = f"{_HOST}:{_DEMO_PORTS[1]}"
"""Where the demo's target serves gRPC, the contract of other gateways as well."""
_SYNTHETIC_PORT = 18530
_SCRIPTED_PORT = 18540
_START_TIMEOUT_S = 120.0
_NAMES = (  # by which suites of others ask for a model
    *("Qwen/Qwen2-1.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-0.6B"),
    *(
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-8B",
        "HuggingFaceH4/zephyr-7b-beta",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    *("claude-3-7-sonnet-latest", "default", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1"),
    *("gpt-6-astra", "model", "string", "test"),
)


@asynccontextmanager
async def demo() -> AsyncIterator[str]:
    """Gateway, target and draft with the demo models; yields the gateway's URL."""
    gateway, target, draft = _DEMO_PORTS
    process = await _start(
        *("services.cli", "serve", "--gateway-port", str(gateway), "--target-port", str(target)),
        *("--draft-port", str(draft), "--log-dir", ".run/clients", "--response-store", "memory"),
        *(word for name in _NAMES for word in ("--model-alias", name)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        assert ready.startswith(b"ready:"), "no stack; see .run/clients/"
        yield f"http://{_HOST}:{gateway}"
    finally:
        await _end([process])


@asynccontextmanager
async def synthetic() -> AsyncIterator[str]:
    """A gateway in front of a fast target with a short context; yields its URL."""
    port, target = _SYNTHETIC_PORT, _SYNTHETIC_PORT + 2
    tokenizer = ("--tokenizer", str(DEMO_MODEL))
    processes = [
        await _start(
            *("tests.load.synthetic_target", "--port", str(target), *tokenizer),
            *("--step-ms", "1", "--max-context", "64"),
        ),
        await _start(
            *("gateway", "--port", str(port), "--target", f"{_HOST}:{target}", *tokenizer),
            *("--target-maintenance", f"{_HOST}:{target + 1}", "--response-store", "memory"),
        ),
    ]
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await grpc_is_serving(f"{_HOST}:{target}"):
                await asyncio.sleep(0.1)
            while not await http_is_ready(_HOST, port, "/ready"):
                await asyncio.sleep(0.1)
        yield f"http://{_HOST}:{port}"
    finally:
        await _end(processes)


@asynccontextmanager
async def scripted(folder: str) -> AsyncIterator[str]:
    """A gateway in front of a target that makes agents write and read a file in `folder`."""
    process = await _start("tests.clients.scripted", str(_SCRIPTED_PORT), folder)
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await http_is_ready(_HOST, _SCRIPTED_PORT, "/ready"):
                await asyncio.sleep(0.1)
        yield f"http://{_HOST}:{_SCRIPTED_PORT}"
    finally:
        await _end([process])


async def _start(*arguments: str, **options: int) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,
        "OUTRIDER_LOG_LEVEL": "error",
        "OUTRIDER_TARGET_GRPC_VLLM_ENGINE": "true",
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, env=environment, **options
    )


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
        await process.wait()
