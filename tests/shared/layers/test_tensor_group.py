"""What a tensor group adds, through which way, and that it never waits for ever to close."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.layers.peer_memory import MAX_BYTES, PeerMemory, message_dtype, problem_with
from shared.layers.tensor_group import TensorGroup, ends_within

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _parts(size: int, dtype: torch.dtype) -> Tensor:
    """Returns `[size, 33, 64]`, elements of very different sizes."""
    generator = torch.Generator().manual_seed(size)
    shape = (size, 33, 64)
    exponents = torch.randint(-8, 8, shape, generator=generator).float()
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents)).to(dtype)


def _group(parts: Tensor) -> TensorGroup:
    """Returns a group of which all processes send the first of their `parts` `[N, T, H]`."""

    def gather(gathered: Tensor, part: Tensor) -> None:
        rows = part.numel() // parts.shape[2]
        gathered.copy_(parts[:, :rows].reshape(-1))

    return TensorGroup(0, len(parts), gather)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sum_is_that_of_float32_rounded_once_for_every_number_of_rows(
    size: int, dtype: torch.dtype
) -> None:
    parts = _parts(size, dtype)
    exact = parts[0].float()
    for part in parts[1:]:
        exact = exact + part.float()
    for rows in (1, 2, 7, 33):
        total = _group(parts).sum(parts[0, :rows])
        assert total.dtype is dtype
        assert torch.equal(total, exact.to(dtype)[:rows])


def test_rounding_after_each_addition_is_something_else() -> None:
    parts = _parts(4, torch.bfloat16)
    rounded = parts[0]
    for part in parts[1:]:
        rounded = rounded + part
    assert not torch.equal(_group(parts).sum(parts[0]), rounded)


def _peers(size: int, size_bytes: int = MAX_BYTES) -> PeerMemory:
    return PeerMemory(torch.empty(size_bytes, dtype=torch.uint8), size, "0")


def test_messages_travel_in_what_rounds_once() -> None:
    assert message_dtype(torch.bfloat16, 2) is torch.bfloat16
    assert message_dtype(torch.bfloat16, 4) is torch.float32
    assert message_dtype(torch.float16, 2) is torch.float32
    assert message_dtype(torch.float32, 2) is torch.float32


@pytest.mark.parametrize(
    ("size", "shape", "fits"),
    [
        (2, (1, 4096), True),
        (2, (512, 4096), True),
        (2, (513, 4096), False),
        (4, (256, 4096), True),
        (4, (257, 4096), False),  # twice as long in float32
        (2, (0, 4096), False),
        (2, (1, 12), False),  # 24 bytes are no whole vectors
    ],
)
def test_what_fits_follows_from_the_shape(size: int, shape: tuple[int, int], fits: bool) -> None:
    assert _peers(size).fits(torch.empty(shape, dtype=torch.bfloat16)) is fits


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.bfloat16, 2), (torch.bfloat16, 4), (torch.float16, 2)]
)
def test_a_group_adds_in_shared_memory_what_fits(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = _parts(size, dtype)
    group = replace(_group(parts), peers=_peers(size, size_bytes=8 * 64 * 4))
    shared: list[int] = []

    def kernel(message: Tensor, operation: str, group_name: str) -> Tensor:
        """Adds like torch's: in the order of ranks, rounding after each addition."""
        assert (operation, group_name) == ("sum", "0")
        shared.append(len(message))
        total = message.clone()
        for other in parts[1:, : len(message)]:
            total += other
        return total

    monkeypatch.setattr(torch.ops.symm_mem, "one_shot_all_reduce", kernel, raising=False)
    exact = _group(parts).sum(parts[0])
    assert torch.equal(group.sum(parts[0, :8]), exact[:8])
    assert torch.equal(group.sum(parts[0]), exact)
    assert shared == [8]


def test_devices_that_cannot_share_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert problem_with(CPU, [0, 0]) == "cpu is no GPU"
    assert problem_with(gpu, [0, 1, 2]) == "3 processes are none of 2, 4, 8"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert problem_with(gpu, [0, 1]) is None
    assert problem_with(gpu, [0, 1, 2, 3]) == "cuda:1 cannot read the memory of cuda:3"


class _Graph:
    is_reset = False

    def reset(self) -> None:
        self.is_reset = True


def test_closing_ends_the_graphs_that_hold_collectives() -> None:
    graph = _Graph()
    group = _group(_parts(2, torch.float32))
    group.graphs.append(graph)  # type: ignore[arg-type]
    group.close()
    assert graph.is_reset
    assert not group.graphs


def test_what_never_ends_is_left_to_itself() -> None:
    release = threading.Event()
    try:
        assert not ends_within(0.0, release.wait)
    finally:
        release.set()
    assert ends_within(60.0, release.wait)
