"""The weights of a target over its maintenance port: what a trainer and an operator can do, and
what becomes of what goes wrong."""

from __future__ import annotations

import asyncio
import datetime
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grpc import StatusCode, aio
from safetensors.torch import load_file, save

from services.followers import forked_process
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from services.target.weight_stager import WeightStager
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as target_pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as target_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.serving import free_ports
from tests.helpers.step_hold import hold_outputs

VOCAB = 24
SHAPE = TinyShape(vocab_size=VOCAB)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NAME = "model.layers.0.self_attn.q_proj.weight"


@dataclass
class Served:
    process: TargetProcess
    admin: Any
    target: Any

    async def answer(self, prompt: Sequence[int] = PROMPT, count: int = 12) -> list[int]:
        """Returns the tokens of a request with a seed."""
        return [token for each in await self.deltas(prompt, count) for token in each.token_ids]

    async def deltas(
        self, prompt: Sequence[int] = PROMPT, count: int = 12
    ) -> list[target_pb.TokenDelta]:
        request = target_pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=0.7, seed=5),
            stop_params=sampling_pb2.StopParams(max_output_token_count=count, ignore_eos=True),
        )
        return [
            each.delta async for each in self.target.Generate(request) if each.HasField("delta")
        ]

    async def status(self) -> pb.GetWeightStatusResponse:
        found = await self.admin.GetWeightStatus(pb.GetWeightStatusRequest())
        assert isinstance(found, pb.GetWeightStatusResponse)
        return found

    async def read(self, folder: Path, version: str = "", **fields: str) -> pb.WeightUpdate:
        disk = pb.UpdateWeightsRequest.Disk(model_path=str(folder), **fields)
        request = pb.UpdateWeightsRequest(disk=disk, weight_version=version)
        return (await self.admin.UpdateWeights(request)).update

    async def send(self, tensors: dict[str, torch.Tensor], version: str = "") -> pb.WeightUpdate:
        request = pb.UpdateWeightsRequest(safetensors=save(tensors), weight_version=version)
        return (await self.admin.UpdateWeights(request)).update


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("old"), "llama", SHAPE, seed=3)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("new"), "llama", SHAPE, seed=4)


@asynccontextmanager
async def _serve(folder: Path, **changes: Any) -> AsyncIterator[Served]:
    settings = replace(
        TargetSettings(
            model_path=folder, port=0, max_total_tokens=256, context_length=64, device="cpu"
        ),
        **changes,
    )
    engine = build_engine(settings, lambda report: None)
    process = TargetProcess(engine, settings, "ab" * 32)
    await process.start()
    async with (
        open_channel(f"127.0.0.1:{process.port}") as channel,
        open_channel(f"127.0.0.1:{process.admin_port}") as admin,
    ):
        try:
            yield Served(
                process,
                pb_grpc.AdminServiceStub(admin),
                target_grpc.TargetServiceStub(channel),
            )
        finally:
            await process.stop(grace_s=0.0)


async def _refused(call: Any, reason: str) -> str:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    error = error_from_rpc(caught.value)
    assert error.reason == reason, error.message
    return error.message


async def test_a_checkpoint_from_disk_takes_over_at_once(old: Path, new: Path) -> None:
    async with _serve(new) as other:
        expected = await other.answer()
    async with _serve(old) as served:
        before = await served.answer()
        assert (await served.status()).weight_version == "default"
        update = await served.read(new, "step-1")
        assert (update.weight_version, update.freed_page_count > 0) == ("step-1", True)
        deltas = await served.deltas()
        after = [token for each in deltas for token in each.token_ids]
        assert [each.weight_version for each in deltas if each.HasField("weight_version")] == [
            "step-1"
        ]
        model = await served.target.GetModel(target_pb.GetModelRequest())
        assert (model.weight_version, (await served.status()).update_count) == ("step-1", 1)
        assert (await served.read(old)).weight_version == "2", "the number of updates"
        assert await served.answer() == before
    assert after == expected != before


async def test_weights_come_in_messages_and_are_gathered(old: Path, new: Path) -> None:
    async with _serve(new) as other:
        expected = await other.answer()
    weights = load_file(new / "model.safetensors")
    names = sorted(weights)
    async with _serve(old) as served:
        before = await served.answer()
        await served.admin.BeginWeightUpdate(pb.BeginWeightUpdateRequest())
        for part in (names[::2], names[1::2]):
            update = await served.send({name: weights[name] for name in part}, "v7")
            assert update == pb.WeightUpdate()
            assert await served.answer() == before, "half an update is in force"
        ended = await served.admin.EndWeightUpdate(pb.EndWeightUpdateRequest())
        assert ended.update.weight_version == "v7"
        assert await served.answer() == expected


async def test_what_goes_wrong_is_named_and_the_old_weights_go_on(
    old: Path, new: Path, tmp_path: Path
) -> None:
    wide = write_checkpoint(tmp_path / "wide", "llama", TinyShape(vocab_size=32), seed=3)
    torn = write_checkpoint(tmp_path / "torn", "llama", SHAPE, seed=5)
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    async with _serve(old) as served:
        before = await served.answer()
        admin = served.admin
        message = await _refused(served.read(tmp_path / "nowhere"), "CHECKPOINT_INVALID")
        assert "nowhere, which is no folder" in message
        message = await _refused(served.read(wide), "CHECKPOINT_INVALID")
        assert "vocab_size 32; the model that is served has 24" in message
        assert "cannot be read" in await _refused(served.read(torn), "CHECKPOINT_INVALID")
        await _refused(served.read(new, load_format="flash_rl"), "LOAD_FORMAT_UNKNOWN")
        message = await _refused(served.send({NAME: torch.zeros(2, 2)}), "CHECKPOINT_INVALID")
        assert f"{NAME} of the update has shape [2, 2]; the model needs [32, 32]" in message
        await _refused(served.send({"lm_tail": torch.zeros(1)}), "CHECKPOINT_INVALID")
        message = await _refused(served.send({NAME: torch.zeros(32, 32)}), "CHECKPOINT_INVALID")
        assert "lacks model.layers.0.self_attn.k_proj.weight" in message
        pickled = pb.UpdateWeightsRequest(safetensors=b"\x80\x04pickled")
        await _refused(admin.UpdateWeights(pickled), "WEIGHTS_NOT_SAFETENSORS")
        await _refused(admin.UpdateWeights(pb.UpdateWeightsRequest()), "WEIGHT_SOURCE_MISSING")
        assert await served.answer() == before
        assert (await served.status()).weight_version == "default"


async def test_half_an_update_is_dropped_when_generation_goes_on(old: Path, new: Path) -> None:
    async with _serve(old) as served:
        before, admin = await served.answer(), served.admin
        ending = admin.EndWeightUpdate(pb.EndWeightUpdateRequest())
        await _refused(ending, "WEIGHT_UPDATE_NOT_OPEN")
        pause = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_RETRACT)
        await admin.PauseGeneration(pause)
        await admin.BeginWeightUpdate(pb.BeginWeightUpdateRequest())
        again = admin.BeginWeightUpdate(pb.BeginWeightUpdateRequest())
        await _refused(again, "WEIGHT_UPDATE_OPEN")
        await served.send({"model.norm.weight": torch.zeros(32)})
        went_on = await admin.ContinueGeneration(pb.ContinueGenerationRequest())
        assert went_on.dropped_update
        ending = admin.EndWeightUpdate(pb.EndWeightUpdateRequest())
        await _refused(ending, "WEIGHT_UPDATE_NOT_OPEN")
        assert await served.answer() == before
        # What a bad part leaves of an update is dropped as well.
        await admin.BeginWeightUpdate(pb.BeginWeightUpdateRequest())
        await _refused(served.send({"lm_tail": torch.zeros(1)}), "CHECKPOINT_INVALID")
        ending = admin.EndWeightUpdate(pb.EndWeightUpdateRequest())
        await _refused(ending, "WEIGHT_UPDATE_NOT_OPEN")
        await served.read(new)
        assert await served.answer() != before


async def test_of_two_updates_at_once_one_is_refused(
    old: Path, new: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads, may_read = WeightStager.read, threading.Event(), threading.Event()

    def slow(stager: WeightStager, *arguments: Any) -> None:
        reads.set()
        assert may_read.wait(60.0)
        read(stager, *arguments)

    monkeypatch.setattr(WeightStager, "read", slow)
    async with _serve(old) as served:
        first = asyncio.create_task(served.read(new))
        assert await asyncio.to_thread(reads.wait, 60.0)
        await _refused(served.read(new), "WEIGHT_UPDATE_BUSY")
        may_read.set()
        await first
        assert (await served.status()).update_count == 1


async def test_a_target_that_drains_takes_no_update(old: Path, new: Path) -> None:
    async with _serve(old) as served:
        await served.admin.DrainServer(pb.DrainServerRequest())
        await _refused(served.read(new), "SERVER_DRAINING")
        admin = served.admin
        for call in (
            served.send({NAME: torch.zeros(32, 32)}),
            admin.UpdateWeights(_to_come(new, is_flat=False)),
            admin.InitWeightUpdateGroup(pb.InitWeightUpdateGroupRequest(group_name="update")),
            admin.BeginWeightUpdate(pb.BeginWeightUpdateRequest()),
            admin.EndWeightUpdate(pb.EndWeightUpdateRequest()),
            admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_RETRACT)),
            admin.ReleaseMemory(pb.ReleaseMemoryRequest(tags=["kv_cache"])),
        ):
            await _refused(call, "SERVER_DRAINING")
        assert (await served.status()).weight_version == "default"


async def test_a_pause_holds_requests_and_continuing_answers_them(old: Path) -> None:
    async with _serve(old) as served:
        expected, admin = await served.answer(), served.admin
        await admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_ABORT))
        assert (await served.status()).pause_mode == pb.PAUSE_MODE_ABORT
        waiting = asyncio.create_task(served.answer())
        while not (await served.status()).waiting_request_count:
            assert not waiting.done()
        flush = pb.FlushPrefixCacheRequest(only_when_idle=True)
        assert (await admin.FlushPrefixCache(flush)).freed_page_count > 0
        await admin.ContinueGeneration(pb.ContinueGenerationRequest())
        assert await waiting == expected
        hold_outputs(served.process)
        running = asyncio.create_task(served.answer(count=50))
        while not (await served.status()).running_request_count:
            assert not running.done()
        in_place = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_IN_PLACE)
        await admin.PauseGeneration(in_place)
        await _refused(admin.FlushPrefixCache(flush), "TARGET_IN_USE")
        await _refused(admin.ReleaseMemory(pb.ReleaseMemoryRequest()), "TARGET_IN_USE")
        await admin.ContinueGeneration(pb.ContinueGenerationRequest())
        assert (await running)[:12] == expected


async def test_memory_is_given_back_and_taken_again(old: Path) -> None:
    async with _serve(old) as served:
        expected, admin = await served.answer(), served.admin
        cache = ["kv_cache"]
        odd = pb.ReleaseMemoryRequest(tags=["cuda_graph"])
        assert "cuda_graph" in await _refused(admin.ReleaseMemory(odd), "MEMORY_TAG_UNKNOWN")
        released = await admin.ReleaseMemory(pb.ReleaseMemoryRequest(tags=cache))
        # 3 layers of keys and values, 2 heads of 8, in float32.
        assert released.freed_bytes >= 256 * 3 * 2 * 2 * 8 * 4
        assert list((await served.status()).released_tags) == cache
        going_on = admin.ContinueGeneration(pb.ContinueGenerationRequest())
        await _refused(going_on, "MEMORY_RELEASED")
        await admin.ResumeMemory(pb.ResumeMemoryRequest(tags=cache))
        await admin.ContinueGeneration(pb.ContinueGenerationRequest())
        assert await served.answer() == expected
        # Of weights nothing is left, and a whole update has to come.
        await admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_RETRACT))
        await admin.ReleaseMemory(pb.ReleaseMemoryRequest(tags=["weights"]))
        await admin.ResumeMemory(pb.ResumeMemoryRequest(tags=["weights"]))
        going_on = admin.ContinueGeneration(pb.ContinueGenerationRequest())
        await _refused(going_on, "WEIGHTS_TORN")
        await served.read(old)
        await admin.ContinueGeneration(pb.ContinueGenerationRequest())
        assert await served.answer() == expected


async def test_checksums_tell_weights_apart(old: Path, new: Path) -> None:
    async with _serve(old) as served:
        check, action = served.admin.CheckWeights, pb.CheckWeightsRequest

        async def of(kind: pb.CheckWeightsRequest.Action) -> pb.CheckWeightsResponse:
            found = await check(action(action=kind))
            assert isinstance(found, pb.CheckWeightsResponse)
            return found

        before = (await of(action.ACTION_CHECKSUM)).checksums
        await _refused(of(action.ACTION_COMPARE), "SNAPSHOT_MISSING")
        await _refused(of(action.ACTION_UNSPECIFIED), "WEIGHT_ACTION_UNKNOWN")
        await of(action.ACTION_SNAPSHOT)
        await served.read(new)
        assert set((await of(action.ACTION_COMPARE)).changed) == set(before)
        await served.read(old)
        assert not (await of(action.ACTION_COMPARE)).changed


def _train(port: int, updates: Sequence[tuple[Path, bool]], num_sent: int | None) -> None:
    """A trainer of rank 0, which may die on the way.

    Args:
        updates: folders whose tensors it sends, one by one or as one.
    """
    from torch.distributed.distributed_c10d import (
        PrefixStore,
        _new_process_group_helper,
        _world,
    )
    from torch.distributed.rendezvous import rendezvous

    limit = datetime.timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
    group, _ = _new_process_group_helper(
        2, 0, [], "gloo", PrefixStore("update", store), group_name="update", timeout=limit
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for folder, is_flat in updates:
        weights = load_file(folder / "model.safetensors")
        tensors = [weights[name] for name in sorted(weights)]
        if is_flat:
            tensors = [torch.cat([each.flatten().view(torch.uint8) for each in tensors])]
        for tensor in tensors[:num_sent]:
            dist.broadcast(tensor, src=0, group=group)


def _trainer(port: int, *updates: tuple[Path, bool], num_sent: int | None = None) -> Any:
    process = forked_process(_train, port, updates, num_sent)
    process.start()
    return process


def _to_come(folder: Path, *, is_flat: bool) -> pb.UpdateWeightsRequest:
    weights = load_file(folder / "model.safetensors")
    tensors = [
        pb.UpdateWeightsRequest.TensorSpec(name=name, dtype="float32", shape=weights[name].shape)
        for name in sorted(weights)
    ]
    sent = pb.UpdateWeightsRequest.Distributed(
        group_name="update", tensors=tensors, is_flattened=is_flat
    )
    return pb.UpdateWeightsRequest(distributed=sent, weight_version="sent")


async def test_a_trainer_sends_weights_through_a_group(old: Path, new: Path) -> None:
    """One by one, and then the old ones as one tensor."""
    async with _serve(new) as other:
        expected = await other.answer()
    port = next(free_ports(1))
    async with _serve(old) as served:
        before = await served.answer()
        trainer = _trainer(port, (new, False), (old, True))
        terms = pb.InitWeightUpdateGroupRequest(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2,
            group_name="update",
        )  # fmt: skip
        await served.admin.InitWeightUpdateGroup(terms)
        await _refused(served.admin.InitWeightUpdateGroup(terms), "WEIGHT_GROUP_EXISTS")
        await served.admin.UpdateWeights(_to_come(new, is_flat=False))
        assert await served.answer() == expected != before
        assert (await served.status()).weight_version == "sent"
        await served.admin.UpdateWeights(_to_come(old, is_flat=True))
        assert await served.answer() == before
        leave = pb.DestroyWeightUpdateGroupRequest(group_name="update")
        await served.admin.DestroyWeightUpdateGroup(leave)
        await _refused(served.admin.DestroyWeightUpdateGroup(leave), "WEIGHT_GROUP_MISSING")
        trainer.join()


async def test_a_trainer_that_dies_leaves_the_old_weights(old: Path, new: Path) -> None:
    port = next(free_ports(1))
    async with _serve(old) as served:
        before = await served.answer()
        trainer = _trainer(port, (new, False), num_sent=3)
        terms = pb.InitWeightUpdateGroupRequest(
            master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2,
            group_name="update",
        )  # fmt: skip
        await served.admin.InitWeightUpdateGroup(terms)
        update = served.admin.UpdateWeights(_to_come(new, is_flat=False))
        await _refused(update, "WEIGHT_GROUP_BROKE")
        trainer.join()
        assert await served.answer() == before
        assert (await served.status()).weight_version == "default"


async def test_a_group_that_cannot_be_is_refused(old: Path, new: Path) -> None:
    async with _serve(old) as served:
        init, request = served.admin.InitWeightUpdateGroup, pb.InitWeightUpdateGroupRequest
        terms = request(master_address="127.0.0.1", master_port=1, group_name="update")
        message = await _refused(init(terms), "WEIGHT_GROUP_RANKS")
        assert "rank_offset is 0 and world_size 0" in message
        terms.rank_offset, terms.world_size, terms.backend = 1, 2, "nccl"
        await _refused(init(terms), "WEIGHT_GROUP_BACKEND")
        await _refused(
            served.admin.UpdateWeights(_to_come(new, is_flat=False)), "WEIGHT_GROUP_MISSING"
        )


async def test_other_processes_have_no_weights_to_replace(old: Path) -> None:
    from gateway.process import maintenance_server
    from shared.rpc.admin_service import AdminHooks, ProcessInfo
    from shared.rpc.server import Lifecycle, bind

    async def drained(grace_s: float) -> int:
        return 0

    server = await maintenance_server(
        ProcessInfo("gateway", "0", 0.0, {}), Lifecycle([]), AdminHooks(drain=drained)
    )
    port = bind(server, "127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.AdminServiceStub(channel)
        with pytest.raises(aio.AioRpcError) as caught:
            await stub.GetWeightStatus(pb.GetWeightStatusRequest())
        assert caught.value.code() is StatusCode.UNIMPLEMENTED
    await server.stop(None)
