"""The one-pass CUDA kernels against their plain versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.activation import plain_silu_mul, silu_mul
from shared.kernels.norm import add_rms_norm, plain_rms_norm, rms_norm
from shared.kernels.rotary import rotation_tables
from shared.kernels.rotary_cache import plain_rotate_into_cache, rotate_into_cache

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half precision may round the other way where float32 sums differ in their last bits.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _close(found: Tensor, expected: Tensor) -> None:
    error = ROUNDING[found.dtype]
    torch.testing.assert_close(found, expected, atol=error, rtol=error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [32, 100, 4096])
def test_norm(num_columns: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(7, num_columns, device=CUDA).to(dtype)
    weight = torch.randn(num_columns, device=CUDA).to(dtype)
    expected = plain_rms_norm(hidden, weight, 1e-5)
    _close(rms_norm(hidden, weight, 1e-5), expected)
    total, normed = add_rms_norm(hidden, None, weight, 1e-5)
    assert torch.equal(total, hidden)
    _close(normed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 33])
def test_sum_and_norm(num_rows: int, dtype: torch.dtype) -> None:
    hidden, update = (torch.randn(num_rows, 768, device=CUDA).to(dtype) for _ in range(2))
    weight = torch.randn(768, device=CUDA).to(dtype)
    before = hidden.clone()
    total, normed = add_rms_norm(hidden, update, weight, 1e-6)
    assert torch.equal(total, hidden + update)
    assert torch.equal(hidden, before)
    _close(normed, plain_rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_a_row_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    hidden = torch.randn(64, 4096, device=CUDA).to(dtype)
    weight = torch.randn(4096, device=CUDA).to(dtype)
    together = rms_norm(hidden, weight, 1e-5)
    assert all(
        torch.equal(rms_norm(hidden[i : i + 1], weight, 1e-5)[0], together[i]) for i in range(64)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_columns", [48, 1024, 14336])
def test_activation(num_columns: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(5, 2 * num_columns, device=CUDA).to(dtype)
    _close(silu_mul(gate_up), plain_silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (6, 2, 80), (4, 4, 8), (7, 1, 256)]
)
def test_rotation_and_cache(
    num_heads: int, num_kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype
) -> None:
    num_rows, num_slots = 9, 40
    heads = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, device=CUDA).to(dtype)
    norm_shape = (num_heads + num_kv_heads, head_dim)
    weight = torch.randn(norm_shape, device=CUDA).to(dtype) if has_norm else None
    tables = rotation_tables(torch.rand(num_rows, head_dim // 2, device=CUDA) * 6, 1.0)
    slots = torch.randperm(num_slots, device=CUDA)[:num_rows]
    caches = [
        tuple(torch.full((num_slots, num_kv_heads, head_dim), 7.0, device=CUDA).to(dtype)
              for _ in range(2))
        for _ in range(2)
    ]  # fmt: skip
    found = rotate_into_cache(heads, weight, 1e-5, tables, caches[0], slots)
    expected = plain_rotate_into_cache(heads, weight, 1e-5, tables, caches[1], slots)
    _close(found, expected)
    _close(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
