"""Kernels that are compiled before they are launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.runtime.kernel_compiler import compile_kernels

triton = pytest.importorskip("triton")
tl = triton.language

pytestmark = pytest.mark.gpu

BLOCK = 16


@triton.jit
def _add(values, amount: tl.constexpr, size: tl.constexpr):  # type: ignore[no-untyped-def]
    offsets = tl.arange(0, size)
    tl.store(values + offsets, tl.load(values + offsets) + amount)


class Work:
    """Pieces that each add another number, which is part of the kernel.

    Attributes:
        num_taken: pieces taken so far.
    """

    def __init__(self, values: Tensor) -> None:
        self.num_taken = 0
        self._values = values

    def pieces(self, amounts: range) -> Iterator[Callable[[], object]]:
        for amount in amounts:
            self.num_taken += 1
            yield partial(_add[(1,)], self._values, amount, BLOCK)


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    _add.device_caches.clear()
    return torch.zeros(BLOCK, dtype=torch.int32, device="cuda")


def test_kernels_are_compiled_without_being_run(
    values: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(values)
    compile_kernels(work.pieces(range(3)), values.device)
    assert work.num_taken == 3
    assert not values.any()
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name)
    )
    for piece in work.pieces(range(1, 3)):
        piece()
    assert compiled == []
    assert values.tolist() == BLOCK * [3]
    _add[(1,)](values, 5, BLOCK)  # the listener works
    assert compiled == ["_add"]


def test_a_second_start_ends_after_the_first_piece(values: Tensor) -> None:
    compile_kernels(Work(values).pieces(range(3)), values.device)
    _add.device_caches.clear()
    again = Work(values)
    compile_kernels(again.pieces(range(3)), values.device)
    assert again.num_taken == 1


def test_work_that_cannot_be_captured_is_left(
    values: Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    def read() -> None:
        _add[(1,)](values, 7, BLOCK)
        values.tolist()

    compile_kernels([read, read], values.device)
    assert "one after the other" in caplog.text
    _add[(1,)](values, 7, BLOCK)
    assert values.tolist() == BLOCK * [7]
