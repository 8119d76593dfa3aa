"""Updates of a serving target's weights, and of its embedded draft's, while requests run.

``python -m tests.bench.weight_updates --target FOLDER --head FOLDER`` prints how long an update
takes as a whole, how long no step ran, and how long the bytes alone take over the same medium: a
read of the checkpoint with a copy to the device, or a broadcast (NCCL where there is a second GPU
for the sender, else gloo). Of a draft's swaps it prints the longest wait for a token in rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.embedded_factory import build_embedded_draft
from services.target.__main__ import read_settings
from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as pb_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as target_pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as target_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.tokenizer_files import tokenizer_sha256

_GROUP = "weight_update"
_NUM_SWAPS = 20


@dataclass
class Load:
    """Requests that never end, and when their tokens came.

    Attributes:
        arrivals_s: of each request's tokens, one list each.
    """

    stub: Any
    arrivals_s: list[list[float]] = field(default_factory=list)

    async def run(self, number: int) -> None:
        """Asks one request after the other."""
        while True:
            request = target_pb.GenerateRequest(
                prompt_token_ids=[(number * 37 + place * 11) % 500 + 5 for place in range(64)],
                sampling_params=sampling_pb2.SamplingParams(temperature=0.7, seed=number),
                stop_params=sampling_pb2.StopParams(max_output_token_count=400, ignore_eos=True),
            )
            arrivals: list[float] = []
            self.arrivals_s.append(arrivals)
            async for response in self.stub.Generate(request):
                arrivals += [time.perf_counter()] if response.delta.token_ids else []

    def gaps_s(self, begin_s: float, end_s: float) -> list[float]:
        """Returns the waits for tokens that ended within a time."""
        found = []
        for arrivals in self.arrivals_s:
            pairs = itertools.pairwise(arrivals)
            found += [after - before for before, after in pairs if begin_s <= after <= end_s]
        return found


def _row(what: str, whole_s: float, pause_s: float, medium_s: float, num_bytes: int) -> None:
    print(
        f"{what:28s} {whole_s:8.3f} s whole {pause_s:8.3f} s without steps "
        f"{medium_s:8.3f} s medium {whole_s / medium_s:6.2f} x {num_bytes / 1e9:6.2f} GB",
        flush=True,
    )


def _medium_s(folder: Path, device: torch.device) -> tuple[float, int]:
    """Returns how long reading a checkpoint and copying it to a device takes, and its bytes."""
    begin_s, num_bytes = time.perf_counter(), 0
    for path in sorted(folder.glob("*.safetensors")):
        for tensor in load_file(path, device=str(device)).values():
            num_bytes += tensor.nbytes
            del tensor
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin_s, num_bytes


def _send(port: int, folder: Path, backend: str, device: str) -> None:
    """A trainer of rank 0: sends a checkpoint."""
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=120)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
    paths = sorted(folder.glob("*.safetensors"))
    files = [sorted(load_file(path, device=device).items()) for path in paths]
    tensors = [tensor for file in files for _, tensor in file]
    group, _ = _new_process_group_helper(
        2, 0, [], backend, PrefixStore(_GROUP, store), group_name=_GROUP, timeout=limit
    )
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for tensor in tensors:
        dist.broadcast(tensor, src=0, group=group)
    if device != "cpu":
        torch.cuda.synchronize()


async def _from_disk(admin: Any, folder: Path, device: torch.device) -> None:
    medium_s, num_bytes = _medium_s(folder, device)
    disk = pb.UpdateWeightsRequest.Disk(model_path=str(folder))
    begin_s = time.perf_counter()
    answer = await admin.UpdateWeights(pb.UpdateWeightsRequest(disk=disk))
    pause_s = answer.update.pause_duration.ToNanoseconds() / 1e9
    _row("update from disk", time.perf_counter() - begin_s, pause_s, medium_s, num_bytes)


def _announced(folder: Path) -> tuple[pb.UpdateWeightsRequest.Distributed, int]:
    """Returns what the sender sends, in its order, and how many bytes."""
    sent, num_bytes = pb.UpdateWeightsRequest.Distributed(group_name=_GROUP), 0
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in sorted(load_file(path).items()):
            dtype = str(tensor.dtype).removeprefix("torch.")
            sent.tensors.add(name=name, dtype=dtype, shape=tensor.shape)
            num_bytes += tensor.nbytes
    return sent, num_bytes


async def _from_group(admin: Any, folder: Path) -> None:
    has_second = torch.cuda.device_count() > 1
    backend, device = ("nccl", "cuda:1") if has_second else ("gloo", "cpu")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    sender = multiprocessing.get_context("spawn").Process(
        target=_send, args=(port, folder, backend, device)
    )
    sender.start()
    try:
        await admin.InitWeightUpdateGroup(
            pb.InitWeightUpdateGroupRequest(
                master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2,
                group_name=_GROUP, backend=backend,
            )
        )  # fmt: skip
        sent, num_bytes = _announced(folder)
        begin_s = time.perf_counter()
        answer = await admin.UpdateWeights(pb.UpdateWeightsRequest(distributed=sent))
        whole_s = time.perf_counter() - begin_s
        pause_s = answer.update.pause_duration.ToNanoseconds() / 1e9
        print(
            f"{f'update from {backend}':28s} {whole_s:8.3f} s whole {pause_s:8.3f} s without "
            f"steps, {num_bytes / whole_s / 1e9:.2f} GB/s",
            flush=True,
        )
    finally:
        sender.join(20)
        sender.kill()


async def _swaps(admin: Any, load: Load, head: Path) -> None:
    """Swaps the head's own weights in, again and again."""
    begin_s = time.perf_counter()
    await asyncio.sleep(3.0)
    calm = load.gaps_s(begin_s, time.perf_counter())
    round_s, begin_s, pauses_s = statistics.median(calm), time.perf_counter(), list[float]()
    for number in range(_NUM_SWAPS):
        request = pb.UpdateDraftWeightsRequest(model_path=str(head), weight_version=str(number))
        answer = await admin.UpdateDraftWeights(request)
        pauses_s.append(answer.pause_duration.ToNanoseconds() / 1e9)
    gaps = load.gaps_s(begin_s, time.perf_counter())
    print(
        f"{_NUM_SWAPS} swaps of the draft: rounds waited {max(pauses_s) * 1e3:.2f} ms at most; "
        f"a token {max(gaps) / round_s:.2f} rounds at most, {max(calm) / round_s:.2f} without; "
        f"a round {round_s * 1e3:.2f} ms",
        flush=True,
    )


async def _measure(target: Path, head: Path | None, flags: Sequence[str], count: int) -> None:
    words = ["--model-path", str(target), "--port", "0", *flags]
    if head is not None:
        words += [
            *("--draft", "embedded", "--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(head)),
        ]
    settings, chosen = read_settings(words, {})
    engine = build_engine(settings, lambda report: None)
    process = TargetProcess(engine, settings, tokenizer_sha256(target))
    if chosen is not None:
        built = build_embedded_draft(engine, settings, chosen)
        process.embed(built.port, built.settings)
    await process.start()
    try:
        async with (
            open_channel(f"127.0.0.1:{process.port}") as channel,
            open_channel(f"127.0.0.1:{process.admin_port}") as maintenance,
        ):
            admin = pb_grpc.AdminServiceStub(maintenance)
            load = Load(target_grpc.TargetServiceStub(channel))
            running = [asyncio.create_task(load.run(number)) for number in range(count)]
            try:
                await asyncio.sleep(2.0)
                if head is not None:
                    await _swaps(admin, load, head)
                for _ in range(2):
                    await _from_disk(admin, target, engine.device)
                await _from_group(admin, target)
                assert not any(each.done() for each in running), "a request was lost"
            finally:
                for each in running:
                    each.cancel()
                await asyncio.gather(*running, return_exceptions=True)
    finally:
        await process.stop(grace_s=0.0)


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.HelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="of EAGLE3, embedded")
    parser.add_argument("--requests", type=int, default=8, help="that run at once")
    arguments, flags = parser.parse_known_args()
    asyncio.run(_measure(arguments.target, arguments.head, flags, arguments.requests))


if __name__ == "__main__":
    main()
