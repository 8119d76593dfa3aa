"""A target without a model, fast enough to load a gateway: `python -m tests.load.synthetic_target`.

Every step it sends each open request a few tokens, in one message for all, as a real target does.
The tokens spell the time of sending, so that a client on the same host knows how old they are.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import uvloop
from grpc import aio

from shared.model_files import tokenizer_sha256
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.rpc.admin_service import AdminHooks, AdminServicer, ProcessInfo
from shared.rpc.server import Lifecycle, bind, create_server
from shared.text import Tokenizer

TOKENS_A_STEP = 3
_TARGET = pb.DESCRIPTOR.services_by_name["TargetService"]
_ADMIN = admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"]


def spelled_time(now_us: int, vocab_size: int) -> list[int]:
    """Returns microseconds as tokens, most significant first."""
    digits = []
    for _ in range(TOKENS_A_STEP):
        now_us, digit = divmod(now_us, vocab_size)
        digits.append(digit)
    return digits[::-1]


def age_us(token_ids: Sequence[int], now_us: int, vocab_size: int) -> int:
    """Returns how long ago tokens were sent, from the last three."""
    sent_us = 0
    for digit in token_ids[-TOKENS_A_STEP:]:
        sent_us = sent_us * vocab_size + digit
    return int((now_us - sent_us) % vocab_size**TOKENS_A_STEP)


class SyntheticTarget(pb_grpc.TargetServiceServicer):
    """Steps every `step_s`; requests end at their output limit."""

    def __init__(self, sha256: str, *, vocab_size: int, max_context: int, step_s: float) -> None:
        self._model = pb.GetModelResponse(
            model_id="synthetic",
            tokenizer_sha256=sha256,
            max_context_token_count=max_context,
            vocab_size=vocab_size,
        )
        self._step_s = step_s
        self.num_open = 0

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return self._model

    async def Session(
        self, request_iterator: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionResponse]:
        left: dict[int, int] = {}
        news: list[pb.SessionEvent] = []
        reader = asyncio.create_task(self._read(request_iterator, left, news))
        due_s = time.monotonic()
        try:
            while not reader.done():
                due_s = max(due_s + self._step_s, time.monotonic())
                await asyncio.sleep(due_s - time.monotonic())
                response = self._step(left)
                started, news[:] = pb.SessionResponse(events=news), []
                for each in (started, response):
                    if each.ByteSize():
                        yield each
        finally:
            reader.cancel()
            self.num_open -= len(left)

    async def _read(
        self,
        requests: AsyncIterator[pb.SessionRequest],
        left: dict[int, int],
        news: list[pb.SessionEvent],
    ) -> None:
        async for message in requests:
            if message.HasField("submit"):
                submit = message.submit
                left[submit.request_id] = submit.request.stop_params.max_output_token_count
                self.num_open += 1
                started = pb.GenerateResponse(started=pb.GenerationStarted())
                news.append(pb.SessionEvent(request_id=submit.request_id, response=started))
            elif left.pop(message.cancel.request_id, None) is not None:
                self.num_open -= 1

    def _step(self, left: dict[int, int]) -> pb.SessionResponse:
        tokens = spelled_time(time.monotonic_ns() // 1000, self._model.vocab_size)
        deltas = pb.TokenDeltas(
            request_ids=left,
            token_counts=[len(tokens)] * len(left),
            token_ids=tokens * len(left),
            accepted_token_counts=[2] * len(left),
            drafted_token_counts=[4] * len(left),
        )
        events = []
        for key in [key for key, count in left.items() if count <= TOKENS_A_STEP]:
            finished = pb.GenerationFinished(finish_reason=pb.FINISH_REASON_LENGTH)
            response = pb.GenerateResponse(finished=finished)
            events.append(pb.SessionEvent(request_id=key, response=response))
            del left[key]
            self.num_open -= 1
        for key in left:
            left[key] -= TOKENS_A_STEP
        return pb.SessionResponse(events=events, deltas=deltas if deltas.request_ids else None)


async def _serve(flags: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    vocab_size = len(Tokenizer.read(flags.tokenizer).token_bytes)
    target = SyntheticTarget(
        tokenizer_sha256(flags.tokenizer),
        vocab_size=vocab_size,
        max_context=flags.max_context,
        step_s=flags.step_ms / 1e3,
    )
    lifecycle = Lifecycle([_TARGET.full_name])

    async def gauges() -> dict[str, float]:
        return {"running_request_count": float(target.num_open), "held_page_count": 0.0}

    async def drain(grace_s: float) -> int:
        return target.num_open

    async def flush() -> int:
        return 0

    def register(server: aio.Server) -> None:
        pb_grpc.add_TargetServiceServicer_to_server(target, server)

    def register_admin(server: aio.Server) -> None:
        info = ProcessInfo("target", "synthetic", time.time(), {})
        hooks = AdminHooks(drain=drain, gauges=gauges, flush_prefix_cache=flush)
        servicer = AdminServicer(info, lifecycle, hooks)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)

    public = await create_server([_TARGET], register, lifecycle)
    admin = await create_server([_ADMIN], register_admin, lifecycle)
    bind(public, f"127.0.0.1:{flags.port}")
    bind(admin, f"127.0.0.1:{flags.port + 1}")
    for server in (public, admin):
        await server.start()
    await lifecycle.activate()
    await stop.wait()
    for server in (public, admin):
        await server.stop(0.0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="synthetic-target", description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="maintenance is one above")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--max-context", type=int, default=1_000_000, help="tokens")
    parser.add_argument("--step-ms", type=float, default=20.0)
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
