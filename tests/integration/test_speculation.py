"""Target and draft as real processes' worth of servers: any draft, any fate, the same output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from services.draft.drafter_factory import build_drafter
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings
from services.draft.worker import WorkerIdentity
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.settings import load_settings
from shared.tokenizer_files import tokenizer_sha256
from tests.helpers.checkpoints import TinyShape, write_checkpoint

ROOT = Path(__file__).parents[2]
PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [30, 31])
MAX_TOKENS = 100


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is the same model but for one weight more or less."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    shape = TinyShape(vocab_size=300)
    write_checkpoint(target, "llama", shape, seed=3, with_tokenizer=True)
    write_checkpoint(draft, "llama", shape, seed=3, with_tokenizer=True)
    return target, draft


class Target:
    """A running target with its clients."""

    def __init__(self, process: TargetProcess, channel: aio.Channel, admin: aio.Channel) -> None:
        self.address = f"127.0.0.1:{process.port}"
        self.stub = pb_grpc.TargetServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(admin)

    async def generate(
        self, prompt: list[int], temperature: float
    ) -> tuple[list[int], pb.SpeculationStats]:
        """Returns the output and how it was speculated."""
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=11),
            stop_params=sampling_pb2.StopParams(max_output_token_count=MAX_TOKENS, ignore_eos=True),
        )
        responses = [response async for response in self.stub.Generate(request)]
        tokens = [token for each in responses for token in each.delta.token_ids]
        return tokens, responses[-1].finished.speculation

    async def outputs(self, temperature: float) -> list[list[int]]:
        """Generates for all prompts side by side."""
        responses = await asyncio.gather(
            *(self.generate(prompt, temperature) for prompt in PROMPTS)
        )
        return [tokens for tokens, _ in responses]

    async def until_attached(self, count: int) -> None:
        """Waits until that many drafts are attached."""
        async with asyncio.timeout(30):
            while await self.num_attached() != count:
                await asyncio.sleep(0)

    async def num_attached(self) -> int:
        request = admin_service_pb2.ListAttachmentsRequest()
        return len((await self.admin.ListAttachments(request)).attachments)


@asynccontextmanager
async def _target(folder: Path, **settings: object) -> AsyncIterator[Target]:
    defaults: dict[str, object] = {
        "model_path": folder,
        "port": 0,
        "device": "cpu",
        "max_total_tokens": 2048,
        "context_length": 256,
        "candidate_wait_ms": 2000.0,
    }
    chosen = TargetSettings(**(defaults | settings))  # type: ignore[arg-type]
    engine = build_engine(chosen, lambda report: None)
    process = TargetProcess(engine, chosen, tokenizer_sha256(folder))
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        try:
            yield Target(process, channel, admin)
        finally:
            await process.stop(grace_s=0.0)


@asynccontextmanager
async def _draft(target: Target, folder: Path, *arguments: str) -> AsyncIterator[DraftProcess]:
    settings = load_settings(
        DraftSettings,
        service="draft",
        arguments=[
            *("--port", "0", "--target", target.address, "--device", "cpu"),
            *("--speculative-draft-model-path", str(folder), "--max-total-tokens", "2048"),
            *arguments,
        ],
        env={},
    )
    process = DraftProcess(settings)
    await process.listen()
    try:
        drafter = await asyncio.to_thread(build_drafter, settings)
        identity = WorkerIdentity(
            "worker", "draft", "STANDALONE", tokenizer_sha256(folder), 8, None
        )
        await process.serve(drafter, identity)
        yield process
    finally:
        await process.stop()


@asynccontextmanager
async def _ngram_process(target: Target) -> AsyncIterator[asyncio.subprocess.Process]:
    """A draft in a process of its own, to be killed and frozen."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.draft", "--port", "0", "--target", target.address),
        *("--speculative-algorithm", "NGRAM"),
        cwd=ROOT,
        env={**os.environ, "OUTRIDER_LOG_LEVEL": "error"},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        await process.wait()


CHAIN = ("4", "1", "5")
TREE = ("4", "4", "16")


def _shape(steps: str, topk: str, tokens: str) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", steps, "--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", tokens),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", [CHAIN, TREE])
async def test_standalone_draft_speeds_up_and_changes_nothing(
    folders: tuple[Path, Path], temperature: float, shape: tuple[str, str, str]
) -> None:
    async with _target(folders[0]) as target:
        expected = await target.outputs(temperature)
        async with _draft(target, folders[1], *_shape(*shape)):
            await target.until_attached(1)
            assert await target.outputs(temperature) == expected
            tokens, stats = await target.generate(PROMPTS[0], temperature)
        assert tokens == expected[0]
        # The draft is the target: what it proposes is what the target draws.
        assert stats.accepted_token_count > MAX_TOKENS // 2
        await target.until_attached(0)
        assert await target.outputs(temperature) == expected


async def test_draft_stopped_and_started_mid_stream_changes_nothing(
    folders: tuple[Path, Path],
) -> None:
    async with _target(folders[0]) as target:
        expected = await target.outputs(1.0)
        async with _draft(target, folders[1]):
            await target.until_attached(1)
            running = asyncio.create_task(target.outputs(1.0))
        async with _draft(target, folders[1]):
            assert await running == expected
            assert await target.outputs(1.0) == expected


async def test_preempted_sequences_with_a_draft_change_nothing(
    folders: tuple[Path, Path],
) -> None:
    async with _target(folders[0]) as roomy:
        expected = await roomy.outputs(1.0)
    async with (
        _target(folders[0], max_total_tokens=128, disable_radix_cache=True) as target,
        _draft(target, folders[1]),
    ):
        await target.until_attached(1)
        assert await target.outputs(1.0) == expected


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_ngram_process_killed_or_frozen_mid_stream_changes_nothing(
    folders: tuple[Path, Path], fate: signal.Signals
) -> None:
    async with _target(folders[0], candidate_wait_ms=50.0) as target:
        expected = await target.outputs(0.0)
        async with _ngram_process(target) as process:
            await target.until_attached(1)
            assert await target.outputs(0.0) == expected
            running = asyncio.create_task(target.outputs(0.0))
            process.send_signal(fate)
            assert await running == expected
