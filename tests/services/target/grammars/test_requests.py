"""Requests with grammars on a session: one that compiles holds up nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import aio

from services.target.engine_factory import build_engine
from services.target.grammars.matcher import CompiledGrammar
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.grammar import Grammar
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import grammar_pb2, sampling_pb2
from shared.rpc.channel import open_channel
from tests.helpers.checkpoints import TinyShape, write_checkpoint

Call = aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=24), seed=3)
    return folder


@asynccontextmanager
async def _session(folder: Path) -> AsyncIterator[tuple[TargetProcess, Call]]:
    settings = TargetSettings(
        model_path=folder, port=0, max_total_tokens=256, context_length=64, device="cpu"
    )
    process = TargetProcess(build_engine(settings, lambda report: None), settings, "ab" * 32)
    await process.start()
    async with open_channel(f"127.0.0.1:{process.port}") as channel:
        call = pb_grpc.TargetServiceStub(channel).Session()
        try:
            yield process, call
        finally:
            call.cancel()
            await process.stop(grace_s=0.0)


def _submit(
    request_id: int, *, constrained: bool, timeout_s: float | None = None
) -> pb.SessionRequest:
    request = pb.GenerateRequest(
        prompt_token_ids=[1, 2],
        stop_params=sampling_pb2.StopParams(max_output_token_count=2, ignore_eos=True),
        grammar=grammar_pb2.Grammar(regex="a+") if constrained else None,
    )
    submit = pb.Submit(request_id=request_id, request=request)
    if timeout_s is not None:
        submit.timeout_duration.FromNanoseconds(round(timeout_s * 1e9))
    return pb.SessionRequest(submit=submit)


async def _until_over(call: Call, request_id: int) -> pb.SessionEvent:
    """Reads until a request ends; nothing else may be told."""
    while True:
        for event in (await call.read()).events:  # type: ignore[union-attr]
            assert event.request_id == request_id
            if event.HasField("failure") or event.response.HasField("finished"):
                return event


def _never_compiles(process: TargetProcess, monkeypatch: pytest.MonkeyPatch) -> list[Grammar]:
    asked: list[Grammar] = []

    async def compile_for_ever(grammar: Grammar) -> CompiledGrammar:
        asked.append(grammar)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(process._grammars, "compile", compile_for_ever)
    return asked


async def test_others_do_not_wait_for_a_grammar_and_cancelling_it_ends_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _session(folder) as (process, call):
        asked = _never_compiles(process, monkeypatch)
        await call.write(_submit(1, constrained=True))
        await call.write(_submit(2, constrained=False))
        assert (await _until_over(call, 2)).response.HasField("finished")
        assert len(asked) == 1
        await call.write(pb.SessionRequest(cancel=pb.Cancel(request_id=1)))
        await call.write(_submit(3, constrained=False))
        await _until_over(call, 3)
        # Its id is free again, and nothing of it is left to wait for.
        await call.write(_submit(1, constrained=False))
        assert (await _until_over(call, 1)).response.HasField("finished")
        await call.done_writing()
        assert await call.read() is aio.EOF


async def test_deadline_holds_while_a_grammar_compiles(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _session(folder) as (process, call):
        _never_compiles(process, monkeypatch)
        await call.write(_submit(1, constrained=True, timeout_s=0.02))
        assert (await _until_over(call, 1)).failure.reason == "DEADLINE_EXCEEDED"


async def test_target_without_a_tokenizer_says_so(folder: Path) -> None:
    async with _session(folder) as (_, call):
        await call.write(_submit(1, constrained=True))
        failure = (await _until_over(call, 1)).failure
        assert failure.reason == "GRAMMAR_UNAVAILABLE"
        assert "tokenizer.json" in failure.message


async def test_message_without_a_kind_is_refused(folder: Path) -> None:
    async with _session(folder) as (_, call):
        message = _submit(1, constrained=True)
        message.submit.request.grammar.ClearField("regex")
        await call.write(message)
        assert (await _until_over(call, 1)).failure.reason == "GRAMMAR_INVALID"
