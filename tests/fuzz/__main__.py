"""`make fuzz`: nearly right requests, and raw bytes, to every route and RPC of a gateway; beside
them, drafts that break the protocol, at a target.

No answer may be a 500 or take longer than two seconds, no worker may be left behind: at the end no
request is live and no token reserved. The seed makes a run again; a finding is printed with what
was sent, and belongs into `tests/gateway/test_hostile_requests.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import grpc.aio
import httpx

from gateway.app import create_app
from gateway.http_server import HttpServer, listen
from gateway.limits import RequestLimits
from gateway.maintenance_service import maintenance_server
from gateway.metrics import GatewayMetrics
from gateway.open_answers import OpenAnswers
from gateway.pool import PoolSettings, TargetPool
from gateway.responses.store import ResponseStore, StoreLimits
from gateway.serving import Gateway
from gateway.text.model_text import ModelText
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.server import bind
from shared.tokenizer_files import tokenizer_sha256
from tests.fuzz.findings import BugLog, Findings
from tests.fuzz.mutations import BODIES, mutated, nasty_path, written
from tests.fuzz.rogue_drafts import send_rogues, tiny_target
from tests.gateway.conftest import write_model
from tests.gateway.driving import eventually
from tests.helpers.fake_target import FakeTarget

_MAX_SECONDS = 2.0
_NUM_AT_ONCE = 8
_WRONG = frozenset({500, 502})
_RPCS = (
    "/outrider.admin.v1.AdminService/GetServerInfo",
    "/outrider.admin.v1.AdminService/ListAttachments",
    "/outrider.admin.v1.AdminService/FlushPrefixCache",
    "/grpc.health.v1.Health/Check",
)


def _max_seconds() -> float:
    """Returns how long an answer may take, which is longer where others use the processors."""
    return _MAX_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def _send_http(client: httpx.AsyncClient, rng: random.Random, found: Findings) -> None:
    path, method, content = rng.choice(list(BODIES)), "POST", b""
    if rng.random() < 0.1:
        path, method = nasty_path(rng), rng.choice(("GET", "DELETE", "POST"))
    if method == "POST":
        content = written(mutated(BODIES.get(path, {}), rng), rng)
    begin_s = time.monotonic()
    try:
        headers = {"content-type": "application/json"}
        response = await client.request(method, path, content=content, headers=headers)
        found.statuses[response.status_code] += 1
        if response.status_code in _WRONG:
            found.add(f"{path} answered {response.status_code}", content)
    except httpx.HTTPError as error:
        found.add(f"{path} raised {error!r}", content)
    duration_s = time.monotonic() - begin_s
    found.num_http += 1
    found.slowest_s = max(found.slowest_s, duration_s)
    if duration_s > _max_seconds():
        found.add(f"{path} took {duration_s:.1f} s", content)


async def _send_raw(port: int, rng: random.Random, found: Findings) -> None:
    """Sends bytes that are hardly HTTP; whatever comes back, the server lives on."""
    body = rng.randbytes(rng.randrange(300))
    heads = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body),
        b"GET /%b HTTP/1.1\r\n\r\n" % rng.randbytes(20),
        b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /v1/models/%ff%fe?model=%00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"",
    )
    sent = rng.choice(heads) + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(4096), _MAX_SECONDS)
        if answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502")):
            found.add("raw bytes answered 500", sent)
    except (ConnectionError, TimeoutError):
        pass  # an unfinished request may be waited for
    finally:
        found.num_raw += 1
        writer.close()


async def _send_rpc(channel: grpc.aio.Channel, rng: random.Random, found: Findings) -> None:
    method, content = rng.choice(_RPCS), rng.randbytes(rng.randrange(60))
    try:
        await channel.unary_unary(method)(content, timeout=_max_seconds())
    except grpc.aio.AioRpcError as error:
        if error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL):
            found.add(f"{method} failed: {error.code().name} {error.details()}", content)
    found.num_rpcs += 1


async def _watch_memory(found: Findings) -> None:
    while True:
        found.note_memory()
        await asyncio.sleep(1.0)


async def _fuzz(flags: argparse.Namespace, folder: Path, found: Findings) -> None:
    rng = random.Random(flags.seed)
    async with FakeTarget(tokenizer_sha256(folder)) as target:
        pool = TargetPool(PoolSettings((target.address,), target.tokenizer_sha256))
        gateway = Gateway(
            pool=pool,
            text=ModelText.read(folder),
            limits=RequestLimits(body_timeout_s=1.0),
            metrics=GatewayMetrics(pool),
            lifecycle=Lifecycle([]),
            open_answers=OpenAnswers(),
            version="0",
            start_time_s=1.0,
            response_store=ResponseStore(limits=StoreLimits(max_bytes=2**20)),
        )
        pool.start()
        await eventually(lambda: pool.is_serving)
        await gateway.lifecycle.activate()
        http = HttpServer(create_app(gateway), listen("127.0.0.1", 0))
        http.start()
        hooks = AdminHooks(drain=gateway.open_answers.wait_idle)
        info = ProcessInfo("gateway", "0", 1.0, {})
        maintenance = await maintenance_server(info, Lifecycle([]), hooks)
        address = f"127.0.0.1:{bind(maintenance, '127.0.0.1:0')}"
        await maintenance.start()
        end_s = time.monotonic() + flags.seconds

        def go_on() -> bool:
            if flags.requests is not None:
                return found.num_http < flags.requests
            return time.monotonic() < end_s

        async def work(client: httpx.AsyncClient, channel: grpc.aio.Channel) -> None:
            while go_on():
                for _ in range(20):
                    await _send_http(client, rng, found)
                await _send_raw(http.port, rng, found)
                await _send_rpc(channel, rng, found)

        url = f"http://127.0.0.1:{http.port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=30.0) as client,
            open_channel(address) as channel,
            tiny_target(folder / "tiny") as speculating,
        ):
            memory = asyncio.create_task(_watch_memory(found))
            await asyncio.gather(
                send_rogues(speculating, random.Random(flags.seed), found, go_on),
                *(work(client, channel) for _ in range(_NUM_AT_ONCE)),
            )
            memory.cancel()
            found.check_memory()
            if (await client.get("/health")).status_code != 200:
                found.add("the gateway is not healthy at the end", b"")
        await eventually(lambda: gateway.open_answers.num_open == 0)
        if pool.num_live or pool.links[0].num_reserved_tokens:
            found.add(f"{pool.num_live} requests are live at the end", b"")
        await http.stop(1)
        await maintenance.stop(None)
        await pool.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--requests", type=int, help="HTTP requests to send, however long it takes")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    found = Findings()
    logging.basicConfig(handlers=[BugLog(found)], force=True)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        asyncio.run(_fuzz(flags, Path(folder), found))
    # A busy machine makes everything late; what is wrong comes first.
    for line in sorted(found.lines, key=lambda line: " took " in line or " held " in line)[:20]:
        print(line)
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("statuses:", dict(sorted(found.statuses.items())))
    print(found.memory_line)
    print(
        f"{found.num_http:,} requests, {found.num_raw:,} raw connections, {found.num_rpcs:,} RPCs, "
        f"{found.num_drafts:,} rogue drafts; "
        f"slowest {found.slowest_s:.2f} s, {memory_mib} MiB at most; {len(found.lines)} findings"
    )
    return 1 if found.lines else 0


if __name__ == "__main__":
    sys.exit(main())
