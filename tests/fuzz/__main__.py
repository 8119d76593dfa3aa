"""`make fuzz`: nearly right requests, and raw bytes, to every route and RPC of a gateway; beside
them, drafts that break the protocol, at a target.

No answer may be a 500, none may take longer than two seconds, no worker may be left behind: at the
end no request is live and no token reserved. A request that was late among others is sent again
alone at the end, and is a finding if it is late there, too. The seed makes a run again; a finding
is printed with what was sent, and belongs into `tests/gateway/test_hostile_requests.py`. SIGINT
ends a run early.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path

import grpc.aio
import httptools
import uvloop

from gateway.api_keys import Quotas
from gateway.app import create_app
from gateway.http_server import HttpServer, listen
from gateway.model_text import ModelText
from gateway.pool import TargetPool
from gateway.process import maintenance_server
from gateway.responses.store import ResponseStore
from gateway.serving import Gateway
from gateway.settings import GatewaySettings
from shared.model_files import tokenizer_sha256
from shared.rpc.admin_service import AdminHooks, ProcessInfo
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle, bind
from tests.fuzz.connection import Connection
from tests.fuzz.findings import MAX_SECONDS, BugLog, Findings
from tests.fuzz.mutations import BODIES, mutated, nasty_path, written
from tests.fuzz.rogue_drafts import send_rogues, tiny_target
from tests.gateway.conftest import write_model
from tests.gateway.driving import eventually
from tests.helpers.fake_target import FakeTarget

_NUM_AT_ONCE = 24
_WRONG = frozenset({500, 502})
_BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DEADLINE_EXCEEDED)
_PATHS = tuple(BODIES)
_TIMEOUT_S = 30.0
_RPCS = (
    "/outrider.admin.v1.AdminService/GetServerInfo",
    "/outrider.admin.v1.AdminService/ListAttachments",
    "/outrider.admin.v1.AdminService/FlushPrefixCache",
    "/grpc.health.v1.Health/Check",
)


async def _send_http(
    connection: Connection, port: int, rng: random.Random, found: Findings
) -> None:
    path, method, content = rng.choice(_PATHS), "POST", b""
    if rng.random() < 0.1:
        path, method = nasty_path(rng), rng.choice(("GET", "DELETE", "POST"))
    if method == "POST":
        content = written(mutated(BODIES.get(path, {}), rng), rng)

    async def send_alone() -> float:
        begin_s = time.monotonic()
        async with Connection(port) as fresh:
            with contextlib.suppress(TimeoutError):
                await fresh.request(method, path, content)
        return time.monotonic() - begin_s

    begin_s = time.monotonic()
    try:
        status = await connection.request(method, path, content)
        found.statuses[status] += 1
        if status in _WRONG:
            found.add(f"{path} answered {status}", content)
    except TimeoutError:
        pass  # late, as it is judged below
    except (OSError, httptools.HttpParserError) as error:
        found.add(f"{path} raised {error!r}", content)
    found.num_http += 1
    found.judge(time.monotonic() - begin_s, path, content, send_alone)


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
        answer = await asyncio.wait_for(reader.read(4096), MAX_SECONDS)
        if answer.startswith((b"HTTP/1.1 500", b"HTTP/1.1 502")):
            found.add("raw bytes answered 500", sent)
    except (ConnectionError, TimeoutError):
        pass  # an unfinished request may be waited for
    finally:
        found.num_raw += 1
        writer.close()


async def _send_rpc(channel: grpc.aio.Channel, rng: random.Random, found: Findings) -> None:
    method, content = rng.choice(_RPCS), rng.randbytes(rng.randrange(60))

    async def send() -> float:
        begin_s = time.monotonic()
        try:
            await channel.unary_unary(method)(content, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() in _BUGS:
                found.add(f"{method} failed: {error.code().name} {error.details()}", content)
        return time.monotonic() - begin_s

    found.judge(await send(), method, content, send)
    found.num_rpcs += 1


async def _watch_host(found: Findings, target: FakeTarget) -> None:
    while True:
        target.submits.clear()  # it keeps all that it was sent
        target.cancelled.clear()
        found.note_memory()
        await asyncio.sleep(1.0)


async def _fuzz(flags: argparse.Namespace, folder: Path, found: Findings) -> None:
    rng = random.Random(flags.seed)
    async with FakeTarget(tokenizer_sha256(folder)) as target:
        pool = TargetPool(GatewaySettings(target=(target.address,)), target.tokenizer_sha256)
        gateway = Gateway(
            pool=pool,
            text=ModelText.read(folder),
            settings=GatewaySettings(body_timeout_s=1.0),
            quotas=Quotas(),
            response_store=ResponseStore(max_bytes=2**20),
        )
        pool.start()
        await eventually(lambda: pool.is_serving)
        await gateway.lifecycle.activate()
        http = HttpServer(create_app(gateway), listen("127.0.0.1", 0), gateway.settings)
        http.start()
        hooks = AdminHooks(drain=gateway.lifecycle.wait_idle)
        info = ProcessInfo("gateway", "0", 1.0, {})
        maintenance = await maintenance_server(info, Lifecycle([]), hooks)
        address = f"127.0.0.1:{bind(maintenance, '127.0.0.1:0')}"
        await maintenance.start()
        end_s, stopped = time.monotonic() + flags.seconds, asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)

        def go_on() -> bool:
            if stopped.is_set():
                return False
            if flags.requests is not None:
                return found.num_http < flags.requests
            return time.monotonic() < end_s

        async def work(channel: grpc.aio.Channel) -> None:
            async with Connection(http.port) as connection:
                while go_on():
                    # Unfinished bytes are waited for; requests are sent meanwhile.
                    raw = asyncio.create_task(_send_raw(http.port, rng, found))
                    for _ in range(20):
                        await _send_http(connection, http.port, rng, found)
                    await _send_rpc(channel, rng, found)
                    await raw

        async with (
            open_channel(address) as channel,
            tiny_target(folder / "tiny") as speculating,
        ):
            host = asyncio.create_task(_watch_host(found, target))
            await asyncio.gather(
                send_rogues(speculating, random.Random(flags.seed), found, go_on),
                *(work(channel) for _ in range(_NUM_AT_ONCE)),
            )
            await found.try_suspects()
            host.cancel()
            found.check_memory()
            async with Connection(http.port) as connection:
                if await connection.request("GET", "/health", b"") != 200:
                    found.add("the gateway is not healthy at the end", b"")
        await eventually(lambda: gateway.lifecycle.num_open == 0)
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
        uvloop.run(_fuzz(flags, Path(folder), found))
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print("statuses:", dict(sorted(found.statuses.items())))
    print(found.memory_line)
    print(
        f"{found.num_http:,} requests, {found.num_raw:,} raw connections, {found.num_rpcs:,} RPCs, "
        f"{found.num_drafts:,} rogue drafts; {len(found.suspects)} late and sent again alone, "
        f"slowest {found.slowest_s:.2f} s; {memory_mib} MiB at most; {len(found.lines)} findings"
    )
    return 1 if found.lines else 0


if __name__ == "__main__":
    sys.exit(main())
