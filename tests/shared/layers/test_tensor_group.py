"""What a tensor group adds, through which way, and that it never waits for ever to close."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels.exchange import PeerAddresses, plain_sum
from shared.layers import peer_memory
from shared.layers.peer_memory import MAX_BYTES, PeerMemory, problem_with
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


def _addresses(size: int) -> PeerAddresses:
    nowhere = torch.zeros(size, dtype=torch.int64)
    return PeerAddresses(0, nowhere, nowhere, max_programs=1)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((1, 4096), torch.bfloat16, True),
        ((512, 4096), torch.bfloat16, True),
        ((513, 4096), torch.bfloat16, False),
        ((256, 4096), torch.float32, True),
        ((257, 4096), torch.float32, False),
        ((0, 4096), torch.bfloat16, False),
        ((1, 3), torch.float16, True),
    ],
)
def test_what_fits_follows_from_the_shape(
    size: int, shape: tuple[int, int], dtype: torch.dtype, fits: bool
) -> None:
    peers = PeerMemory(torch.empty(MAX_BYTES, dtype=torch.uint8), _addresses(size))
    assert peers.fits(torch.empty(shape, dtype=dtype)) is fits


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_adds_in_shared_memory_what_fits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, addresses, shared = _parts(3, dtype), _addresses(3), []

    def kernel(part: Tensor, peers: PeerAddresses) -> Tensor:
        assert peers is addresses
        shared.append(len(part))
        return plain_sum(parts[:, : len(part)])

    monkeypatch.setattr(peer_memory, "exchanged_sum", kernel)
    buffer = torch.empty(8 * 64 * dtype.itemsize, dtype=torch.uint8)
    group = replace(_group(parts), peers=PeerMemory(buffer, addresses))
    exact = _group(parts).sum(parts[0])
    assert torch.equal(group.sum(parts[0, :8]), exact[:8])
    assert torch.equal(group.sum(parts[0]), exact)
    assert shared == [8]


def test_devices_that_cannot_share_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert problem_with(CPU, [0, 0]) == "cpu is no GPU"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert problem_with(gpu, [0, 1, 2]) is None
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
