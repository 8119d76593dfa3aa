"""`python -m tests.bench.exchange`: sums over two GPUs, checked bit by bit and timed.

Two processes, one a GPU, add bfloat16 rows of 4,096 through NCCL, which takes any size. Every sum
must equal the float32 sum rounded once, for each number of rows, so that no row's bits depend on
the rows beside it; inside replayed CUDA graphs too. Times are microseconds of one sum inside a
graph of 64.

Then the sum with the residual and norm after it, in one kernel over the memory that GPUs share, and
through NCCL: their bits must agree for each number of rows, in replayed graphs, and over 10,000
sums. Times are those of sum, residual and norm. At the end the processes leave as a target and its
follower do.

`--norms` leaves out the sums without one. Needs two GPUs that can read each other's memory. Ends
with 1 if a sum is wrong, and after 80 s.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from shared.layers.tensor_group import TensorGroup
from tests.bench.device_clock import device_ms
from tests.helpers.gpu_ranks import run_ranks
from tests.helpers.norm_sums import NormSums, Way, captured, wrong_norms
from tests.helpers.norm_sums import chained as chained_norms

SIZE = 2
HIDDEN = 4096
ROWS = (*range(1, 65), 300)
TIMED_ROWS = (1, 8, 64, 300, 2048)
CHAIN = 64
NORM_ROWS = (1, 8, 32, 64, 128, 300, 512)
_LIMIT_S = 80.0


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


def chained(group: TensorGroup, rows: Tensor) -> Tensor:
    """Returns the sum after `CHAIN` sums of sums: each after the first doubles every element."""
    for _ in range(CHAIN):
        rows = group.sum(rows)
    return rows


def wrong_sums(group: TensorGroup, device: torch.device) -> Iterator[str]:
    """Yields what differs from the float32 sums."""
    all_parts = parts(1, device)
    reference, own = expected(all_parts), all_parts[group.rank]
    for count in ROWS:
        if not torch.equal(group.sum(own[:count]), reference[:count]):
            yield f"{count} rows"
    for count in (1, 2, 7, 64, 300):
        static = own[:count].clone()
        graph, total = captured(lambda rows=static: group.sum(rows), group)
        for seed in (2, 3, 4):
            drawn = parts(seed, device)
            static.copy_(drawn[group.rank][:count])
            graph.replay()
            if not torch.equal(total, expected(drawn)[:count]):
                yield f"{count} rows in a graph, seed {seed}"
        graph, total = captured(lambda rows=static: chained(group, rows), group)
        doubled = expected(drawn)[:count] * 2.0 ** (CHAIN - 1)
        for replay in range(20):
            graph.replay()
            if not torch.equal(total, doubled):
                yield f"{count} rows in a chain of {CHAIN}, replay {replay}"


def time_us(group: TensorGroup, count: int, device: torch.device) -> float:
    """Returns the time of one sum of `count` rows inside a graph."""
    rows = torch.zeros(count, HIDDEN, dtype=torch.bfloat16, device=device)
    graph, _ = captured(lambda: chained(group, rows), group)
    return device_ms(graph.replay) * 1e3 / CHAIN


def sums_are_right(group: TensorGroup, device: torch.device) -> bool:
    """Checks and times sums without a norm; rank 0 prints. Returns whether all are right."""
    wrong = list(wrong_sums(group, device))
    times = [f"{count} rows {time_us(group, count, device):.1f}" for count in TIMED_ROWS]
    verdict = f"{len(wrong)} WRONG: {'; '.join(wrong[:8])}" if wrong else "all sums right"
    if group.rank == 0 or wrong:
        print(f"NCCL, rank {group.rank}: {verdict}; us a sum: {', '.join(times)}", flush=True)
    return not wrong


def norms_are_right(group: TensorGroup, device: torch.device) -> bool:
    """Checks and times sums with a norm after them; rank 0 prints. Returns whether all agree."""
    if group.slots is None:
        return False
    wrong = list(wrong_norms(group, device))
    verdict = f"{len(wrong)} DIFFER: {'; '.join(wrong[:8])}" if wrong else "all bits agree"
    sums = NormSums(group, device)
    if group.rank == 0 or wrong:
        print(f"sum, residual and norm, rank {group.rank}: {verdict}", flush=True)
    for name, way in zip(("one kernel", "NCCL"), sums.ways(), strict=True):
        times = [f"{count} rows {norm_time_us(sums, way, count):.2f}" for count in NORM_ROWS]
        if group.rank == 0:
            print(f"{name}: us a sum and norm: {', '.join(times)}", flush=True)
    return not wrong


def norm_time_us(sums: NormSums, way: Way, count: int) -> float:
    """Returns the time of one sum, residual and norm of `count` rows inside a graph."""
    part, hidden = sums.part(1, count), sums.drawn(1, count)
    graph, _ = captured(lambda: chained_norms(way, part, hidden, CHAIN), sums.group)
    return device_ms(graph.replay) * 1e3 / CHAIN


def all_are_right(group: TensorGroup, device: torch.device) -> bool:
    """Returns whether all sums of this rank are right, with norms and without."""
    is_right = sums_are_right(group, device)
    return norms_are_right(group, device) and is_right


def main() -> int:
    parser = argparse.ArgumentParser(description="Sums over two GPUs, checked and timed.")
    parser.add_argument("--norms", action="store_true", help="only sums with a norm after them")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < SIZE:
        sys.exit(f"needs {SIZE} GPUs; this host has {torch.cuda.device_count()}")
    start_s = time.monotonic()
    work = norms_are_right if arguments.norms else all_are_right
    codes = run_ranks(work, size=SIZE, limit_s=_LIMIT_S)
    print(f"exit codes {codes} after {time.monotonic() - start_s:.1f} s")
    return int(any(code != 0 for code in codes))


if __name__ == "__main__":
    sys.exit(main())
