"""Whatever goes wrong with an update, at whichever route: the error is named, no target has another
version, and answers are those of the old weights."""

from __future__ import annotations

import asyncio
import base64
import datetime
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file

from services.followers import forked_process
from services.target.weight_stager import WeightStager
from shared.models import weight_update
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.rollout_server import Server, rollout_server
from tests.helpers.serving import free_ports

Tensors = dict[str, torch.Tensor]
Q = "model.layers.0.self_attn.q_proj.weight"
K = Q.replace("q_proj", "k_proj")
NORM = "model.norm.weight"
GROUP = "weight_update"


@asynccontextmanager
async def _unchanged(old: Path, count: int = 1) -> AsyncIterator[Server]:
    """Serves; at the end no target has taken anything."""
    async with rollout_server(old, count=count) as server:
        before = (await server.ask())["output_ids"]
        yield server
        assert await server.versions() == ["default"] * count
        assert [(await server.ask())["output_ids"] for _ in range(count)] == [before] * count


def _disk(folder: Path) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_disk", {"model_path": str(folder)}


def _tensor(tensors: Tensors) -> tuple[str, dict[str, Any]]:
    content = base64.b64encode(save(tensors)).decode()
    body = {"serialized_named_tensors": [content], "load_format": "safetensors"}
    return "/update_weights_from_tensor", body


def _sent(shapes: dict[str, Sequence[int]]) -> tuple[str, dict[str, Any]]:
    return "/update_weights_from_distributed", {
        "names": list(shapes),
        "dtypes": ["float32"] * len(shapes),
        "shapes": [list(each) for each in shapes.values()],
        "group_name": GROUP,
    }


async def _refused(server: Server, call: tuple[str, dict[str, Any]], code: str, words: str) -> None:
    path, body = call
    found = await server.post(path, body, status=400)
    assert found["success"] is False
    assert found["error"]["code"] == code.lower()
    assert words in found["message"], found["message"]


def _bad(new: Path) -> list[tuple[Tensors, str]]:
    """Weights that do not fit, and what the refusal says."""
    good = load_file(new / "model.safetensors")
    return [
        ({**good, Q: good[Q][:-1].contiguous()}, f"{Q} of the update has shape"),
        ({Q: good[Q]}, f"the update lacks {K}"),
        ({**good, "lm_tail.weight": good[NORM].clone()}, "the update has lm_tail.weight"),
    ]


async def test_a_folder_that_does_not_fit(old: Path, new: Path, tmp_path: Path) -> None:
    wide = TinyShape(intermediate_size=2 * TinyShape().intermediate_size)
    for name in ("wide", "less", "odd"):
        (tmp_path / name).mkdir()
    write_checkpoint(tmp_path / "wide", "llama", wide, seed=3)
    for name in ("less", "odd"):
        write_checkpoint(tmp_path / name, "llama", seed=4)
    good = load_file(new / "model.safetensors")
    less = {name: each for name, each in good.items() if name != K}
    save_file(less, tmp_path / "less" / "model.safetensors", metadata={"format": "pt"})
    odd = {**good, Q: good[Q][:-1].contiguous()}
    save_file(odd, tmp_path / "odd" / "model.safetensors", metadata={"format": "pt"})
    async with _unchanged(old, count=2) as server:
        for name, words in (("wide", "intermediate_size"), ("less", K), ("odd", Q)):
            await _refused(server, _disk(tmp_path / name), "CHECKPOINT_INVALID", words)


@pytest.mark.parametrize("is_begun", [False, True])
async def test_tensors_that_do_not_fit(is_begun: bool, old: Path, new: Path) -> None:
    async with _unchanged(old, count=2) as server:
        for tensors, words in _bad(new):
            if not is_begun:
                await _refused(server, _tensor(tensors), "CHECKPOINT_INVALID", words)
                continue
            await server.post("/begin_weight_update", {"selector": "all"})
            path, body = _tensor(tensors)
            found = await server.client.post(path, json=body)
            if found.status_code == 200:  # what is missing could still come
                await _refused(server, ("/end_weight_update", {}), "CHECKPOINT_INVALID", words)
            else:
                assert words in found.json()["message"]
                ended = ("/end_weight_update", {})
                await _refused(server, ended, "WEIGHT_UPDATE_NOT_OPEN", "no update was begun")


async def test_half_an_update(old: Path, new: Path) -> None:
    half = _tensor({NORM: load_file(new / "model.safetensors")[NORM]})
    async with _unchanged(old) as server:
        await server.post("/pause_generation", {"mode": "retract"})
        await server.post("/begin_weight_update", {"selector": "all"})
        await server.post(*half)
        went_on = await server.post("/continue_generation", {})
        assert went_on["dropped_update"]
        ended = ("/end_weight_update", {})
        await _refused(server, ended, "WEIGHT_UPDATE_NOT_OPEN", "no update was begun")


def _all(new: Path) -> list[tuple[str, dict[str, Any]]]:
    """A call of each route of an update."""
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    return [
        _disk(new),
        _tensor(load_file(new / "model.safetensors")),
        _sent({NORM: [32]}),
        ("/init_weights_update_group", {**group, "group_name": GROUP}),
        ("/destroy_weights_update_group", {"group_name": GROUP}),
        ("/begin_weight_update", {"selector": "all"}),
        ("/end_weight_update", {}),
    ]


async def test_two_at_once(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update is being read; whatever else comes meanwhile has to wait for its end."""
    reads, may_read = asyncio.Event(), asyncio.Event()
    loop, read = asyncio.get_running_loop(), WeightStager.read

    def slow(stager: WeightStager, *arguments: Any) -> None:
        loop.call_soon_threadsafe(reads.set)
        asyncio.run_coroutine_threadsafe(may_read.wait(), loop).result()
        read(stager, *arguments)

    monkeypatch.setattr(WeightStager, "read", slow)
    async with rollout_server(old) as server:
        first = asyncio.create_task(server.post(*_disk(new)))
        await reads.wait()
        for path, body in _all(new):
            await _refused(server, (path, body), "WEIGHT_UPDATE_BUSY", "is under way")
        assert await server.versions() == ["default"]
        may_read.set()
        assert (await first)["weight_version"] == "1"
        assert await server.versions() == ["1"]
        await server.post("/begin_weight_update", {"selector": "all"})
        again = ("/begin_weight_update", {"selector": "all"})
        await _refused(server, again, "WEIGHT_UPDATE_OPEN", "an update was begun")


@pytest.mark.parametrize("route", ["disk", "tensor", "bracket"])
async def test_no_room(route: str, old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(num_bytes: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")

    call = _disk(new) if route == "disk" else _tensor(load_file(new / "model.safetensors"))
    async with _unchanged(old) as server:
        monkeypatch.setattr(weight_update, "_check_room", full)
        if route == "bracket":
            await server.post("/begin_weight_update", {"selector": "all"})
            await server.post(*call)
            call = ("/end_weight_update", {})
        await _refused(server, call, "WEIGHT_UPDATE_NO_ROOM", "no room on cpu for one layer")


def _broadcast(port: int, path: Path) -> None:
    """A trainer of rank 0 that sends the tensors of a file, and is gone."""
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    limit = datetime.timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
    group, _ = _new_process_group_helper(
        2, 0, [], "gloo", PrefixStore(GROUP, store), group_name=GROUP, timeout=limit
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for tensor in torch.load(path):
        dist.broadcast(tensor, src=0, group=group)


async def test_what_a_group_sends_does_not_fit_and_then_its_rank_dies(
    old: Path, new: Path, tmp_path: Path
) -> None:
    good = load_file(new / "model.safetensors")
    odd, norm = good[Q][:-1].contiguous(), good[NORM]
    torch.save([odd, good[Q], norm, norm], tmp_path / "sent.pt")
    port = next(free_ports(1))
    trainer = forked_process(_broadcast, port, tmp_path / "sent.pt")
    async with _unchanged(old) as server:
        never = _sent({NORM: norm.shape})
        await _refused(server, never, "WEIGHT_GROUP_MISSING", "was never joined")
        trainer.start()
        await server.post(
            "/init_weights_update_group",
            {
                "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
                "world_size": 2, "group_name": GROUP, "backend": "gloo",
            },
        )  # fmt: skip
        shape = _sent({Q: odd.shape})
        await _refused(server, shape, "CHECKPOINT_INVALID", f"{Q} of the update has shape")
        await _refused(server, _sent({Q: good[Q].shape}), "CHECKPOINT_INVALID", f"lacks {K}")
        await _refused(server, _sent({"lm_tail": norm.shape}), "CHECKPOINT_INVALID", "has lm_tail")
        await server.post("/begin_weight_update", {"selector": "all"})
        await server.post(*never)
        await _refused(server, never, "WEIGHT_GROUP_BROKE", "broke before all of the update came")
        ended = ("/end_weight_update", {})
        await _refused(server, ended, "WEIGHT_UPDATE_NOT_OPEN", "no update was begun")
        await asyncio.to_thread(trainer.join)
