"""The whole draft process, in this one: health, links, drain and stop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.draft.__main__ import main
from services.draft.drafter_factory import build_drafter, model_id, tokenizer_identity
from services.draft.events import WorkerIdentity
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings
from shared.errors import MISFIT_EXIT_CODE, CheckpointError, EngineFailed, FailedPrecondition
from shared.model_files import tokenizer_sha256
from shared.pb.outrider.admin.v1 import admin_service_pb2, admin_service_pb2_grpc
from shared.pb.outrider.draft.v1 import draft_service_pb2, draft_service_pb2_grpc
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.channel import open_channel
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.services.draft.scripted_drafter import ScriptedDrafter
from tests.services.draft.scripted_target import WAIT_S, ScriptedTarget

IDENTITY = WorkerIdentity("worker", "scripted", "STANDALONE", None, 4, None)
ATTACHED = pb.Attached(
    attachment_id="attachment-1",
    max_node_count=8,
    max_sequence_count=5,
    verification_mode=pb.VERIFICATION_MODE_COUPLED,
    vocab_size=1_000,
)


def _settings(*arguments: str) -> DraftSettings:
    arguments = ("--port", "0", *arguments)
    return load_settings(DraftSettings, service="draft", arguments=arguments, env={})


@pytest.fixture
async def target() -> AsyncIterator[ScriptedTarget]:
    target = ScriptedTarget(ATTACHED)
    await target.start()
    yield target
    await target.stop()


async def _health(port: int) -> int:
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(
            health_pb2.HealthCheckRequest(service="outrider.draft.v1.DraftService")
        )
        return int(response.status)


async def test_health_follows_the_process_from_loading_to_drain(target: ScriptedTarget) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    assert await _health(process.port) != serving
    drafter = ScriptedDrafter()
    await process.serve(drafter, IDENTITY)
    assert await _health(process.port) == serving
    assert drafter.batches == [[0], [0]], "a greedy and a drawn tree came first"
    conversation = await target.conversation()
    async with asyncio.timeout(WAIT_S):
        while not process.num_attached:  # the target's answer is on its way
            await asyncio.sleep(0)
    async with open_channel(f"127.0.0.1:{process.admin_port}") as channel:
        admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        info = await admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
        assert info.service == "draft"
        assert info.settings["target"] == target.address
        assert info.gauges["attached_target_count"] == 1.0
        flushed = await admin.FlushPrefixCache(admin_service_pb2.FlushPrefixCacheRequest())
        assert flushed.freed_page_count == 7
        await admin.DrainServer(admin_service_pb2.DrainServerRequest())
    assert await conversation.hear() is None, "draining detaches"
    assert await _health(process.port) != serving
    await process.stop()


async def test_the_log_says_the_shape_of_the_trees(
    target: ScriptedTarget, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    await process.serve(ScriptedDrafter(), IDENTITY)
    await process.stop()
    assert f"serving on port {process.port}, trees of 3,1,4 (steps,topk,rows)" in caplog.text


async def test_stopping_detaches_before_the_servers_go(target: ScriptedTarget) -> None:
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    await process.serve(ScriptedDrafter(), IDENTITY)
    conversation = await target.conversation()
    stop = asyncio.Event()
    running = asyncio.create_task(process.run_until(stop))
    stop.set()
    await asyncio.wait_for(running, WAIT_S)
    assert await process.stop()
    assert await conversation.hear() is None
    with pytest.raises(aio.AioRpcError):
        await _health(process.port)


async def test_stopping_waits_for_an_engine_that_is_busy_no_longer_than_the_grace(
    target: ScriptedTarget,
) -> None:
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    await process.serve(ScriptedDrafter(), IDENTITY)
    is_busy, ends = threading.Event(), threading.Event()

    def capture_graphs() -> None:
        is_busy.set()
        ends.wait(WAIT_S)

    assert process._engine is not None
    process._engine.between_rounds(capture_graphs)
    assert await asyncio.to_thread(is_busy.wait, WAIT_S)
    assert not await process.stop(grace_s=0.0)
    with pytest.raises(aio.AioRpcError):
        await _health(process.port)
    ends.set()
    assert await process.stop()


async def test_a_message_beyond_the_features_of_a_prompt_is_not_read(
    target: ScriptedTarget,
) -> None:
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    async with open_channel(f"127.0.0.1:{process.port}") as channel:
        propose = channel.unary_unary("/outrider.draft.v1.DraftService/ProposeTree")
        with pytest.raises(aio.AioRpcError, match="larger than max") as failure:
            await propose(bytes(65 * 2**20))
    assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await process.stop()


async def test_a_dead_engine_ends_the_process(target: ScriptedTarget) -> None:
    process = DraftProcess(_settings("--target", target.address))
    await process.listen()
    drafter = ScriptedDrafter()
    await process.serve(drafter, IDENTITY)
    drafter.fails = True
    async with open_channel(f"127.0.0.1:{process.port}") as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        with pytest.raises(aio.AioRpcError, match="INTERNAL"):
            await stub.ProposeTree(draft_service_pb2.ProposeTreeRequest(token_ids=[1]))
    with pytest.raises(EngineFailed):
        await asyncio.wait_for(process.run_until(asyncio.Event()), WAIT_S)
    await process.stop()


async def test_a_draft_that_every_target_refused_may_end() -> None:
    refusal = FailedPrecondition.tokenizer_mismatch("abab", "cdcd")
    target = ScriptedTarget(ATTACHED, refusal)
    await target.start()
    process = DraftProcess(_settings("--target", target.address, "--exit-when-refused"))
    await process.listen()
    await process.serve(ScriptedDrafter(), IDENTITY)
    with pytest.raises(FailedPrecondition, match=f"{target.address}: TOKENIZER_MISMATCH"):
        await asyncio.wait_for(process.run_until(asyncio.Event()), WAIT_S)
    await process.stop()
    await target.stop()


async def test_a_real_draft_model_is_loaded_and_served(tmp_path: Path) -> None:
    shape = TinyShape(max_position_embeddings=128)
    folder = write_checkpoint(tmp_path / "tiny", shape=shape, with_tokenizer=True)
    settings = _settings(
        *("--speculative-draft-model-path", str(folder)),
        *("--max-total-tokens", "512", "--target", "127.0.0.1:1"),
    )
    assert model_id(settings) == "tiny"
    assert tokenizer_identity(settings) == tokenizer_sha256(folder)
    drafter = build_drafter(settings)
    assert drafter.limits.max_context_tokens == 128
    process = DraftProcess(settings)
    await process.listen()
    await process.serve(drafter, IDENTITY)
    async with open_channel(f"127.0.0.1:{process.port}") as channel:
        stub = draft_service_pb2_grpc.DraftServiceStub(channel)
        request = draft_service_pb2.ProposeTreeRequest(token_ids=range(20))
        response = await stub.ProposeTree(request)
        assert len(response.tree.token_ids) == 3, "the automatic chain"
    await process.stop()


def test_a_context_too_short_for_trees_is_refused_at_start(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, shape=TinyShape(max_position_embeddings=65))
    with pytest.raises(CheckpointError, match="65 tokens"):
        build_drafter(_settings("--speculative-draft-model-path", str(folder)))


def test_ngram_learns_its_corpus_and_fits_any_tokenizer(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("[1, 2, 3, 4]\n")
    settings = _settings(
        *("--speculative-algorithm", "NGRAM", "--speculative-ngram-corpus-path", str(corpus))
    )
    assert tokenizer_identity(settings) is None
    assert model_id(settings) == "ngram"
    assert build_drafter(settings).gauges()["held_token_count"] == 64, "a page"


def test_a_bad_flag_ends_the_program_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["outrider-draft", "--device", "tpu"])
    with pytest.raises(SystemExit, match="--device"):
        main()


def test_a_model_that_cannot_be_read_has_its_own_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--speculative-draft-model-path", str(tmp_path), "--port=0", "--maintenance-port=0"]
    monkeypatch.setattr(sys, "argv", ["outrider-draft", *flags])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == MISFIT_EXIT_CODE
    assert f"outrider-draft: {tmp_path}" in capsys.readouterr().err
