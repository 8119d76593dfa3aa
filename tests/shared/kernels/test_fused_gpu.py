"""The one-pass CUDA kernels against their plain versions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shared.kernels.cache import CacheScales, rotate_into_cache
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kernels.pointwise import (
    Partials,
    add_rms_norm,
    join_inputs,
    own_embeddings,
    plain_rms_norm,
    position_tables,
    rms_norm,
    rotation_tables,
    silu_mul,
)
from tests.helpers.kernel_device import kernel_device

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
CUDA = kernel_device()
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


@pytest.mark.parametrize("is_plain", [False, True])
def test_a_float32_weight_is_multiplied_before_rounding(is_plain: bool) -> None:
    hidden = torch.randn(9, 6, 80, device=CUDA).to(torch.float16)
    weight = torch.randn(5, 80, device=CUDA)
    exact = torch.nn.functional.rms_norm(hidden[:, :5].double(), (80,), eps=1e-5) * weight
    tables = rotation_tables(torch.zeros(9, 40, device=CUDA), 1.0)
    cache = tuple(torch.zeros((9, 1, 80), dtype=hidden.dtype, device=CUDA) for _ in range(2))
    norm, rotate = (
        (plain_rms_norm, rotate_into_cache.plain) if is_plain else (rms_norm, rotate_into_cache)
    )
    heads = rotate(hidden, weight, 1e-5, tables, cache, torch.arange(9, device=CUDA))
    rows = norm(hidden[:, 0].contiguous(), weight[0], 1e-5)
    for found, expected in ((heads, exact[:, :4]), (cache[0], exact[:, 4:]), (rows, exact[:, 0])):
        is_nearest = found == expected.to(found.dtype)
        assert float(is_nearest.float().mean()) > 0.98


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


def test_sum_and_norm_of_named_rows() -> None:
    hidden, update = torch.randn(2, 9, 768, device=CUDA)
    weight, rows = torch.randn(768, device=CUDA), torch.tensor([8, 2, 2, 5], device=CUDA)
    whole = add_rms_norm(hidden, update, weight, 1e-6)
    named = add_rms_norm(hidden, update, weight, 1e-6, rows)
    assert all(torch.equal(a[rows], b) for a, b in zip(whole, named, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_sum_and_norm_of_an_update_in_parts(num_parts: int, dtype: torch.dtype) -> None:
    hidden = torch.randn(5, 768, device=CUDA).to(dtype)
    weight = torch.randn(768, device=CUDA).to(dtype)
    update = Partials(torch.randn(num_parts, 5, 768, device=CUDA), dtype)
    rows = torch.tensor([4, 1], device=CUDA)
    for wanted in (None, rows):
        found = add_rms_norm(hidden, update, weight, 1e-6, wanted)
        expected = add_rms_norm(hidden, update.total(), weight, 1e-6, wanted)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_embeddings_of_a_part_of_the_tokens(num_rows: int, dtype: torch.dtype) -> None:
    embedding = torch.randn(20, 96, device=CUDA).to(dtype)
    token_ids = torch.tensor([0, 19, 20, 39, 40, 59, 21, 20, 7], device=CUDA)[:num_rows]
    for first_token in (0, 20, 40):
        found = own_embeddings(token_ids, embedding, first_token)
        assert torch.equal(found, own_embeddings.plain(token_ids, embedding, first_token))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("has_rows", [False, True])
def test_inputs_of_a_head(has_rows: bool, has_norms: bool, dtype: torch.dtype) -> None:
    embedding, hidden = (torch.randn(20, 96, device=CUDA).to(dtype) for _ in range(2))
    weights = torch.randn(2, 96, device=CUDA).to(dtype)
    token_ids = torch.randint(20, (7,), device=CUDA)
    rows = torch.randint(20, (7,), device=CUDA) if has_rows else None
    hidden = hidden if has_rows else hidden[:7]
    norms = ((weights[0], 1e-5), (weights[1], 1e-3)) if has_norms else None
    for normed in (False, True):
        found = join_inputs(token_ids, embedding, hidden, rows, norms, normed_residual=normed)
        expected = join_inputs.plain(
            token_ids, embedding, hidden, rows, norms, normed_residual=normed
        )
        _close(found[0], expected[0])
        _close(found[1], expected[1])


@pytest.mark.parametrize("has_own_frequencies", [False, True])
def test_tables_of_positions(has_own_frequencies: bool) -> None:
    positions = torch.tensor([0, 1, 511, 8192, 131_071], device=CUDA)
    frequencies = 0.7 ** torch.arange(40, device=CUDA)
    if has_own_frequencies:
        frequencies = frequencies * torch.rand(5, 1, device=CUDA)
    found = position_tables(positions, frequencies, 1.2)
    expected = rotation_tables(positions.unsqueeze(1) * frequencies, 1.2)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


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
    _close(silu_mul(gate_up), silu_mul.plain(gate_up))


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
    expected = rotate_into_cache.plain(heads, weight, 1e-5, tables, caches[1], slots)
    _close(found, expected)
    _close(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_heads_in_parts(dtype: torch.dtype) -> None:
    heads = Partials(torch.randn(3, 5, 6 * 80, device=CUDA), dtype).view(5, 6, 80)
    tables = rotation_tables(torch.rand(5, 40, device=CUDA) * 6, 1.0)
    slots = torch.randperm(20, device=CUDA)[:5]
    results = []
    for each in (heads, heads.total()):
        cache = tuple(torch.zeros((20, 1, 80), dtype=dtype, device=CUDA) for _ in range(2))
        results.append((rotate_into_cache(each, None, 0.0, tables, cache, slots), *cache))
    assert results[0][0].shape == (5, 4, 80)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(IS_INTERPRETING, reason="Triton's interpreter rounds to e4m3 its own way")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_narrow_cache(dtype: torch.dtype) -> None:
    heads = torch.randn(9, 48, 128, device=CUDA).to(dtype)
    heads[0, 32:] *= 3000  # beyond what e4m3 holds
    tables = rotation_tables(torch.rand(9, 64, device=CUDA) * 6, 1.0)
    slots = torch.randperm(40, device=CUDA)[:9]
    caches = [
        tuple(torch.zeros((40, 8, 128), dtype=torch.float8_e4m3fn, device=CUDA) for _ in range(2))
        for _ in range(2)
    ]
    scales = CacheScales(*torch.exp2(torch.arange(16, device=CUDA) - 8.0).view(2, 8))
    found = rotate_into_cache(heads, None, 0.0, tables, caches[0], slots, scales)
    expected = rotate_into_cache.plain(heads, None, 0.0, tables, caches[1], slots, scales)
    _close(found, expected)
    assert torch.equal(caches[0][1].view(torch.uint8), caches[1][1].view(torch.uint8))
    # Rotated keys may fall to the other side of a tie.
    keys, same = (cache[0].float() for cache in caches)
    torch.testing.assert_close(keys, same, rtol=0.13, atol=0.01)
    assert float((keys != same).float().mean()) < 0.01
