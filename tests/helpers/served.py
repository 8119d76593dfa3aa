"""A target and its drafts as servers on real sockets."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

from grpc import aio

from services.draft.drafter_factory import build_drafter, worker_identity
from services.draft.events import WorkerIdentity
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings
from services.draft.settings_problems import DEMO_HEADS
from services.embedded import build_embedded_draft
from services.embedded_settings import draft_needs
from services.target.__main__ import read_settings
from services.target.drafts.draft_policy import ALWAYS
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from services.target.tensor_parallel import start_followers
from shared.model_files import tokenizer_sha256
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.settings import load_settings

ROOT = Path(__file__).parents[2]
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [30, 31])
MAX_TOKENS = 24


class Target:
    """A running target with its clients."""

    def __init__(self, process: TargetProcess, channel: aio.Channel, admin: aio.Channel) -> None:
        self.process = process
        self.address = f"127.0.0.1:{process.port}"
        self.stub = pb_grpc.TargetServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(admin)

    async def generate(
        self,
        prompt: list[int],
        temperature: float,
        speculation: pb.SpeculationParams | None = None,
        num_tokens: int = MAX_TOKENS,
    ) -> tuple[list[int], pb.SpeculationStats]:
        """Returns the output tokens and the speculation counters."""
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=11),
            stop_params=sampling_pb2.StopParams(max_output_token_count=num_tokens, ignore_eos=True),
            speculation_params=speculation,
        )
        responses = [response async for response in self.stub.Generate(request)]
        tokens = [token for response in responses for token in response.delta.token_ids]
        return tokens, responses[-1].finished.speculation

    async def outputs(self, temperature: float) -> list[list[int]]:
        """Generates for all prompts concurrently."""
        responses = await asyncio.gather(
            *(self.generate(prompt, temperature) for prompt in PROMPTS)
        )
        return [tokens for tokens, _ in responses]

    async def until_attached(self, count: int) -> None:
        """Waits until `count` drafts are attached."""
        async with asyncio.timeout(100):
            while await self.num_attached() != count:
                await asyncio.sleep(0.02)  # leaves the CPU cores to a starting process

    async def num_attached(self) -> int:
        request = admin_service_pb2.ListAttachmentsRequest()
        return len((await self.admin.ListAttachments(request)).attachments)


@asynccontextmanager
async def serving_target(
    folder: Path,
    on_step: Callable[[StepReport], None] = lambda report: None,
    **settings: object,
) -> AsyncIterator[Target]:
    defaults: dict[str, object] = {
        "model_path": folder,
        "port": 0,
        "device": "cpu",
        "max_total_tokens": 2048,
        "context_length": 256,
        "candidate_wait_ms": 10_000.0,
        # Always wants trees: for a tiny model the load of the machine decides what pays.
        "candidate_wait_sequences": ALWAYS,
        "speculative_adaptive": False,
    }
    chosen = TargetSettings(**(defaults | settings))  # type: ignore[arg-type]
    with ExitStack() as opened:
        followers = None
        if chosen.ranks.size > 1:
            followers = start_followers(chosen)
            opened.callback(followers.stop)
        engine = build_engine(chosen, on_step, followers)
        async with _running(TargetProcess(engine, chosen, tokenizer_sha256(folder))) as target:
            yield target


def target_process(
    arguments: Sequence[str], opened: ExitStack | AsyncExitStack | None = None
) -> TargetProcess:
    """Returns a target with the settings of its flags and its embedded draft; does not start it.

    Args:
        opened: stops the other processes of the model; not needed for a model in one process.
    """
    settings, chosen = read_settings(arguments, {})
    needs = draft_needs(settings, chosen)
    followers = None
    if settings.ranks.size > 1:
        assert opened is not None, "the followers must be stopped"
        followers = start_followers(settings, needs)
        opened.callback(followers.stop)
    engine = build_engine(settings, lambda report: None, followers, needs)
    process = TargetProcess(engine, settings, tokenizer_sha256(settings.model_path))
    if chosen is not None:
        built = build_embedded_draft(engine, settings, chosen)
        process.embed(built.port, built.settings)
    return process


@asynccontextmanager
async def running_target(arguments: Sequence[str]) -> AsyncIterator[Target]:
    """Runs a target with the settings of its flags."""
    with ExitStack() as opened:
        async with _running(target_process(arguments, opened)) as target:
            yield target


@asynccontextmanager
async def _running(process: TargetProcess) -> AsyncIterator[Target]:
    await process.start()
    try:
        async with (
            open_channel(f"127.0.0.1:{process.port}") as channel,
            open_channel(f"127.0.0.1:{process.admin_port}") as admin,
        ):
            yield Target(process, channel, admin)
    finally:
        await process.stop(grace_s=0.0)


def draft_settings(algorithm: str, folder: Path, *flags: str) -> DraftSettings:
    """Returns the settings of a small draft on the CPU."""
    arguments = [
        *("--port", "0", "--device", "cpu", "--max-total-tokens", "2048"),
        *("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)),
        *flags,
    ]
    return load_settings(DraftSettings, service="draft", arguments=arguments, env={})


@asynccontextmanager
async def draft_process(target: Target, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Starts a draft in its own process, so that tests can kill or freeze it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.draft", "--port", "0", "--target", target.address, *flags),
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_LOG_LEVEL": "error"},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


@asynccontextmanager
async def demo_head(target: Target, algorithm: str, *flags: str) -> AsyncIterator[None]:
    """Attaches a head of the demo, in this process: its own process would have to load torch, which
    only tests that kill a draft need."""
    folder = DEMO_HEADS / algorithm.lower()
    settings = draft_settings(algorithm, folder, "--target", target.address, *flags)
    async with running_draft(settings):
        await target.until_attached(1)
        yield


@asynccontextmanager
async def serving_draft(
    addresses: Sequence[str], folder: Path, *arguments: str, algorithm: str = "STANDALONE"
) -> AsyncIterator[DraftProcess]:
    """Runs a draft.

    Args:
        algorithm: name of the algorithm in its handshake, however it drafts.
    """
    settings = load_settings(
        DraftSettings,
        service="draft",
        arguments=[
            *(flag for address in addresses for flag in ("--target", address)),
            *("--port", "0", "--device", "cpu"),
            *("--speculative-draft-model-path", str(folder), "--max-total-tokens", "2048"),
            *arguments,
        ],
        env={},
    )
    identity = WorkerIdentity("worker", "draft", algorithm, tokenizer_sha256(folder), 8, None)
    async with running_draft(settings, identity) as process:
        yield process


@asynccontextmanager
async def running_draft(
    settings: DraftSettings, identity: WorkerIdentity | None = None
) -> AsyncIterator[DraftProcess]:
    """Runs a draft.

    Args:
        identity: its identity in the handshake; None derives it from settings and drafter.
    """
    process = DraftProcess(settings)
    await process.listen()
    try:
        drafter = await asyncio.to_thread(build_drafter, settings)
        if identity is None:
            identity = worker_identity(settings, drafter.limits, worker_id="worker")
        await process.serve(drafter, identity)
        yield process
    finally:
        await process.stop()
