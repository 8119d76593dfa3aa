"""Drafts that break the protocol, at a target with a tiny model.

Whatever they send, the target answers other clients as before, token for token and in time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from grpc import aio

from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from shared.candidate_columns import CandidateColumns
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2, target_service_pb2_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.rpc.columns import add_candidates, verdicts_from_message
from shared.tokens import NO_REPORT, Candidate, Condition, TokenTree
from tests.fuzz.findings import MAX_SECONDS, Findings
from tests.helpers.checkpoints import TinyShape, write_checkpoint

_HASH = "ab" * 32
_VOCAB = 24
_SPECULATE = "/outrider.speculation.v1.SpeculationService/Speculate"
_GENERATE = "/outrider.target.v1.TargetService/Generate"
_RAW = (_SPECULATE, "/outrider.target.v1.TargetService/Session")
_BUGS = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
_OF_CLIENT = "Internal error from Core"  # it wrote after the server had ended the call
_NUMBERS = (0, 1, 2, 3, 7, -1, -2, 23, 24, 64, 10_000, 2**31 - 1, -(2**31), 2**62, -(2**63))
_FLOATS = (0.0, -1.0, 0.5, 1e30, float("nan"), float("inf"), float("-inf"))


@asynccontextmanager
async def tiny_target(folder: Path) -> AsyncIterator[str]:
    """Serves a model of a few tokens; yields its address."""
    write_checkpoint(folder, "llama", TinyShape(vocab_size=_VOCAB), seed=3)
    settings = TargetSettings(
        model_path=folder, port=0, max_total_tokens=512, context_length=64, device="cpu"
    )
    process = TargetProcess(build_engine(settings, lambda report: None), settings, _HASH)
    await process.start()
    try:
        yield f"127.0.0.1:{process.port}"
    finally:
        await process.stop(grace_s=0.0)


async def send_rogues(
    address: str, rng: random.Random, found: Findings, go_on: Callable[[], bool]
) -> None:
    """Attaches one rogue after the other while `go_on` says so, and asks for tokens meanwhile."""
    async with open_channel(address) as channel:
        expected = await _tokens(channel)
        while go_on():
            seed = rng.getrandbits(32)

            async def ask(seed: int = seed) -> float:
                return await _ask_beside_rogue(address, seed, expected, found)

            found.judge(await ask(), f"a request beside rogue draft {seed}", b"", ask)
            found.num_drafts += 1
            await _generate_nearly(channel, rng, found)


async def _ask_beside_rogue(address: str, seed: int, expected: list[int], found: Findings) -> float:
    """Returns the seconds until a request's tokens have all come while a rogue is attached."""
    async with open_channel(address) as channel, open_channel(address) as other:
        rogue = asyncio.create_task(_rogue(other, random.Random(seed), found))
        begin_s = time.monotonic()
        tokens = await _tokens(channel)
        duration_s = time.monotonic() - begin_s
        await rogue
    if tokens != expected:
        found.add(f"rogue draft {seed} changed {expected} to {tokens}", b"")
    return duration_s


async def _tokens(channel: aio.Channel) -> list[int]:
    request = target_service_pb2.GenerateRequest(
        prompt_token_ids=[1, 2, 3],
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(max_output_token_count=24, ignore_eos=True),
    )
    stub = target_service_pb2_grpc.TargetServiceStub(channel)
    return [token async for each in stub.Generate(request) for token in each.delta.token_ids]


async def _generate_nearly(channel: aio.Channel, rng: random.Random, found: Findings) -> None:
    """Sends a request with some wrong fields, and bytes that are none."""
    request = target_service_pb2.GenerateRequest(prompt_token_ids=[1, 2])
    request.stop_params.max_output_token_count = 2
    mutate(request, rng, 0.2)
    content = (
        rng.randbytes(rng.randrange(40)) if rng.random() < 0.3 else request.SerializeToString()
    )
    call = channel.unary_stream(_GENERATE)(content, timeout=MAX_SECONDS)
    found.num_rpcs += 1
    try:
        async for _ in call:
            pass
    except aio.AioRpcError as error:
        _judge(error, "Generate", content, found)


async def _rogue(channel: aio.Channel, rng: random.Random, found: Findings) -> None:
    """One stream from its first message to its end."""
    sent: list[bytes] = []
    method = _SPECULATE if rng.random() < 0.8 else rng.choice(_RAW)
    call = channel.stream_stream(method)(timeout=MAX_SECONDS)
    seen: dict[int, tuple[int, int]] = {}
    reader = asyncio.create_task(_watch(call, seen, sent, found))
    try:
        for number in range(rng.randrange(1, 12)):
            content = _message(number, seen, rng)
            sent.append(content)
            await call.write(content)
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.002)))
        if rng.random() < 0.5:
            await call.done_writing()
        else:
            call.cancel()
        await reader
    except (aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError):  # it is not wanted
        await reader
    finally:
        call.cancel()


async def _watch(
    call: Any, seen: dict[int, tuple[int, int]], sent: list[bytes], found: Findings
) -> None:
    """Notes the sequences that a draft is told of: round and committed tokens of each."""
    try:
        while (content := await call.read()) is not aio.EOF:
            message = pb.SpeculateResponse.FromString(content)
            for opened in message.opened.sequences:
                seen[opened.sequence_id] = (opened.round, len(opened.token_ids))
            for verdict in verdicts_from_message(message.verdicts):
                seen[verdict.sequence_id] = (verdict.round + 1, verdict.committed_token_count)
    except aio.AioRpcError as error:
        _judge(error, "Speculate", b"|".join(sent), found)
    except asyncio.CancelledError:
        if not call.cancelled():
            raise


def _judge(error: aio.AioRpcError, method: str, sent: bytes, found: Findings) -> None:
    if error.code() in _BUGS and error.details() != _OF_CLIENT:
        found.add(f"{method} failed: {error.code().name} {error.details()}", sent)


def _message(number: int, seen: dict[int, tuple[int, int]], rng: random.Random) -> bytes:
    """Returns the next message of a rogue: most are right but for a field."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.randrange(60))
    request = pb.SpeculateRequest()
    if number == 0 and rng.random() < 0.95:
        request.attach.CopyFrom(_attach(rng))
    elif rng.random() < 0.8:
        columns = CandidateColumns.of(_candidate(seen, rng) for _ in range(rng.randrange(4)))
        add_candidates(request.candidates, columns, NO_REPORT)
    mutate(request, rng, rng.choice((0.0, 0.0, 0.02, 0.1)))
    return request.SerializeToString()


def _attach(rng: random.Random) -> pb.Attach:
    attach = pb.Attach(
        worker_id="w",
        model_id="m",
        tokenizer_sha256=_HASH,
        max_sequence_count=4,
        max_node_count=8,
        algorithm="TEST",
        learns=rng.random() < 0.2,
    )
    if rng.random() < 0.4:
        attach.feature_spec.layer_indices.extend(rng.choices(range(5), k=rng.randrange(1, 4)))
        attach.feature_spec.data_type = rng.randrange(1, 4)  # type: ignore[assignment]
    return attach


def _candidate(seen: dict[int, tuple[int, int]], rng: random.Random) -> Candidate:
    number, (round_, committed) = rng.choice(list(seen.items()) or [(1, (0, 3))])
    size = rng.randrange(9)
    parents = [rng.randrange(-1, node) for node in range(size)]
    condition = Condition(rng.choice((None, 0, 5)), rng.randrange(_VOCAB), rng.choice((None, 1)))
    return Candidate(
        number,
        round_ + rng.choice((0, 0, 0, 1, -1)),
        committed + rng.choice((0, 0, 0, 1, -1)),
        TokenTree(
            tuple(rng.choices(range(_VOCAB), k=size)),
            tuple(None if parent < 0 else parent for parent in parents),
        ),
        condition if rng.random() < 0.3 else None,
        rng.choice((None, 1, 2)),
    )


def mutate(message: Message, rng: random.Random, share: float, depth: int = 0) -> None:
    """Changes a share of the fields of a message, those below included."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            _mutate_inner(message, field, rng, share, depth)
        elif rng.random() < share:
            _change(message, field, rng)


def _mutate_inner(
    message: Message, field: FieldDescriptor, rng: random.Random, share: float, depth: int
) -> None:
    inner = getattr(message, field.name)
    if field.message_type.GetOptions().map_entry:
        return
    if field.is_repeated:
        if rng.random() < share and depth < 4:
            inner.add()
        for each in inner:
            mutate(each, rng, share, depth + 1)
    elif message.HasField(field.name) or (rng.random() < share and depth < 4):
        inner.SetInParent()
        mutate(inner, rng, share, depth + 1)


def _change(message: Message, field: FieldDescriptor, rng: random.Random) -> None:
    number = rng.randrange(1, 5) if field.is_repeated else 1
    values = [_value(field, rng) for _ in range(number)]
    try:
        column: Any = getattr(message, field.name) if field.is_repeated else ()
        if column and rng.random() < 0.7:
            column[rng.randrange(len(column))] = values[0]
        elif field.is_repeated:
            column.extend(values)
        else:
            setattr(message, field.name, values[0])
    except ValueError:  # beyond what the field's type holds
        return


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return rng.randbytes(rng.randrange(40)) if is_bytes else rng.choice(("", "é", "a" * 5000))
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return rng.choice(_FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    return rng.choice(_NUMBERS)
