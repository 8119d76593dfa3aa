"""`make load-gateway`: what the gateway itself costs.

Starts a gateway in front of a target without a model, and measures on one host:

  cost        chunks a second of the gateway's CPU time, many streams side by side
  latency     age of tokens when the client has them, above the target's own sending
  memory      resident memory after a tenth of the requests and after all of them
  disconnects clients that reset their connection: what is left open afterwards

With `--url` and `--target-maintenance` the last one runs against a stack that serves already.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import urllib.parse
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gateway.settings import DEMO_MODEL
from services.probe import grpc_is_serving, http_is_ready
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.channel import open_channel
from shared.text.tokenizer import Tokenizer
from tests.load.figures import percentile
from tests.load.host_process import cpu_s, resident_mb
from tests.load.http_stream import StreamClient, StreamCounts, StreamSettings
from tests.load.synthetic_target import TOKENS_A_STEP

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 30.0
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured.

    Attributes:
        gateway_pid: None for a gateway that was there before, whose CPU time is not ours to tell.
        maintenance: of the target, `host:port`.
        num_clients: client processes.
    """

    streams: StreamSettings
    gateway_pid: int | None
    maintenance: str
    num_clients: int
    num_streams: int
    num_requests: int
    num_disconnects: int
    duration_s: float
    step_ms: float


def _work(settings: StreamSettings, num_streams: int, num_requests: int) -> StreamCounts:
    """Runs streams side by side in a process of its own."""
    counts = StreamCounts()

    async def run() -> None:
        clients = [StreamClient(settings, counts) for _ in range(num_streams)]
        each, rest = divmod(num_requests, num_streams)
        await asyncio.gather(*(client.run(each + (i < rest)) for i, client in enumerate(clients)))

    asyncio.run(run())
    return counts


async def _streams(bench: Bench, num_requests: int, settings: StreamSettings) -> StreamCounts:
    """Runs all streams, spread over the client processes."""
    loop, num_clients = asyncio.get_running_loop(), bench.num_clients
    with ProcessPoolExecutor(num_clients, mp_context=get_context("spawn")) as executor:
        parts = await asyncio.gather(
            *(
                loop.run_in_executor(
                    executor,
                    _work,
                    settings,
                    bench.num_streams // num_clients,
                    num_requests // num_clients,
                )
                for _ in range(num_clients)
            )
        )
    return StreamCounts(
        num_streams=sum(part.num_streams for part in parts),
        num_chunks=sum(part.num_chunks for part in parts),
        num_failed=sum(part.num_failed for part in parts),
        ages_us=[age for part in parts for age in part.ages_us],
    )


async def cost(bench: Bench) -> Figures:
    """Long streams side by side: what a chunk costs the gateway."""
    assert bench.gateway_pid is not None
    before_s, started_s = cpu_s(bench.gateway_pid), time.perf_counter()
    counts = await _long_streams(bench, vocab_size=0)
    used_s, elapsed_s = cpu_s(bench.gateway_pid) - before_s, time.perf_counter() - started_s
    return {
        "streams": counts.num_streams,
        "failed": counts.num_failed,
        "chunks": counts.num_chunks,
        "chunks_per_s": round(counts.num_chunks / elapsed_s),
        "chunks_per_cpu_s": round(counts.num_chunks / used_s),
        "us_per_chunk": round(1e6 * used_s / counts.num_chunks, 1),
    }


async def latency(bench: Bench) -> Figures:
    """The same streams with token ids, which tell when the target sent them."""
    counts = await _long_streams(bench, vocab_size=bench.streams.vocab_size)
    return {
        "streams": counts.num_streams,
        "failed": counts.num_failed,
        **{f"age_ms_p{p}": percentile(counts.ages_us, p) / 1e3 for p in (50, 90, 99)},
    }


async def _long_streams(bench: Bench, vocab_size: int) -> StreamCounts:
    num_steps = round(bench.duration_s * 1e3 / bench.step_ms)
    settings = replace(bench.streams, num_tokens=num_steps * TOKENS_A_STEP, vocab_size=vocab_size)
    return await _streams(bench, bench.num_streams, settings)


async def memory(bench: Bench) -> Figures:
    """Many short requests: memory after the first tenth and after all."""
    assert bench.gateway_pid is not None
    settings = replace(bench.streams, num_tokens=8 * TOKENS_A_STEP)
    num_first = bench.num_requests // 10
    first = await _streams(bench, num_first, settings)
    early_mb = resident_mb(bench.gateway_pid)
    rest = await _streams(bench, bench.num_requests - num_first, settings)
    late_mb = resident_mb(bench.gateway_pid)
    return {
        "requests": first.num_streams + rest.num_streams,
        "failed": first.num_failed + rest.num_failed,
        "resident_mb_early": round(early_mb, 1),
        "resident_mb_late": round(late_mb, 1),
        "growth_percent": round(100 * (late_mb / early_mb - 1), 2),
    }


async def disconnects(bench: Bench) -> Figures:
    """Clients that reset after the first bytes: what runs, and which pages are held, afterwards."""
    settings = replace(bench.streams, num_tokens=100_000 * TOKENS_A_STEP, vocab_size=0)
    counts = StreamCounts()
    limit = asyncio.Semaphore(bench.num_streams)

    async def leave() -> None:
        async with limit:
            await StreamClient(settings, counts).leave_after_first_chunk()

    await asyncio.gather(*(leave() for _ in range(bench.num_disconnects)))
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    started_s = time.perf_counter()
    gauges = await _gauges(bench.maintenance)
    while any(gauges.values()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
        gauges = await _gauges(bench.maintenance)
    settled_s = time.perf_counter() - started_s
    return {"disconnects": counts.num_streams, "settled_s": round(settled_s, 2), **gauges}


async def _gauges(address: str) -> Figures:
    async with open_channel(address) as channel:
        stub = admin_service_pb2_grpc.AdminServiceStub(channel)
        info = await stub.GetServerInfo(admin_service_pb2.GetServerInfoRequest(), timeout=5.0)
    names = ("running_request_count", "waiting_request_count", "held_page_count")
    return {name: info.gauges[name] for name in names if name in info.gauges}


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


@asynccontextmanager
async def _stack(flags: argparse.Namespace) -> AsyncIterator[Bench]:
    """A gateway in front of a synthetic target."""
    port, target = flags.port, f"{_HOST}:{flags.port + 2}"
    tokenizer = ("--tokenizer", str(DEMO_MODEL))
    async with (
        _process(
            *("tests.load.synthetic_target", "--port", str(port + 2), *tokenizer),
            *("--step-ms", str(flags.step_ms)),
        ),
        _process("gateway", "--port", str(port), "--target", target, *tokenizer) as gateway,
    ):
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await grpc_is_serving(target):
                await asyncio.sleep(0.1)
            while not await http_is_ready(_HOST, port, "/ready"):
                await asyncio.sleep(0.1)
        vocab_size = len(Tokenizer.read(DEMO_MODEL).token_bytes)
        streams = StreamSettings(_HOST, port, 1, vocab_size)
        yield _bench(flags, streams, gateway.pid, f"{_HOST}:{port + 3}")


def _bench(
    flags: argparse.Namespace, streams: StreamSettings, gateway_pid: int | None, maintenance: str
) -> Bench:
    return Bench(
        streams=streams,
        gateway_pid=gateway_pid,
        maintenance=maintenance,
        num_clients=flags.clients,
        num_streams=flags.streams,
        num_requests=flags.requests,
        num_disconnects=flags.disconnects,
        duration_s=flags.duration_s,
        step_ms=flags.step_ms,
    )


_MEASUREMENTS = {
    "cost": cost,
    "latency": latency,
    "memory": memory,
    "disconnects": disconnects,
}


async def run(flags: argparse.Namespace) -> Mapping[str, Figures]:
    """Runs the measurements that can be made; returns them by name."""
    if flags.url is not None:
        url = urllib.parse.urlsplit(flags.url)
        streams = StreamSettings(url.hostname or _HOST, url.port or 80, 1)
        bench = _bench(flags, streams, None, flags.target_maintenance)
        return {"disconnects": await disconnects(bench)}
    async with _stack(flags) as bench:
        return {name: await _MEASUREMENTS[name](bench) for name in flags.only or _MEASUREMENTS}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="load-gateway",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", help="a gateway that serves; only disconnects are measured")
    parser.add_argument("--target-maintenance", default=f"{_HOST}:50052")
    parser.add_argument("--only", action="append", choices=tuple(_MEASUREMENTS))
    parser.add_argument("--port", type=int, default=18000, help="first of four")
    parser.add_argument("--streams", type=int, default=256, help="side by side")
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the synthetic target")
    parser.add_argument("--duration-s", type=float, default=10.0, help="of the long streams")
    parser.add_argument("--requests", type=int, default=10_000, help="short ones, for memory")
    parser.add_argument("--disconnects", type=int, default=1_000)
    parser.add_argument("--out", type=Path, default=Path(".run/load"))
    return parser.parse_args(arguments)


def main() -> int:
    flags = parse(sys.argv[1:])
    figures: Mapping[str, Any] = asyncio.run(run(flags))
    flags.out.mkdir(parents=True, exist_ok=True)
    (flags.out / "gateway.json").write_text(json.dumps(figures, indent=2) + "\n")
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in values.items()))
    left = figures.get("disconnects", {})
    is_clean = not (left.get("running_request_count") or left.get("held_page_count"))
    failed = sum(values.get("failed", 0) for values in figures.values())
    return 0 if is_clean and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
