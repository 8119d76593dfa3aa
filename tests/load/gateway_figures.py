"""What is measured of a gateway under load: cost, latency, memory, and what resets leave."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.rpc.channel import open_channel
from tests.load.figures import percentile
from tests.load.gateway_stack import HOST, GatewayStack, HttpProcess
from tests.load.host_process import cpu_s, resident_mb
from tests.load.http_stream import StreamClient, StreamCounts, StreamSettings
from tests.load.synthetic_target import TOKENS_A_STEP

_SETTLE_TIMEOUT_S = 30.0
_LEFT_OPEN = (
    *("running_request_count", "waiting_request_count", "held_page_count"),
    *("open_request_count", "live_generation_count"),
)
_COSTS = ("us_per_chunk", "kernel_us_per_chunk")
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Load:
    """How much of it.

    Attributes:
        num_clients: client processes.
        num_streams: side by side.
        num_requests: short ones, for memory.
        duration_s: of the long streams.
        step_ms: of the target.
    """

    num_clients: int
    num_streams: int
    num_requests: int
    num_disconnects: int
    duration_s: float
    step_ms: float

    @property
    def num_tokens(self) -> int:
        """Tokens of a long stream."""
        return round(self.duration_s * 1e3 / self.step_ms) * TOKENS_A_STEP


async def cost(load: Load, stack: GatewayStack) -> Figures:
    """Long streams side by side: what a chunk costs the gateway, and what it costs at least."""
    settings = StreamSettings(HOST, stack.gateway.port, load.num_tokens)
    figures = await _cost(load, settings, stack.gateway)
    floor = await _cost(load, replace(settings, port=stack.bare.port), stack.bare)
    return {**figures, **{f"floor_{each}": floor[each] for each in _COSTS}}


async def _cost(load: Load, settings: StreamSettings, process: HttpProcess) -> Figures:
    (user_s, kernel_s), started_s = cpu_s(process.pid), time.perf_counter()
    counts = await _streams(load, load.num_streams, settings)
    end_user_s, end_kernel_s = cpu_s(process.pid)
    kernel_s = end_kernel_s - kernel_s
    # The kernel counts in ticks: what is shorter counts as one.
    used_s = max(end_user_s - user_s + kernel_s, 1 / os.sysconf("SC_CLK_TCK"))
    elapsed_s = time.perf_counter() - started_s
    return {
        "streams": counts.num_streams,
        "failed": counts.num_failed,
        "chunks": counts.num_chunks,
        "chunks_per_s": round(counts.num_chunks / elapsed_s),
        "chunks_per_cpu_s": round(counts.num_chunks / used_s),
        "us_per_chunk": round(1e6 * used_s / counts.num_chunks, 1),
        "kernel_us_per_chunk": round(1e6 * kernel_s / counts.num_chunks, 1),
    }


async def latency(load: Load, stack: GatewayStack) -> Figures:
    """The same streams with token ids, which tell when the target sent them; after a warm-up.

    Where the gateway and the bare one differ is what the gateway adds.
    """
    settings = StreamSettings(
        HOST, stack.gateway.port, load.num_tokens, stack.vocab_size, load.duration_s / 4
    )
    counts = await _streams(load, load.num_streams, settings)
    bare = await _streams(load, load.num_streams, replace(settings, port=stack.bare.port))
    return {
        "streams": counts.num_streams,
        "failed": counts.num_failed + bare.num_failed,
        **{f"age_ms_p{p}": percentile(counts.ages_us, p) / 1e3 for p in (50, 90, 99)},
        **{f"bare_age_ms_p{p}": percentile(bare.ages_us, p) / 1e3 for p in (50, 90, 99)},
    }


async def memory(load: Load, stack: GatewayStack) -> Figures:
    """Many short requests: memory after the first tenth and after all."""
    settings = StreamSettings(HOST, stack.gateway.port, 8 * TOKENS_A_STEP)
    num_first = load.num_requests // 10
    first = await _streams(load, num_first, settings)
    early_mb = resident_mb(stack.gateway.pid)
    rest = await _streams(load, load.num_requests - num_first, settings)
    late_mb = resident_mb(stack.gateway.pid)
    return {
        "requests": first.num_streams + rest.num_streams,
        "failed": first.num_failed + rest.num_failed,
        "resident_mb_early": round(early_mb, 1),
        "resident_mb_late": round(late_mb, 1),
        "growth_percent": round(100 * (late_mb / early_mb - 1), 2),
    }


async def disconnects(load: Load, settings: StreamSettings, maintenance: Sequence[str]) -> Figures:
    """Clients that reset after the first bytes: what runs, and which pages are held, afterwards.

    Args:
        maintenance: of what may be left with something open, `host:port`.
    """
    settings = replace(settings, num_tokens=100_000 * TOKENS_A_STEP)
    counts = StreamCounts()
    limit = asyncio.Semaphore(load.num_streams)

    async def leave() -> None:
        async with limit:
            await StreamClient(settings, counts).leave_after_first_chunk()

    await asyncio.gather(*(leave() for _ in range(load.num_disconnects)))
    deadline_s = time.monotonic() + _SETTLE_TIMEOUT_S
    started_s = time.perf_counter()
    left = await _left_open(maintenance)
    while any(left.values()) and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
        left = await _left_open(maintenance)
    settled_s = time.perf_counter() - started_s
    return {"disconnects": counts.num_streams, "settled_s": round(settled_s, 2), **left}


async def _left_open(addresses: Sequence[str]) -> Figures:
    """Returns what the processes say of themselves; names are of one process each."""
    found: Figures = {}
    for address in addresses:
        async with open_channel(address) as channel:
            stub = admin_service_pb2_grpc.AdminServiceStub(channel)
            info = await stub.GetServerInfo(admin_service_pb2.GetServerInfoRequest(), timeout=5.0)
        found |= {name: info.gauges[name] for name in _LEFT_OPEN if name in info.gauges}
    return found


def _work(settings: StreamSettings, num_streams: int, num_requests: int) -> StreamCounts:
    """Runs streams side by side in a process of its own."""
    counts = StreamCounts()

    async def run() -> None:
        clients = [StreamClient(settings, counts) for _ in range(num_streams)]
        each, rest = divmod(num_requests, num_streams)
        await asyncio.gather(*(client.run(each + (i < rest)) for i, client in enumerate(clients)))

    asyncio.run(run())
    return counts


async def _streams(load: Load, num_requests: int, settings: StreamSettings) -> StreamCounts:
    """Runs all streams, spread over the client processes."""
    loop, num_clients = asyncio.get_running_loop(), load.num_clients
    work = (settings, load.num_streams // num_clients, num_requests // num_clients)
    with ProcessPoolExecutor(num_clients, mp_context=get_context("spawn")) as executor:
        parts = await asyncio.gather(
            *(loop.run_in_executor(executor, _work, *work) for _ in range(num_clients))
        )
    return StreamCounts(
        num_streams=sum(part.num_streams for part in parts),
        num_chunks=sum(part.num_chunks for part in parts),
        num_failed=sum(part.num_failed for part in parts),
        ages_us=[age for part in parts for age in part.ages_us],
    )
