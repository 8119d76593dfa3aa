"""Updates of a serving target's weights, and of its embedded draft's, while requests run.

``python -m tests.bench.weight_updates --target FOLDER --head FOLDER`` prints how long an update
takes as a whole, how long no step ran, and how long the bytes alone take over the same medium: a
read of the checkpoint with a copy to the device, or a broadcast. NCCL needs a second GPU for the
sender; with one GPU, copies within its memory stand in for what NCCL would write there, and the
link's own time is left out. Of a draft's swaps it prints the longest wait for a token in rounds.
Of a learner, in a process of its own, it prints what it costs: it trains for a tenth of the time on
the same GPU, and all the time on the second one where there is one. It is stopped and goes on in
turns; printed are tokens a second of both, and whether all answers stay the same. `--parts` names
what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import signal
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from services.target.__main__ import tune_interpreter, tune_torch
from services.target.weight_stager import WeightStager
from shared.pb.outrider.admin.v1 import admin_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2 as target_pb
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.helpers.served import Target, running_target

_PARTS = ("swaps", "disk", "group", "learner")
_GROUP = "weight_update"
_NUM_SWAPS = 20
_NUM_UPDATES = 2
_WINDOW_S = 8.0
_NUM_TURNS = 5
_NUM_WARM_UPDATES = 3
_LESSON_TOKENS = 20_000
_BUSY_SHARE = 0.1
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@dataclass
class Load:
    """Requests that never end, and when their tokens came.

    Attributes:
        arrivals_s: of each request's messages, one list each.
        counts: tokens of each of these messages.
        answers: all that were ever given to each request, which is asked again and again.
    """

    stub: Any
    arrivals_s: list[list[float]] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    answers: dict[int, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))

    async def run(self, number: int) -> None:
        """Asks one request after the other."""
        while True:
            request = target_pb.GenerateRequest(
                prompt_token_ids=[(number * 37 + place * 11) % 500 + 5 for place in range(64)],
                sampling_params=sampling_pb2.SamplingParams(temperature=0.7, seed=number),
                stop_params=sampling_pb2.StopParams(max_output_token_count=400, ignore_eos=True),
            )
            arrivals, counts, tokens = list[float](), list[int](), list[int]()
            self.arrivals_s.append(arrivals)
            self.counts.append(counts)
            async for response in self.stub.Generate(request):
                if response.delta.token_ids:
                    arrivals.append(time.perf_counter())
                    counts.append(len(response.delta.token_ids))
                    tokens += response.delta.token_ids
            self.answers[number].add(tuple(tokens))

    async def rate(self, seconds: float) -> float:
        """Returns tokens a second of the next seconds."""
        begin_s = time.perf_counter()
        await asyncio.sleep(seconds)
        end_s = time.perf_counter()
        pairs = zip(chain(*self.arrivals_s), chain(*self.counts), strict=True)
        return sum(n for at_s, n in pairs if begin_s <= at_s <= end_s) / (end_s - begin_s)

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
    took_s = time.perf_counter() - begin_s
    if device.type == "cuda":
        torch.cuda.empty_cache()  # which is the target's, too
    return took_s, num_bytes


def _send(port: int, folder: Path) -> None:
    """A trainer of rank 0 on the second GPU: sends a checkpoint."""
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=120)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=limit))
    tensors = _loaded(folder, "cuda:1")
    torch.cuda.set_device(1)
    group, _ = _new_process_group_helper(
        2, 0, [], "nccl", PrefixStore(_GROUP, store), timeout=limit,
        group_name=_GROUP,  # type: ignore[arg-type]
    )  # fmt: skip
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    for _ in range(_NUM_UPDATES):
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)
        torch.cuda.synchronize()


def _loaded(folder: Path, device: str) -> list[torch.Tensor]:
    """Returns a checkpoint's tensors in the order in which they are sent."""
    paths = sorted(folder.glob("*.safetensors"))
    files = [sorted(load_file(path, device=device).items()) for path in paths]
    return [tensor for file in files for _, tensor in file]


async def _from_disk(admin: Any, folder: Path, device: torch.device) -> None:
    medium_s, num_bytes = _medium_s(folder, device)
    disk = pb.UpdateWeightsRequest.Disk(model_path=str(folder))
    begin_s = time.perf_counter()
    answer = await admin.UpdateWeights(pb.UpdateWeightsRequest(disk=disk))
    pause_s = answer.update.pause_duration.ToNanoseconds() / 1e9
    _row("update from disk", time.perf_counter() - begin_s, pause_s, medium_s, num_bytes)


async def _learning(
    served: Target, load: Load, target: Path, head: Path, device: str, share: float
) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    with tempfile.TemporaryDirectory() as out:
        learner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.draft.learner", "--target", served.address),
            *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head)),
            *("--target-model-path", str(target), "--out", out, "--metrics-port", str(port)),
            *("--device", device, "--busy-share", str(share), "--lesson-updates", "1000000"),
            *("--lesson-tokens", str(_LESSON_TOKENS)),
        )
        try:
            await _until(learner, port, "attached_target_count")
            for _ in range(_NUM_WARM_UPDATES):  # the first ones compile, and count as its time
                before_s = await _figure(port, "busy_seconds_total")
                await _until(learner, port, "busy_seconds_total", above=before_s)
            calm, learning, busy = await _alternated(load, learner, port)
        finally:
            with contextlib.suppress(ProcessLookupError):
                learner.kill()
            await learner.wait()
    changes = [after / before - 1 for before, after in zip(calm, learning, strict=True)]
    error = statistics.stdev(changes) / len(changes) ** 0.5
    print(
        f"learner on {device}: {statistics.mean(calm):.0f} tokens/s while it is stopped, "
        f"{statistics.mean(learning):.0f} while it trains for {busy:.1%} of the time: "
        f"{statistics.mean(changes):+.1%} ± {error:.1%}; "
        f"{sum(len(each) > 1 for each in load.answers.values())} of {len(load.answers)} requests "
        f"had more than one answer",
        flush=True,
    )


async def _alternated(
    load: Load, learner: asyncio.subprocess.Process, port: int
) -> tuple[list[float], list[float], float]:
    """Returns tokens a second while the learner is stopped and while it trains, in turns, and the
    share of the latter time that it was busy."""
    calm, learning, busy_s = list[float](), list[float](), 0.0
    for _ in range(_NUM_TURNS):
        learner.send_signal(signal.SIGSTOP)
        await asyncio.sleep(1.0)  # what is queued on its GPU ends
        calm.append(await load.rate(_WINDOW_S))
        learner.send_signal(signal.SIGCONT)
        await asyncio.sleep(1.0)
        before_s = await _figure(port, "busy_seconds_total")
        learning.append(await load.rate(_WINDOW_S))
        busy_s += await _figure(port, "busy_seconds_total") - before_s
    return calm, learning, busy_s / (_NUM_TURNS * _WINDOW_S)


async def _until(
    learner: asyncio.subprocess.Process, port: int, name: str, above: float = 0.0
) -> None:
    """Waits until a metric has risen above a value, or fails with the learner."""
    while await _figure(port, name) <= above:
        if learner.returncode is not None:
            raise SystemExit(f"the learner ended with {learner.returncode}")
        await asyncio.sleep(0.2)


async def _figure(port: int, name: str) -> float:
    """Returns a metric of the learner; 0 until it serves any."""

    def read() -> str:
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{port}/metrics"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        return ""

    lines = (await asyncio.to_thread(read)).splitlines()
    found = [line.split()[-1] for line in lines if line.startswith(f"outrider_learner_{name} ")]
    return float(found[0]) if found else 0.0


def _announced(folder: Path) -> tuple[pb.UpdateWeightsRequest.Distributed, int]:
    """Returns what the sender sends, in its order, and how many bytes."""
    sent, num_bytes = pb.UpdateWeightsRequest.Distributed(group_name=_GROUP), 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name in sorted(header.keys() - {"__metadata__"}):
            told = header[name]
            sent.tensors.add(name=name, dtype=_DTYPES[told["dtype"]], shape=told["shape"])
            num_bytes += told["data_offsets"][1] - told["data_offsets"][0]
    return sent, num_bytes


async def _from_nccl(admin: Any, folder: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    sender = multiprocessing.get_context("spawn").Process(target=_send, args=(port, folder))
    sender.start()
    try:
        await admin.InitWeightUpdateGroup(
            pb.InitWeightUpdateGroupRequest(
                master_address="127.0.0.1", master_port=port, rank_offset=1, world_size=2,
                group_name=_GROUP, backend="nccl",
            )
        )  # fmt: skip
        for _ in range(_NUM_UPDATES):
            await _distributed(admin, folder, "update from NCCL")
    finally:
        sender.join(20)
        sender.kill()


async def _from_memory(admin: Any, folder: Path, device: torch.device) -> None:
    """What a group would write is copied within the device's memory instead."""
    tensors = await asyncio.to_thread(_loaded, folder, str(device))
    waiting = list[torch.Tensor]()

    def broadcast(place: torch.Tensor, src: int, group: object) -> None:
        place.copy_(waiting.pop(0))

    with (
        mock.patch.object(WeightStager, "_group", lambda stager, name: name),
        mock.patch.object(dist, "broadcast", broadcast),
    ):
        for _ in range(_NUM_UPDATES):
            waiting += tensors
            await _distributed(admin, folder, "update within the device")
    del tensors
    torch.cuda.empty_cache()


async def _distributed(admin: Any, folder: Path, what: str) -> None:
    sent, num_bytes = _announced(folder)
    begin_s = time.perf_counter()
    answer = await admin.UpdateWeights(pb.UpdateWeightsRequest(distributed=sent))
    whole_s = time.perf_counter() - begin_s
    pause_s = answer.update.pause_duration.ToNanoseconds() / 1e9
    print(
        f"{what:28s} {whole_s:8.3f} s whole {pause_s:8.3f} s without steps, "
        f"{num_bytes / 1e9:.2f} GB",
        flush=True,
    )


async def _swaps(admin: Any, load: Load, head: Path) -> None:
    """Swaps the head's own weights in, again and again; as long again without."""
    begin_s, pauses_s, begun_s = time.perf_counter(), list[float](), list[float]()
    for number in range(_NUM_SWAPS):
        request = pb.UpdateDraftWeightsRequest(model_path=str(head), weight_version=str(number))
        begun_s.append(time.perf_counter())
        answer = await admin.UpdateDraftWeights(request)
        pauses_s.append(answer.pause_duration.ToNanoseconds() / 1e9)
    end_s = time.perf_counter()
    await asyncio.sleep(end_s - begin_s)
    gaps = load.gaps_s(begin_s, end_s)
    calm = load.gaps_s(end_s, time.perf_counter())
    round_s = statistics.median(calm)
    first = load.gaps_s(begun_s[0], begun_s[1])
    print(
        f"{_NUM_SWAPS} swaps of the draft within {end_s - begin_s:.1f} s: rounds waited "
        f"{max(pauses_s) * 1e3:.2f} ms at most; a token {max(gaps) / round_s:.2f} rounds at most "
        f"({max(first) / round_s:.2f} at the first), {max(calm) / round_s:.2f} without; a round "
        f"{round_s * 1e3:.2f} ms",
        flush=True,
    )


async def _measure(
    target: Path, head: Path | None, flags: Sequence[str], count: int, parts: Sequence[str]
) -> None:
    words = ["--model-path", str(target), "--port", "0", *flags]
    if head is not None:
        words += [
            *("--draft", "embedded", "--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", str(head)),
        ]
    async with running_target(words) as served:
        admin, load = served.admin, Load(served.stub)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        running = [asyncio.create_task(load.run(number)) for number in range(count)]
        try:
            await asyncio.sleep(2.0)
            if head is not None and "swaps" in parts:
                await _swaps(admin, load, head)
            for _ in range(_NUM_UPDATES if "disk" in parts else 0):
                await _from_disk(admin, target, device)
            if "group" in parts and torch.cuda.device_count() > 1:
                await _from_nccl(admin, target)
            elif "group" in parts:
                await _from_memory(admin, target, device)
            if head is not None and "learner" in parts:
                await _learning(served, load, target, head, str(device), _BUSY_SHARE)
                if torch.cuda.device_count() > 1:
                    await _learning(served, load, target, head, "cuda:1", 1.0)
            assert not any(each.done() for each in running), "a request was lost"
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.HelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--head", type=Path, help="of EAGLE3, embedded")
    parser.add_argument("--requests", type=int, default=8, help="that run at once")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS[:-1])
    arguments, flags = parser.parse_known_args()
    tune_torch()
    tune_interpreter()
    asyncio.run(
        _measure(
            arguments.target,
            arguments.head,
            flags,
            arguments.requests,
            arguments.parts,
        )
    )


if __name__ == "__main__":
    main()
