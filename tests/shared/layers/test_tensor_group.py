"""What a tensor group adds, through which way, and that it never waits for ever to close."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shared.kernels.exchange import PeerSlots, plain_sum
from shared.kernels.pointwise import add_rms_norm
from shared.layers import tensor_group
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.tensor_group import Part, Stage, TensorGroup, ends_within, peer_access_problem

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_parts_are_joined_side_by_side(rows: int, dtype: torch.dtype) -> None:
    parts = _parts(3, dtype)[:, :rows]
    joined = _group(parts).joined(parts[0], torch.float32)
    assert joined.dtype is torch.float32
    assert torch.equal(joined, torch.cat([*parts.float()], dim=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_takes_the_sum_of_parts(dtype: torch.dtype) -> None:
    parts = _parts(3, dtype)
    hidden, weight = parts[1], parts[2, 0]
    group, norm = _group(parts), RmsNorm(weight, 1e-5)
    total = plain_sum(parts)
    part = Part(parts[0], group)
    for found, expected in (
        (norm.add(hidden, part), norm.add(hidden, total)),
        (norm.add(part, None), norm.add(total, None)),
    ):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("has_hidden", [True, False])
def test_a_group_adds_and_normalises_few_rows_in_one_kernel(
    has_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, fused = _parts(2, torch.float32), []
    nowhere, turns = torch.zeros(2, dtype=torch.int64), torch.zeros(8, dtype=torch.int32)
    own_slots = PeerSlots(0, torch.empty(0), nowhere, turns, slot_bytes=1024, max_programs=1)
    weight, hidden = parts[1, 0], parts[1] if has_hidden else None

    def kernel(
        part: Tensor, hidden: Tensor | None, weight: Tensor, eps: float, slots: PeerSlots
    ) -> tuple[Tensor, Tensor]:
        assert slots is own_slots
        fused.append(len(part))
        total = plain_sum(parts[:, : len(part)])
        pair = (total, None) if hidden is None else (hidden, total)
        return add_rms_norm(*pair, weight, eps)

    monkeypatch.setattr(tensor_group, "exchanged_norm", kernel)
    group = replace(_group(parts), slots=own_slots)
    exact = _group(parts).add_norm(parts[0], hidden, weight, 1e-5)
    for rows in (8, 33):
        few = None if hidden is None else hidden[:rows]
        found = group.add_norm(parts[0, :rows], few, weight, 1e-5)
        assert torch.equal(found[0], exact[0][:rows])
        assert torch.equal(found[1], exact[1][:rows])
    assert fused == [8]


def test_only_a_product_without_a_bias_leaves_its_sum_to_the_norm() -> None:
    parts = _parts(2, torch.float32)
    weight, inputs, group = torch.eye(64), parts[0], _group(parts)
    part = Linear.of(weight, group=group).part(inputs)
    assert isinstance(part, Part)
    assert torch.equal(part.values, inputs)
    biased = Linear.of(weight, torch.ones(64), group=group)
    assert torch.equal(biased.part(inputs), plain_sum(parts) + 1.0)
    whole = Linear.of(weight)
    assert torch.equal(whole.part(inputs), inputs)


def test_devices_that_cannot_share_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    assert peer_access_problem(CPU, [0, 0]) == "cpu is no GPU"
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer != 3)
    assert peer_access_problem(gpu, [0, 1, 2]) is None
    assert peer_access_problem(gpu, [0, 1, 2, 3]) == "cuda:1 cannot read the memory of cuda:3"


@pytest.mark.parametrize(
    ("stage", "num_hosts", "reason"),
    [
        (Stage(0, 2), 1, "the model has 2 stages"),
        (None, 2, "the GPUs are those of 2 hosts"),
    ],
)
def test_who_cannot_share_memory_says_why(
    stage: Stage | None, num_hosts: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def gather(gathered: Tensor, part: Tensor) -> None:
        gathered.copy_(part.repeat(2))

    group = TensorGroup(0, 2, gather, stage=stage)
    assert tensor_group._slots(group, CPU, num_hosts) is None
    assert f"go through NCCL, which is slower: {reason}" in caplog.text


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
