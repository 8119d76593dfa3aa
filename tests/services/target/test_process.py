"""The target as its clients meet it: real servers on free ports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.target_link import events_from_response
from services.target.drafts import feature_store
from services.target.drafts.attachment import Attachment
from services.target.drafts.speculation_service import Context, SpeculationServicer
from services.target.engine import Engine
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess, attachment_terms
from services.target.requests.generate_service import ServedModel
from services.target.settings import TargetSettings
from shared.errors import EngineFailed, OutriderError, SettingsError
from shared.generation import Delta
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as speculation_pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as speculation_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2, tensor_pb2
from shared.rpc.channel import open_channel
from shared.rpc.server import Lifecycle
from shared.rpc.status import error_from_rpc
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.step_hold import hold_outputs

HASH = "ab" * 32
VOCAB = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=VOCAB), seed=3)
    return folder


Served = tuple[TargetProcess, aio.Channel, aio.Channel]
Serve = Callable[..., "asynccontextmanager[Served]"]


@asynccontextmanager
async def _serve(folder: Path, **changes: object) -> AsyncIterator[Served]:
    settings = replace(
        TargetSettings(
            model_path=folder, port=0, max_total_tokens=256, context_length=64, device="cpu"
        ),
        **changes,  # type: ignore[arg-type]
    )
    process = TargetProcess(build_engine(settings, lambda report: None), settings, HASH)
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        try:
            yield process, channel, admin
        finally:
            await process.stop(grace_s=0.0)


def _generate(prompt: list[int], max_tokens: int = 8, **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=prompt,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(max_output_token_count=max_tokens, ignore_eos=True),
        **fields,  # type: ignore[arg-type]
    )


async def _tokens(channel: aio.Channel, request: pb.GenerateRequest) -> list[int]:
    stub = pb_grpc.TargetServiceStub(channel)
    return [
        token async for response in stub.Generate(request) for token in response.delta.token_ids
    ]


async def _gauges(admin: aio.Channel) -> dict[str, float]:
    stub = admin_grpc.AdminServiceStub(admin)
    return dict((await stub.GetServerInfo(admin_pb.GetServerInfoRequest())).gauges)


async def _until(condition: Callable[[], object], deadline_s: float = 60.0) -> None:
    """Waits for what another thread is about to do, yielding to the loop."""
    async with asyncio.timeout(deadline_s):
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0)


async def test_generate_starts_streams_and_finishes(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        stub = pb_grpc.TargetServiceStub(channel)
        events = [response async for response in stub.Generate(_generate([1, 2, 3]))]
    assert events[0].WhichOneof("event") == "started"
    assert {each.WhichOneof("event") for each in events[1:-1]} == {"delta"}
    finished = events[-1].finished
    assert finished.finish_reason == pb.FINISH_REASON_LENGTH
    assert (finished.prompt_token_count, finished.output_token_count) == (3, 8)


async def test_health_is_serving_until_drained(folder: Path) -> None:
    async with _serve(folder) as (_, channel, admin):
        health = health_pb2_grpc.HealthStub(channel)
        name = "outrider.target.v1.TargetService"
        request = health_pb2.HealthCheckRequest(service=name)
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        drain = admin_grpc.AdminServiceStub(admin).DrainServer(admin_pb.DrainServerRequest())
        assert (await drain).running_request_count == 0
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(aio.AioRpcError) as failure:
            await _tokens(channel, _generate([1]))
        assert error_from_rpc(failure.value).reason == "SERVER_DRAINING"
        assert error_from_rpc(failure.value).retry_after_s == 1.0


@pytest.mark.parametrize(
    ("request_", "reason", "text"),
    [
        (_generate([]), "PROMPT_EMPTY", "at least 1"),
        (_generate([1] * 64), "PROMPT_TOO_LONG", "64 tokens; it may have 63"),
        (_generate([VOCAB]), "TOKEN_OUT_OF_RANGE", f"token {VOCAB}"),
        (
            pb.GenerateRequest(
                prompt_token_ids=[1],
                sampling_params=sampling_pb2.SamplingParams(temperature=-1.0),
            ),
            "SAMPLING_PARAM_OUT_OF_RANGE",
            "temperature is -1.0",
        ),
        (
            pb.GenerateRequest(
                prompt_token_ids=[1],
                sampling_params=sampling_pb2.SamplingParams(temperature=float("nan")),
            ),
            "SAMPLING_PARAM_OUT_OF_RANGE",
            "temperature is nan",
        ),
        (_generate([1], max_tokens=0), "SAMPLING_PARAM_OUT_OF_RANGE", "max_tokens is 0"),
        (_generate([1], top_logprob_count=21), "SAMPLING_PARAM_OUT_OF_RANGE", "21"),
    ],
)
async def test_bad_request_gets_its_named_error(
    folder: Path, request_: pb.GenerateRequest, reason: str, text: str
) -> None:
    async with _serve(folder) as (_, channel, _admin):
        with pytest.raises(aio.AioRpcError) as failure:
            await _tokens(channel, request_)
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = error_from_rpc(failure.value)
    assert error.reason == reason
    assert text in error.message


async def test_session_carries_many_requests_and_fails_one_alone(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        call = pb_grpc.TargetServiceStub(channel).Session()
        for key, prompt in ((1, [1, 2, 3]), (2, []), (3, [4])):
            submit = pb.Submit(request_id=key, request=_generate(prompt))
            await call.write(pb.SessionRequest(submit=submit))
        await call.done_writing()
        messages = [message async for message in call]
        expected = await _tokens(channel, _generate([1, 2, 3]))
    events = [event for message in messages for event in message.events]
    tokens = [
        token
        for message in messages
        for request_id, event in events_from_response(message)
        if request_id == 1 and isinstance(event, Delta)
        for token in event.token_ids
    ]
    assert tokens == expected
    [failed] = [event for event in events if event.request_id == 2]
    assert failed.failure.reason == "PROMPT_EMPTY"
    assert failed.failure.field == "prompt"
    assert [e for e in events if e.request_id == 3][-1].response.HasField("finished")


@pytest.mark.parametrize("timeout_ns", [0, -5_000_000_000])
async def test_request_without_time_is_refused_alone(folder: Path, timeout_ns: int) -> None:
    async with _serve(folder) as (_, channel, _admin):
        call = pb_grpc.TargetServiceStub(channel).Session()
        for key in (1, 2):
            submit = pb.Submit(request_id=key, request=_generate([1]))
            if key == 1:
                submit.timeout_duration.FromNanoseconds(timeout_ns)
            await call.write(pb.SessionRequest(submit=submit))
        await call.done_writing()
        events = [event async for message in call for event in message.events]
    [refused] = [event.failure for event in events if event.request_id == 1]
    assert refused.reason == "TIMEOUT_OUT_OF_RANGE"
    assert f"is {timeout_ns / 1e9:g} s; it must be above 0" in refused.message
    assert events[-1].response.HasField("finished")


async def test_duplicate_request_id_ends_the_session(folder: Path) -> None:
    async with _serve(folder) as (process, channel, _admin):
        hold_outputs(process)
        call = pb_grpc.TargetServiceStub(channel).Session()
        submit = pb.SessionRequest(submit=pb.Submit(request_id=1, request=_generate([1], 50)))
        await call.write(submit)
        await call.write(submit)
        with pytest.raises(aio.AioRpcError) as failure:
            async for _ in call:
                pass
    assert error_from_rpc(failure.value).reason == "REQUEST_ID_DUPLICATE"


async def test_session_cancel_and_hang_up_free_pages(folder: Path) -> None:
    async with _serve(folder, disable_radix_cache=True) as (process, channel, admin):
        hold_outputs(process, times=2)

        async def is_idle() -> bool:
            return (await _gauges(admin))["held_page_count"] == 0

        for end in ("cancel", "hang up"):
            call = pb_grpc.TargetServiceStub(channel).Session()
            submit = pb.Submit(request_id=1, request=_generate([1], 60))
            await call.write(pb.SessionRequest(submit=submit))
            await call.read()
            if end == "cancel":
                await call.write(pb.SessionRequest(cancel=pb.Cancel(request_id=1)))
                await call.done_writing()
            else:
                call.cancel()
            await _until(is_idle)


async def test_rpc_cancel_frees_pages(folder: Path) -> None:
    async with _serve(folder, disable_radix_cache=True) as (process, channel, admin):
        hold_outputs(process)
        call = pb_grpc.TargetServiceStub(channel).Generate(_generate([1], 60))
        await call.read()
        call.cancel()

        async def is_idle() -> bool:
            return (await _gauges(admin))["held_page_count"] == 0

        await _until(is_idle)


class _Draft:
    """A draft that speaks the protocol by hand."""

    def __init__(self, channel: aio.Channel) -> None:
        self.call = speculation_grpc.SpeculationServiceStub(channel).Speculate()

    async def attach(self, **changes: object) -> speculation_pb.Attached:
        fields: dict[str, object] = {
            "worker_id": "w",
            "model_id": "m",
            "tokenizer_sha256": HASH,
            "max_sequence_count": 4,
            "max_node_count": 8,
            "algorithm": "TEST",
        }
        attach = speculation_pb.Attach(**(fields | changes))  # type: ignore[arg-type]
        await self.call.write(speculation_pb.SpeculateRequest(attach=attach))
        try:
            return (await self.call.read()).attached
        except aio.AioRpcError as failure:
            raise error_from_rpc(failure) from failure

    async def propose(
        self, sequence_id: int, round_: int, committed: int, tokens: list[int], parents: list[int]
    ) -> None:
        batch = speculation_pb.CandidateBatch(
            sequence_ids=[sequence_id],
            rounds=[round_],
            committed_token_counts=[committed],
            node_offsets=[0, len(tokens)],
            token_ids=tokens,
            parent_indices=parents,
        )
        await self.call.write(speculation_pb.SpeculateRequest(candidates=batch))

    async def serve(self, answer: list[int]) -> None:
        """Proposes chains of the known answer until the stream ends."""
        while (message := await self.call.read()) is not aio.EOF:
            verdicts = message.verdicts
            for sequence_id, round_, committed in zip(
                verdicts.sequence_ids,
                verdicts.rounds,
                verdicts.committed_token_counts,
                strict=True,
            ):
                chain = answer[committed : committed + 3]
                await self.propose(
                    sequence_id,
                    round_ + 1,
                    committed,
                    chain,
                    list(range(-1, len(chain) - 1)),
                )


async def _failure(call: aio.StreamStreamCall) -> aio.AioRpcError:  # type: ignore[type-arg]
    try:
        while await call.read() is not aio.EOF:
            pass
    except aio.AioRpcError as failure:
        return failure
    raise AssertionError("the stream ended without an error")


def _spec(layers: list[int]) -> speculation_pb.FeatureSpec:
    return speculation_pb.FeatureSpec(layer_indices=layers, data_type=tensor_pb2.DATA_TYPE_FLOAT32)


async def test_features_come_with_verdicts_and_prompt_rows_before(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        draft = _Draft(channel)
        attached = await draft.attach(feature_spec=_spec(layers=[1, 4]))
        assert attached.feature_width == 64
        generated = asyncio.create_task(_tokens(channel, _generate([1, 2, 3], 4)))
        messages = [await draft.call.read() for _ in range(4)]
        await generated
    opened, chunk, first, second = messages
    assert list(opened.opened.sequences[0].token_ids) == [1, 2, 3]
    assert (chunk.feature_chunk.position_offset, chunk.feature_chunk.last) == (0, True)
    assert list(chunk.feature_chunk.rows.shape) == [2, 64]
    for message in (first, second):
        assert list(message.verdicts.feature_row_counts) == [1]
        assert list(message.verdicts.features.shape) == [1, 64]
        assert len(message.verdicts.features.data) == 64 * 4


async def test_attached_draft_is_verified_and_listed(folder: Path) -> None:
    waits = {"candidate_wait_ms": 5000.0, "candidate_wait_sequences": 99}
    async with _serve(folder, speculative_adaptive=True, **waits) as (_, channel, admin):
        expected = await _tokens(channel, _generate([1, 2, 3], 40))
        draft = _Draft(channel)
        attached = await draft.attach()
        assert attached.verification_mode == speculation_pb.VERIFICATION_MODE_COUPLED
        assert [each.step_count for each in attached.candidate_shapes] == [1, 2, 5, 7]
        serving = asyncio.create_task(draft.serve([1, 2, 3, *expected]))
        stub = pb_grpc.TargetServiceStub(channel)
        events = [response async for response in stub.Generate(_generate([1, 2, 3], 40))]
        tokens = [token for event in events for token in event.delta.token_ids]
        assert tokens == expected
        stats = events[-1].finished.speculation
        assert stats.verified_round_count > 0
        assert stats.accepted_token_count > 0
        listed = await admin_grpc.AdminServiceStub(admin).ListAttachments(
            admin_pb.ListAttachmentsRequest()
        )
        assert [each.worker_id for each in listed.attachments] == ["w"]
        assert listed.attachments[0].accepted_token_count == stats.accepted_token_count
        # 0 when the answer came before the clock was read.
        assert listed.attachments[0].HasField("turnaround_duration")
        assert all(0 < rate <= 1 for rate in listed.attachments[0].level_acceptances)
        assert listed.attachments[0].level_acceptances
        gauges = await _gauges(admin)
        assert any(name.startswith("round_ms_of_") for name in gauges)
        assert gauges["wanted_step_count_of_attachment-1"] > 0
        draft.call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving


async def test_draft_that_dies_mid_stream_changes_nothing(folder: Path) -> None:
    async with _serve(folder, candidate_wait_ms=5.0) as (_, channel, _admin):
        request = _generate([1, 2, 3], 40)
        expected = await _tokens(channel, request)
        draft = _Draft(channel)
        await draft.attach()
        call = pb_grpc.TargetServiceStub(channel).Generate(request)
        found: list[int] = []
        async for response in call:
            found.extend(response.delta.token_ids)
            if len(found) == 5:
                draft.call.cancel()
            elif len(found) < 5 and response.HasField("delta"):
                await draft.propose(1, 10_000, 5, [1], [-1])
        assert found == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer_sha256": "cd" * 32}, "TOKENIZER_MISMATCH"),
        ({"max_sequence_count": 0}, "ATTACH_OUT_OF_RANGE"),
        ({"algorithm": "A" * 257}, "ATTACH_OUT_OF_RANGE"),
        ({"mapped_head": speculation_pb.MappedHeadOffer(vocab_size=9)}, "ATTACH_OUT_OF_RANGE"),
        (
            {
                "mapped_head": speculation_pb.MappedHeadOffer(
                    vocab_size=9, max_context_token_count=9, outcome_count=-1
                )
            },
            "ATTACH_OUT_OF_RANGE",
        ),
        ({"feature_spec": _spec(layers=[9])}, "FEATURE_SPEC_UNSUPPORTED"),
        ({"feature_spec": speculation_pb.FeatureSpec(layer_indices=[1])}, "TENSOR_MALFORMED"),
    ],
)
async def test_attach_that_cannot_work_is_refused(
    folder: Path, changes: dict[str, object], reason: str
) -> None:
    async with _serve(folder) as (_, channel, _admin):
        with pytest.raises(OutriderError) as failure:
            await _Draft(channel).attach(**changes)
    assert failure.value.reason == reason


async def test_draft_whose_features_do_not_fit_is_refused_and_the_target_serves_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 3.00 GiB. GPU 0 has")

    async with _serve(folder) as (_, channel, _admin):
        with monkeypatch.context() as patched:
            patched.setattr(feature_store, "FeatureStore", fail)
            draft = _Draft(channel)
            await draft.attach(feature_spec=_spec(layers=[1, 4]))
            error = error_from_rpc(await _failure(draft.call))
        assert error.reason == "FEATURE_MEMORY"
        assert "3.00 GiB more wanted" in error.message
        assert "--remote-draft-features" in error.message
        assert len(await _tokens(channel, _generate([1]))) == 8
        again = await _Draft(channel).attach(feature_spec=_spec(layers=[1, 4]))
        assert again.feature_width == 64


async def test_drafts_of_many_kinds_take_the_memory_of_a_few(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        drafts = [_Draft(channel) for _ in range(feature_store.MAX_STORES + 1)]
        for number, draft in enumerate(drafts):
            await draft.attach(feature_spec=_spec(layers=[number % 2] * (1 + number // 2)))
        error = error_from_rpc(await _failure(drafts[-1].call))
        assert error.reason == "FEATURE_MEMORY"
        assert "4 different features" in error.message
        assert len(await _tokens(channel, _generate([1]))) == 8


async def test_message_before_attach_ends_the_stream(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        draft = _Draft(channel)
        await draft.propose(1, 0, 1, [1], [-1])
        assert error_from_rpc(await _failure(draft.call)).reason == "ATTACH_REQUIRED"


@pytest.mark.parametrize(
    ("tokens", "parents", "text"),
    [
        ([1, 2], [-1, 1], "node 1 has parent 1"),
        ([1, 2], [1, 0], "node 0 has parent 1"),
        ([1], [-1, 0], "parent_indices has 2 entries"),
        ([VOCAB], [-1], f"token {VOCAB}"),
        ([1] * 9, [-1] * 9, "9 nodes; the target accepts 8"),
        ([1], [-2], "below -1"),
    ],
)
async def test_malformed_tree_ends_the_stream_and_not_the_target(
    folder: Path, tokens: list[int], parents: list[int], text: str
) -> None:
    async with _serve(folder, max_tree_nodes=8) as (_, channel, _admin):
        draft = _Draft(channel)
        await draft.attach()
        await draft.propose(1, 0, 1, tokens, parents)
        error = error_from_rpc(await _failure(draft.call))
        assert error.reason == "TREE_MALFORMED"
        assert text in error.message
        assert len(await _tokens(channel, _generate([1]))) == 8


async def test_tree_deeper_than_the_sliding_window_ends_the_stream(tmp_path: Path) -> None:
    shape = TinyShape(vocab_size=VOCAB, overrides={"sliding_window": 6})
    write_checkpoint(tmp_path, "mistral", shape, seed=3)
    async with _serve(tmp_path) as (_, channel, _admin):
        for num_nodes, is_refused in ((5, False), (6, True)):
            draft = _Draft(channel)
            await draft.attach()
            await draft.propose(1, 0, 1, [1] * num_nodes, [-1, *range(num_nodes - 1)])
            if is_refused:
                error = error_from_rpc(await _failure(draft.call))
                assert error.reason == "TREE_MALFORMED"
                assert "depth 6; the model's sliding window leaves room for 5" in error.message
            else:
                await draft.call.done_writing()
                assert await draft.call.read() is aio.EOF
        assert len(await _tokens(channel, _generate([1]))) == 8


@pytest.mark.parametrize(
    ("end", "cause"),
    [("half-close", "it ended its stream"), ("bad tree", "node 0 has parent 1")],
)
async def test_log_says_why_a_draft_detached(
    folder: Path, end: str, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.target.drafts.speculation_service")
    async with _serve(folder) as (_, channel, _admin):
        draft = _Draft(channel)
        await draft.attach()
        if end == "bad tree":
            await draft.propose(1, 0, 1, [1], [1])
            await _failure(draft.call)
        else:
            await draft.call.done_writing()
            assert await draft.call.read() is aio.EOF
        await _until(lambda: "detached" in caplog.text)
    assert f"draft w detached from attachment-1: {cause}" in caplog.text.replace(
        "malformed token tree: ", ""
    )


def _servicer(folder: Path) -> tuple[Engine, SpeculationServicer]:
    """A service whose engine steps by hand."""
    settings = TargetSettings(model_path=folder, port=0, max_total_tokens=256, device="cpu")
    engine = build_engine(settings, lambda report: None)
    model = ServedModel("m", HASH)
    return engine, SpeculationServicer(engine, model, attachment_terms(settings), Lifecycle([]))


async def _attached(servicer: SpeculationServicer) -> AsyncGenerator[Any, None]:
    """Returns the stream of a draft that was told that it is attached, and says nothing more."""

    async def requests() -> AsyncIterator[speculation_pb.SpeculateRequest]:
        attach = speculation_pb.Attach(max_sequence_count=1, max_node_count=1, worker_id="w")
        yield speculation_pb.SpeculateRequest(attach=attach)
        await asyncio.Event().wait()

    stream = servicer.Speculate(requests(), cast("Context", None))
    assert (await anext(stream)).HasField("attached")
    return cast("AsyncGenerator[Any, None]", stream)


async def test_draft_of_a_failed_engine_hears_of_the_failure(folder: Path) -> None:
    engine, servicer = _servicer(folder)
    stream = await _attached(servicer)

    def break_down() -> None:
        raise RuntimeError("broken on purpose")

    engine._inbox.post(break_down)
    engine._run()
    with pytest.raises(EngineFailed):
        await anext(stream)


async def test_engine_without_memory_for_a_step_says_what_to_lower(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, _ = _servicer(folder)

    def run_out() -> None:
        raise torch.OutOfMemoryError("Tried to allocate 1.00 KiB. GPU 0 has")

    engine._inbox.post(run_out)
    engine._run()
    assert engine.has_failed
    advice = "1.00 KiB more wanted; lower --max-total-tokens from 256 to "
    assert f"no memory for a step: {advice}" in caplog.text


async def test_process_runs_until_it_is_stopped_or_its_engine_dies(folder: Path) -> None:
    async with _serve(folder) as (process, channel, _):
        stop = asyncio.Event()
        running = asyncio.create_task(process.run_until(stop))
        assert await _tokens(channel, _generate([1, 2, 3]))
        assert not running.done()
        stop.set()
        await asyncio.wait_for(running, 60.0)

        def break_down() -> None:
            raise RuntimeError("broken on purpose")

        process._engine._inbox.post(break_down)
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(process.run_until(asyncio.Event()), 60.0)


async def test_attached_draft_is_known_before_it_hears_of_it(folder: Path) -> None:
    engine, servicer = _servicer(folder)
    stream = await _attached(servicer)
    statuses = engine.attachments()
    servicer.drain(1.0)
    engine.step()
    assert [each.attachment.identity.worker_id for each in statuses.result(timeout=0)] == ["w"]
    assert (await anext(stream)).HasField("drain")
    await stream.aclose()
    engine.step()
    assert engine.draft_algorithms == ()


async def test_a_stream_that_ends_is_told_to_whoever_waits_for_its_trees(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread, which detaches drafts, may be the one that waits."""
    engine, servicer = _servicer(folder)
    stream, left = await _attached(servicer), list[str]()
    monkeypatch.setattr(Attachment, "abandon", lambda draft: left.append(draft.identity.worker_id))
    engine.step()
    await stream.aclose()
    assert left == ["w"]
    assert engine.draft_algorithms == ("",)
    engine.step()
    assert engine.draft_algorithms == ()


async def test_drain_asks_drafts_to_leave(folder: Path) -> None:
    async with _serve(folder) as (_, channel, admin):
        draft = _Draft(channel)
        await draft.attach()
        await admin_grpc.AdminServiceStub(admin).DrainServer(admin_pb.DrainServerRequest())
        response = await draft.call.read()
        assert response.WhichOneof("message") == "drain"
        draft.call.cancel()


async def test_a_message_beyond_what_a_draft_sends_is_not_read(folder: Path) -> None:
    async with _serve(folder) as (_, channel, _admin):
        call = channel.unary_stream("/outrider.target.v1.TargetService/Generate")(bytes(17 * 2**20))
        with pytest.raises(aio.AioRpcError, match="larger than max") as failure:
            await call.read()
        assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(await _tokens(channel, _generate([1]))) == 8


@pytest.mark.parametrize(
    "method", ["target.v1.TargetService/Session", "speculation.v1.SpeculationService/Speculate"]
)
async def test_bytes_that_are_no_message_are_an_invalid_argument(folder: Path, method: str) -> None:
    async with _serve(folder) as (_, channel, _admin):
        call = channel.stream_stream(f"/outrider.{method}")()
        await call.write(b"\xff\xff\xff")
        error = error_from_rpc(await _failure(call))
        assert (error.reason, error.code.name) == ("MESSAGE_UNDECODABLE", "INVALID_ARGUMENT")
        assert len(await _tokens(channel, _generate([1]))) == 8


async def test_taken_port_is_named(folder: Path) -> None:
    async with _serve(folder) as (process, _, _admin):
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{process.port}"):
            async with _serve(folder, port=process.port):
                pass


async def test_flush_frees_cached_pages(folder: Path) -> None:
    async with _serve(folder) as (_, channel, admin):
        await _tokens(channel, _generate(list(range(20)), 20))
        stub = admin_grpc.AdminServiceStub(admin)
        response = await stub.FlushPrefixCache(admin_pb.FlushPrefixCacheRequest())
        assert response.freed_page_count == 2
        gauges = await _gauges(admin)
        assert gauges["free_page_count"] == gauges["page_count"]


@pytest.mark.parametrize(
    ("tree_request", "field", "limits"),
    [
        *((pb.SpeculationParams(step_count=n), "num_steps", "[1, 32]") for n in (0, 33)),
        *(
            (pb.SpeculationParams(draft_token_count=n), "num_draft_tokens", "[1, 257]")
            for n in (0, 258)
        ),
        *((pb.SpeculationParams(outcome_budget=n), "outcome_budget", "[0, 64]") for n in (-1, 65)),
    ],
    ids=str,
)
async def test_impossible_wish_of_a_draft_is_refused(
    folder: Path, tree_request: pb.SpeculationParams, field: str, limits: str
) -> None:
    async with _serve(folder) as (_, channel, _admin):
        request = _generate([1, 2, 3], 4)
        request.speculation_params.CopyFrom(tree_request)
        with pytest.raises(aio.AioRpcError) as caught:
            await _tokens(channel, request)
        error = error_from_rpc(caught.value)
        assert error.violations[0].field == f"speculation.{field}"
        assert limits in error.message
