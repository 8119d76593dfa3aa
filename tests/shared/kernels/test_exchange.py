"""Sums over processes are those of float32 rounded once, in the order of ranks.

The kernel runs in Triton's interpreter, a process a rank; their memory is files that all map.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.exchange import PeerAddresses, exchanged_sum, plain_sum
from shared.kernels.kernel_settings import IS_INTERPRETING

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_PROGRAMS, MOST_PROGRAMS, NUM_SUMS = 2, 3, 3
LIMIT_S = 120.0


def drawn_parts(size: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns `[size, numel]`, elements of very different sizes."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-8, 8, (size, numel), generator=generator).float()
    return (torch.randn(size, numel, generator=generator) * torch.exp2(exponents)).to(dtype)


def exact_sum(parts: Tensor) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_gathered_parts_are_rounded_once(size: int, dtype: torch.dtype) -> None:
    parts = drawn_parts(size, 999, dtype)
    total = plain_sum(parts)
    assert total.dtype is dtype
    assert torch.equal(total, exact_sum(parts))


def test_rounding_after_each_addition_is_something_else() -> None:
    parts = drawn_parts(4, 999, torch.bfloat16)
    rounded = parts[0]
    for part in parts[1:]:
        rounded = rounded + part
    assert not torch.equal(plain_sum(parts), rounded)


def mapped(path: Path, numel: int, dtype: torch.dtype) -> Tensor:
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)


def add(folder: Path, rank: int, size: int, dtype: torch.dtype, numel: int) -> None:
    """One rank: adds its part several times, each time with what the last sum left."""
    flag_count = MOST_PROGRAMS * size
    buffers = [mapped(folder / f"buffer-{other}", numel, dtype) for other in range(size)]
    flags = [mapped(folder / f"flags-{other}", flag_count, torch.int32) for other in range(size)]
    peers = PeerAddresses(
        rank,
        torch.tensor([each.data_ptr() for each in buffers]),
        torch.tensor([each.data_ptr() for each in flags]),
        max_programs=MOST_PROGRAMS,
    )
    own = drawn_parts(size, numel, dtype)[rank]
    sums = []
    for _ in range(NUM_SUMS):
        sums.append(exchanged_sum(own, peers))
        own = own + sums[-1]
    assert not flags[rank].any()
    torch.save(torch.stack(sums), folder / f"sums-{rank}")


@pytest.mark.interpreter
@pytest.mark.skipif(not IS_INTERPRETING, reason="GPUs have `python -m tests.bench.exchange`")
@pytest.mark.parametrize(
    ("size", "dtype", "numel"),
    [
        (2, torch.float32, 64),
        (2, torch.float16, NUM_PROGRAMS * 4096 - 7),
        (3, torch.float16, 1001),
        (4, torch.float16, MOST_PROGRAMS * 4096 + 1),
    ],
)
def test_the_kernel_adds_in_the_order_of_ranks(
    size: int, dtype: torch.dtype, numel: int, tmp_path: Path
) -> None:
    for rank in range(size):
        mapped(tmp_path / f"buffer-{rank}", numel, dtype).zero_()
        mapped(tmp_path / f"flags-{rank}", MOST_PROGRAMS * size, torch.int32).zero_()
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=add, args=(tmp_path, rank, size, dtype, numel))
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * size
    parts, expected = drawn_parts(size, numel, dtype), []
    for _ in range(NUM_SUMS):
        expected.append(exact_sum(parts))
        parts = parts + expected[-1]
    for rank in range(size):
        assert torch.equal(torch.load(tmp_path / f"sums-{rank}"), torch.stack(expected))
