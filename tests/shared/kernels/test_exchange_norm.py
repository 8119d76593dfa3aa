"""A sum over processes with residual and norm, in one kernel, has the bits of one after another.

The kernel runs in Triton's interpreter, a process a rank; their memory is files that all map.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kernels.exchange import PeerSlots, exchanged_norm, plain_sum
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.pointwise import Partials, add_rms_norm

MAX_ROWS, MAX_PROGRAMS, SLOT_BYTES, EPS = 5, 2, 256, 1e-5
# Rows of one sum after another: each row's slots are taken at sums of their own.
COUNTS = (3, 1, 5, 2, 1)
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Case:
    """Ranks that add rows of one width."""

    size: int
    dtype: torch.dtype
    columns: int

    def parts(self, step: int) -> Tensor:
        """Returns `[size, rows, columns]`, elements of very different sizes."""
        generator = torch.Generator().manual_seed(step)
        shape = (self.size, COUNTS[step], self.columns)
        exponents = torch.randint(-6, 4, shape, generator=generator).float()
        return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(self.dtype)

    def weight(self) -> Tensor:
        generator = torch.Generator().manual_seed(len(COUNTS))
        return torch.randn(self.columns, generator=generator).to(self.dtype)

    def expected(self) -> list[tuple[Tensor, Tensor]]:
        """Returns sums and norms of two kernels, every step; even steps have no residual."""
        found = []
        for step in range(len(COUNTS)):
            parts = self.parts(step)
            hidden, total = parts[0], plain_sum(parts)
            pair = (hidden, total) if step % 2 else (total, None)
            found.append(add_rms_norm(*pair, self.weight(), EPS))
        return found


def mapped(path: Path, numel: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=numel, dtype=torch.uint8)


def slots_of(folder: Path, rank: int, size: int) -> tuple[PeerSlots, list[Tensor]]:
    """Returns a rank's slots, and all ranks' memory, which must be held."""
    size_bytes = 2 * size * MAX_ROWS * SLOT_BYTES
    memory = [mapped(folder / f"slots-{other}", size_bytes) for other in range(size)]
    places = torch.tensor([each.data_ptr() for each in memory])
    turns = torch.zeros(MAX_ROWS, dtype=torch.int32)
    return PeerSlots(rank, memory[rank], places, turns, SLOT_BYTES, MAX_PROGRAMS), memory


def in_parts(part: Tensor) -> Partials:
    """Returns the same numbers as sums that float32 holds."""
    wide = part.float()
    return Partials(torch.stack((wide / 4, wide / 2, wide / 4)), part.dtype)


def add(folder: Path, rank: int, case: Case) -> None:
    """One rank: adds its part, step after step."""
    slots, _memory = slots_of(folder, rank, case.size)
    found = []
    for step in range(len(COUNTS)):
        parts = case.parts(step)
        hidden = parts[0] if step % 2 else None
        part = in_parts(parts[rank]) if step % 3 else parts[rank]
        found.append(exchanged_norm(part, hidden, case.weight(), EPS, slots))
    expected_turns = [sum(count > row for count in COUNTS) % 2 for row in range(MAX_ROWS)]
    assert slots.turns.tolist() == expected_turns
    torch.save(found, folder / f"found-{rank}")


def add_nan(folder: Path, rank: int, case: Case) -> None:
    """One rank, whose part is the NaN that stands for a number that has not come."""
    slots, _memory = slots_of(folder, rank, case.size)
    part = torch.full((1, case.columns), -1, dtype=torch.int16).view(torch.float16)
    sums, normed = exchanged_norm(part, None, case.weight(), EPS, slots)
    assert sums.isnan().all()
    assert normed.isnan().all()


def run_ranks(work: object, folder: Path, case: Case) -> None:
    """Runs `work` as every rank, and checks that all slots wait for numbers again."""
    size_bytes = 2 * case.size * MAX_ROWS * SLOT_BYTES
    memory = [mapped(folder / f"slots-{rank}", size_bytes) for rank in range(case.size)]
    for each in memory:
        each.fill_(255)
    # Torch is imported once for all of them, and they begin together: who waits here spins.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["shared.kernels.exchange", "shared.kernels.pointwise"])
    processes = [
        context.Process(target=work, args=(folder, rank, case))  # type: ignore[arg-type]
        for rank in range(case.size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
        process.kill()
    assert [process.exitcode for process in processes] == [0] * case.size
    assert all((each == 255).all() for each in memory)


on_interpreter = pytest.mark.skipif(
    not IS_INTERPRETING, reason="GPUs have tests/shared/layers/test_tensor_group_gpu.py"
)


@pytest.mark.interpreter
@on_interpreter
@pytest.mark.parametrize(
    "case",
    [
        Case(2, torch.float32, 64),
        Case(3, torch.float16, 100),
    ],
    ids=str,
)
def test_the_kernel_has_the_bits_of_two_kernels(case: Case, tmp_path: Path) -> None:
    run_ranks(add, tmp_path, case)
    expected = case.expected()
    for rank in range(case.size):
        found = torch.load(tmp_path / f"found-{rank}")
        for one, two in zip(found, expected, strict=True):
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1], two[1])


@pytest.mark.interpreter
@on_interpreter
def test_no_number_is_taken_for_one_that_has_not_come(tmp_path: Path) -> None:
    run_ranks(add_nan, tmp_path, Case(2, torch.float16, 64))


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((1, 128), torch.float16, True),
        ((5, 64), torch.float32, True),
        ((6, 64), torch.float32, False),
        ((0, 64), torch.float32, False),
        ((1, 129), torch.bfloat16, False),
        ((1, 65), torch.float32, False),
    ],
)
def test_what_fits_follows_from_the_shape(
    shape: tuple[int, int], dtype: torch.dtype, fits: bool
) -> None:
    nowhere = torch.zeros(2, dtype=torch.int64)
    turns = torch.zeros(MAX_ROWS, dtype=torch.int32)
    slots = PeerSlots(0, torch.empty(0), nowhere, turns, SLOT_BYTES, MAX_PROGRAMS)
    assert slots.fits(torch.empty(shape, dtype=dtype)) is fits
