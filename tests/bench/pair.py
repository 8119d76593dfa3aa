"""A target and a draft as two processes on one host, driven over gRPC: no gateway in between."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from grpc import aio

from gateway.text.model_text import ModelText
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.rpc.trees import shape_message
from shared.tokens import TreeShape

START_TIMEOUT_S = 240.0
_POLL_S = 0.1


class PairFailed(Exception):
    """A process ended or did not come up in time; its log says why."""


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What to start.

    Attributes:
        target_flags, draft_flags: beside ports and addresses.
        folder: takes logs.
        logs_rounds: each process writes its round log there.
    """

    model: Path
    target_flags: tuple[str, ...]
    draft_flags: tuple[str, ...]
    folder: Path
    logs_rounds: bool = False

    def round_log(self, name: str) -> Path:
        return self.folder / f"{name}.rounds.jsonl"


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens of one answer, and the target's steps for it."""

    token_ids: tuple[int, ...]
    num_rounds: int


class Pair:
    """Clients of the two, and what their counters say."""

    def __init__(self, target: aio.Channel, admin: aio.Channel, draft: aio.Channel) -> None:
        self._target = pb_grpc.TargetServiceStub(target)
        self._admin = admin_service_pb2_grpc.AdminServiceStub(admin)
        self._draft = draft_service_pb2_grpc.DraftServiceStub(draft)
        self.metrics_url = ""

    async def set_mode(self, shape: TreeShape, budget: int) -> None:
        """Pins the draft's tree shape and says for how many verdicts it prepares."""
        config = draft_service_pb2.DraftConfig(
            shape=shape_message(shape), pinned=True, outcome_budget=budget
        )
        request = draft_service_pb2.UpdateDraftConfigRequest(config=config)
        await self._draft.UpdateDraftConfig(request, timeout=10.0)

    async def answer(
        self,
        prompt: Sequence[int],
        *,
        num_tokens: int,
        temperature: float,
        seed: int,
        is_plain: bool = False,
    ) -> Answer:
        """Generates exactly `num_tokens` tokens."""
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=seed),
            stop_params=sampling_pb2.StopParams(max_output_token_count=num_tokens, ignore_eos=True),
            speculation_params=pb.SpeculationParams(disabled=is_plain),
        )
        responses = [each async for each in self._target.Generate(request)]
        tokens = tuple(token for each in responses for token in each.delta.token_ids)
        return Answer(tokens, responses[-1].finished.speculation.round_count)

    async def until_attached(self) -> None:
        """Waits until the draft is attached to the target."""
        request = admin_service_pb2.ListAttachmentsRequest()
        while not (await self._admin.ListAttachments(request)).attachments:
            await asyncio.sleep(_POLL_S)

    async def counters(self) -> dict[str, float]:
        """Returns the target's counters, by name with and without their labels; the one without
        is the sum over them."""
        async with httpx.AsyncClient() as http:
            text = (await http.get(self.metrics_url)).text
        totals: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("outrider_target_") and not line.startswith("#"):
                full_name, value = line.rsplit(" ", 1)
                for name in {full_name, full_name.partition("{")[0]}:
                    totals[name] = totals.get(name, 0.0) + float(value)
        return totals


@asynccontextmanager
async def running_pair(settings: PairSettings) -> AsyncIterator[Pair]:
    """Starts both, waits until the draft is attached, and stops them.

    Raises:
        PairFailed: see there.
    """
    ports = _free_ports(5)
    target_port, admin_port, metrics_port, draft_port, draft_admin_port = ports
    target_arguments = [
        *("--model-path", str(settings.model), "--port", str(target_port)),
        *("--maintenance-port", str(admin_port), "--metrics-port", str(metrics_port)),
        *settings.target_flags,
    ]
    draft_arguments = [
        *("--target", f"127.0.0.1:{target_port}", "--port", str(draft_port)),
        *("--maintenance-port", str(draft_admin_port)),
        *settings.draft_flags,
    ]
    async with AsyncExitStack() as stack:
        running = [
            await stack.enter_async_context(_process(settings, name, arguments))
            for name, arguments in (("target", target_arguments), ("draft", draft_arguments))
        ]
        channels = [
            await stack.enter_async_context(open_channel(f"127.0.0.1:{port}"))
            for port in (target_port, admin_port, draft_port)
        ]
        pair = Pair(*channels)
        pair.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        await _until_up(pair, running, settings)
        yield pair


async def _until_up(
    pair: Pair, running: Sequence[asyncio.subprocess.Process], settings: PairSettings
) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if any(each.returncode is not None for each in running):
            break
        try:
            async with asyncio.timeout(5.0):
                return await pair.until_attached()
        except (TimeoutError, aio.AioRpcError):
            await asyncio.sleep(_POLL_S)
    raise PairFailed(f"target and draft did not come up; see the logs in {settings.folder}")


@asynccontextmanager
async def _process(
    settings: PairSettings, name: str, arguments: Sequence[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    logs = ["--round-log", str(settings.round_log(name))] if settings.logs_rounds else []
    with (settings.folder / f"{name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", f"services.{name}", *arguments, *logs), stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


async def chat_prompts(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Returns each text as a user's message, through the model's own chat template.

    Raises:
        CheckpointError: the folder has no tokenizer.
    """
    text = ModelText.read(folder)
    rendered = list(texts)
    if text.template is not None:
        rendered = [text.template.render([{"role": "user", "content": each}]) for each in texts]
    is_bare = text.template is None
    return [await text.tokenizer.encode(each, add_special_tokens=is_bare) for each in rendered]
