"""A target and a draft as processes on one host, driven over gRPC: no gateway in between."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from grpc import aio

from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.rpc.requests import shape_message
from shared.tokens import TreeShape
from tests.bench.child import Child
from tests.bench.scrape import add_counters
from tests.bench.session import Answer, OnTokens, Session
from tests.bench.wire_process import WireProcess
from tests.helpers.serving import free_ports

START_TIMEOUT_S = 240.0
# A draft may be capturing graphs when it is told.
_CONFIG_TIMEOUT_S = 60.0
_POLL_S = 0.1


class PairFailed(Exception):
    """A process ended or did not come up in time; its log says why."""


@dataclass(frozen=True, slots=True)
class PairSettings:
    """What to start.

    Attributes:
        target_flags, draft_flags: beside ports and addresses.
        distant_flags: further ones of a draft behind a wire.
        folder: takes logs.
        logs_rounds: each process has a round log there, which is off until `Pair.log_rounds`.
    """

    model: Path
    target_flags: tuple[str, ...]
    draft_flags: tuple[str, ...]
    folder: Path
    distant_flags: tuple[str, ...] = ()
    logs_rounds: bool = False

    def round_log(self, name: str) -> Path:
        return self.folder / f"{name}.rounds.jsonl"


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the two listen."""

    target: int
    target_admin: int
    target_metrics: int
    draft: int
    draft_admin: int
    draft_metrics: int


class Pair:
    """The two processes and clients of them. The draft may be replaced."""

    def __init__(self, settings: PairSettings, ports: Ports, stack: AsyncExitStack) -> None:
        self._settings = settings
        self._ports = ports
        self._stack = stack
        self._target: Child | None = None
        self.draft: Child | None = None
        self._num_drafts = 0
        self._session: Session | None = None

    @property
    def _worker_id(self) -> str:
        return f"draft-{self._num_drafts}"

    @property
    def target_address(self) -> str:
        return f"127.0.0.1:{self._ports.target}"

    async def start_target(self) -> None:
        """Starts it, without waiting for it."""
        ports, settings = self._ports, self._settings
        self._target = await self._start(
            "target",
            *("--model-path", str(settings.model), "--port", str(ports.target)),
            *("--maintenance-port", str(ports.target_admin)),
            *("--metrics-port", str(ports.target_metrics)),
            *settings.target_flags,
        )

    async def start_draft(self, wire: WireProcess | None = None) -> None:
        """Starts a draft, in place of the one before, and waits until it is attached.

        Args:
            wire: to the target, for a draft as on another host.

        Raises:
            PairFailed: see there.
        """
        if self.draft is not None:
            await self.draft.stop()
        ports = self._ports
        self._num_drafts += 1
        self.draft = await self._start(
            "draft",
            *("--worker-id", self._worker_id),
            *("--target", wire.address if wire else self.target_address),
            *("--port", str(ports.draft), "--maintenance-port", str(ports.draft_admin)),
            *("--metrics-port", str(ports.draft_metrics)),
            *self._settings.draft_flags,
            *(self._settings.distant_flags if wire else ()),
        )
        await self.until_up()

    async def set_mode(self, shape: TreeShape, budget: int) -> None:
        """Sets the draft's tree shape, and for how many verdicts it prepares."""
        config = draft_service_pb2.DraftConfig(
            shape=shape_message(shape), pinned=True, outcome_budget=budget
        )
        request = draft_service_pb2.UpdateDraftConfigRequest(config=config)
        # A channel of its own: the draft may be another process than last time.
        async with open_channel(f"127.0.0.1:{self._ports.draft}") as channel:
            stub = draft_service_pb2_grpc.DraftServiceStub(channel)
            await stub.UpdateDraftConfig(request, timeout=_CONFIG_TIMEOUT_S)

    async def answer(
        self,
        prompt: Sequence[int],
        *,
        num_tokens: int,
        temperature: float,
        seed: int,
        is_plain: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        """Generates exactly `num_tokens` tokens; `on_tokens` hears how many come each time.

        Raises:
            RequestFailed: the target refused, or is gone.
        """
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=seed),
            stop_params=sampling_pb2.StopParams(max_output_token_count=num_tokens, ignore_eos=True),
            speculation_params=pb.SpeculationParams(disabled=is_plain),
        )
        if self._session is None:
            channel = open_channel(f"127.0.0.1:{self._ports.target}")
            self._session = Session(channel)
            self._stack.push_async_callback(channel.close)
            self._stack.push_async_callback(self._session.close)
        return await self._session.answer(request, on_tokens)

    async def counters(self) -> dict[str, float]:
        """Returns the counters of both, by name with and without their labels; the one without is
        the sum over them. Those of a draft that does not answer are left out."""
        totals: dict[str, float] = {}
        async with httpx.AsyncClient(timeout=2.0) as http:
            for port in (self._ports.target_metrics, self._ports.draft_metrics):
                try:
                    text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
                except httpx.HTTPError:
                    continue
                add_counters(totals, text)
        return totals

    async def round_trip_s(self, num_calls: int = 50) -> float:
        """Returns the median time of an empty call to the target."""
        request, times = admin_service_pb2.ListAttachmentsRequest(), []
        async with open_channel(f"127.0.0.1:{self._ports.target_admin}") as channel:
            admin = admin_service_pb2_grpc.AdminServiceStub(channel)
            for _ in range(num_calls):
                start_s = time.perf_counter()
                await admin.ListAttachments(request)
                times.append(time.perf_counter() - start_s)
        return sorted(times)[num_calls // 2]

    async def log_rounds(self, *, is_on: bool) -> None:
        """Switches the round logs of both."""
        for child in (self._target, self.draft):
            assert child is not None
            await child.tell(f"log {'on' if is_on else 'off'}")

    async def stop(self) -> None:
        """Stops both."""
        for child in (self.draft, self._target):
            if child is not None:
                await child.stop()

    async def _start(self, name: str, *arguments: str) -> Child:
        settings = self._settings
        logs = ["--round-log", str(settings.round_log(name))] if settings.logs_rounds else []
        log = settings.folder / f"{name}.log"
        return await Child.start("tests.bench.service", [name, *arguments, *logs], log)

    async def until_up(self) -> None:
        """Waits until the draft is attached and warm.

        Raises:
            PairFailed: see there.
        """
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s:
            if any(child is None or child.has_ended for child in (self._target, self.draft)):
                break
            if await self._is_attached():
                return
            await asyncio.sleep(_POLL_S)
        folder = self._settings.folder
        raise PairFailed(f"target and draft did not come up; see the logs in {folder}")

    async def _is_attached(self) -> bool:
        """Whether the draft that runs now is attached and warm, and no other is any more."""
        request = admin_service_pb2.ListAttachmentsRequest()
        try:
            # One channel would wait ever longer before it tries again.
            async with open_channel(f"127.0.0.1:{self._ports.target_admin}") as channel:
                admin = admin_service_pb2_grpc.AdminServiceStub(channel)
                found = await admin.ListAttachments(request, timeout=5.0)
        except aio.AioRpcError:
            return False
        is_alone = [each.worker_id for each in found.attachments] == [self._worker_id]
        return is_alone and not found.attachments[0].warming


@asynccontextmanager
async def running_pair(settings: PairSettings) -> AsyncIterator[Pair]:
    """Starts both, waits until the draft is attached, and stops them.

    Raises:
        PairFailed: see there.
    """
    async with AsyncExitStack() as stack:
        first = next(free_ports(6))
        pair = Pair(settings, Ports(*range(first, first + 6)), stack)
        stack.push_async_callback(pair.stop)
        await pair.start_target()
        await pair.start_draft()
        yield pair
