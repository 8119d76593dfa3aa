"""`python -m tests.bench.exchange`: one sum over two GPUs, checked bit by bit and timed.

Two processes, one a GPU, add bfloat16 rows of 4,096 through each way that a `TensorGroup` has:
NCCL, which takes any size, and the memory that GPUs share. Every sum must equal the float32 sum
rounded once, for each number of rows, so that no row's bits depend on the rows beside it; inside
replayed CUDA graphs too, where a chain of sums shows a part that was read too early. Times are
microseconds of one sum inside a graph of 64. At the end the processes leave as a target and its
follower do.

Needs two GPUs that can read each other's memory. Ends with 1 if a sum is wrong, and after 60 s.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.target.tensor_parallel import end_processes
from shared.layers.tensor_group import TensorGroup, open_group
from shared.runtime.capture import capturing
from tests.bench.device_clock import device_ms

NCCL = "NCCL"
SIZE = 2
HIDDEN = 4096
ROWS = (*range(1, 65), 300)
TIMED_ROWS = (1, 8, 64, 300, 2048)
LARGEST_SHARED = 300
CHAIN = 64
_LIMIT_S = 60.0
_HOST = "127.0.0.1"


def parts(seed: int, device: torch.device) -> list[Tensor]:
    """Returns the part of every rank, `[300, 4096]` bfloat16 of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    shape = (max(ROWS), HIDDEN)
    drawn = []
    for _ in range(SIZE):
        sizes = torch.exp2(torch.randint(-12, 12, shape, generator=generator).float())
        drawn.append((torch.randn(shape, generator=generator) * sizes).bfloat16().to(device))
    return drawn


def expected(all_parts: list[Tensor]) -> Tensor:
    """Returns the sum in the order of ranks in float32, rounded once."""
    total = all_parts[0].float()
    for part in all_parts[1:]:
        total = total + part.float()
    return total.bfloat16()


def chained(way: TensorGroup, rows: Tensor) -> Tensor:
    """Returns the sum after `CHAIN` sums of sums: each after the first doubles every element."""
    for _ in range(CHAIN):
        rows = way.sum(rows)
    return rows


def captured(work: Callable[[], Tensor], way: TensorGroup) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Returns a graph of `work`, which is noted in `way`, and where its result lies."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    way.graphs.append(graph)
    with capturing(graph, torch.cuda.graph_pool_handle()):
        result = work()
    return graph, result


def wrong_sums(way: TensorGroup, device: torch.device) -> Iterator[str]:
    """Yields what differs from the float32 sums."""
    all_parts = parts(1, device)
    reference, own = expected(all_parts), all_parts[way.rank]
    for count in ROWS:
        if not torch.equal(way.sum(own[:count]), reference[:count]):
            yield f"{count} rows"
    for count in (1, 2, 7, 64, 300):
        static = own[:count].clone()
        graph, total = captured(lambda rows=static: way.sum(rows), way)
        for seed in (2, 3, 4):
            drawn = parts(seed, device)
            static.copy_(drawn[way.rank][:count])
            graph.replay()
            if not torch.equal(total, expected(drawn)[:count]):
                yield f"{count} rows in a graph, seed {seed}"
        graph, total = captured(lambda rows=static: chained(way, rows), way)
        doubled = expected(drawn)[:count] * 2.0 ** (CHAIN - 1)
        for replay in range(20):
            graph.replay()
            if not torch.equal(total, doubled):
                yield f"{count} rows in a chain of {CHAIN}, replay {replay}"


def time_us(way: TensorGroup, count: int, device: torch.device) -> float:
    """Returns the time of one sum of `count` rows inside a graph."""
    rows = torch.zeros(count, HIDDEN, dtype=torch.bfloat16, device=device)
    graph, _ = captured(lambda: chained(way, rows), way)
    return device_ms(graph.replay) * 1e3 / CHAIN


def report(name: str, way: TensorGroup, device: torch.device) -> bool:
    """Checks and times one way; rank 0 prints. Returns whether all sums are right."""
    counts = [count for count in TIMED_ROWS if count <= LARGEST_SHARED or name == NCCL]
    with torch.inference_mode():
        wrong = list(wrong_sums(way, device))
        times = [f"{count} rows {time_us(way, count, device):.1f}" for count in counts]
    verdict = f"{len(wrong)} WRONG: {'; '.join(wrong[:8])}" if wrong else "all sums right"
    if way.rank == 0 or wrong:
        print(f"{name}, rank {way.rank}: {verdict}; us a sum: {', '.join(times)}", flush=True)
    return not wrong


def run_rank(rank: int, port: int) -> None:
    """One rank's process, which must not wait for the other when it fails."""
    logging.basicConfig(level=logging.INFO)
    try:
        is_right = check_rank(rank, port)
    except Exception:
        logging.exception("rank %s", rank)
        os._exit(1)
    sys.exit(0 if is_right else 1)


def check_rank(rank: int, port: int) -> bool:
    """Returns whether all sums of this rank are right."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore(_HOST, port, SIZE, is_master=False)
    group = open_group(store, rank=rank, size=SIZE, device=device)
    is_right = report(NCCL, replace(group, peers=None), device)
    is_right = group.peers is not None and report("shared memory", group, device) and is_right
    torch.cuda.synchronize()
    if rank:
        os._exit(0 if is_right else 1)  # as a follower ends
    start_s = time.monotonic()
    group.close()
    print(f"closing took {time.monotonic() - start_s:.2f} s", flush=True)
    return is_right


def main() -> int:
    if torch.cuda.device_count() < SIZE:
        sys.exit(f"needs {SIZE} GPUs; this host has {torch.cuda.device_count()}")
    # Nothing here uses NVLink multicast, and on some hosts it must not even be set up.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    context = multiprocessing.get_context("spawn")
    store = TCPStore(_HOST, 0, SIZE, is_master=True, wait_for_workers=False)
    start_s = time.monotonic()
    processes = [
        context.Process(target=run_rank, args=(rank, store.port), name=f"rank-{rank}")
        for rank in range(SIZE)
    ]
    for process in processes:
        process.start()
    end_processes(processes, _LIMIT_S)
    codes = [process.exitcode for process in processes]
    print(f"exit codes {codes} after {time.monotonic() - start_s:.1f} s")
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
