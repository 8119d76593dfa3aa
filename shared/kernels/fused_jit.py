"""Triton kernels of the small steps between products: norms, rotation, activation.

Each row is computed by programs of its own, so its bits do not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(  # type: ignore[no-untyped-def]
    hidden, update, weight, sums, normed, num_columns, hidden_stride, eps,
    HAS_UPDATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes `hidden + update` and its norm; one program a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    values = tl.load(hidden + row * hidden_stride + columns, mask=is_column, other=0.0)
    if HAS_UPDATE:
        # Rounded as a sum in the tensors' own dtype is.
        more = tl.load(update + row * num_columns + columns, mask=is_column, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(sums + row * num_columns + columns, values, mask=is_column)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / num_columns + eps)
    weights = tl.load(weight + columns, mask=is_column, other=0.0)
    result = (wide * scale).to(values.dtype).to(tl.float32) * weights.to(tl.float32)
    tl.store(normed + row * num_columns + columns, result.to(values.dtype), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_store(  # type: ignore[no-untyped-def]
    heads, norm_weight, cos, signed_sin, slots, queries, keys, values,
    head_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates some heads of one row; keys and values go to the row's slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    partners = (dims + HEAD_DIM // 2) % HEAD_DIM
    is_element = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = heads + row * head_stride + head[:, None] * HEAD_DIM
    plain = tl.load(source + dims[None, :], mask=is_element, other=0.0)
    swapped = tl.load(source + partners[None, :], mask=is_rotated, other=0.0)
    straight = plain.to(tl.float32)
    crossed = swapped.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(straight * straight, 1) / HEAD_DIM + eps)[:, None]
        weights = norm_weight + head[:, None] * HEAD_DIM
        straight_weights = tl.load(weights + dims[None, :], mask=is_rotated, other=0.0)
        crossed_weights = tl.load(weights + partners[None, :], mask=is_rotated, other=0.0)
        straight = (straight * scale).to(plain.dtype).to(tl.float32)
        straight = (straight * straight_weights.to(tl.float32)).to(plain.dtype).to(tl.float32)
        crossed = (crossed * scale).to(plain.dtype).to(tl.float32)
        crossed = (crossed * crossed_weights.to(tl.float32)).to(plain.dtype).to(tl.float32)
    table = row * HEAD_DIM + dims
    row_cos = tl.load(cos + table, mask=dims < HEAD_DIM, other=0.0)[None, :]
    row_sin = tl.load(signed_sin + table, mask=dims < HEAD_DIM, other=0.0)[None, :]
    rotated = (straight * row_cos + crossed * row_sin).to(plain.dtype)
    is_query = is_rotated & (head < NUM_HEADS)[:, None]
    target = (row * NUM_HEADS + head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(queries + target, rotated, mask=is_query)
    slot = tl.load(slots + row)
    key_head = head - NUM_HEADS
    target = (slot * NUM_KV_HEADS + key_head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(keys + target, rotated, mask=is_rotated & (key_head >= 0)[:, None])
    value_head = key_head - NUM_KV_HEADS
    target = (slot * NUM_KV_HEADS + value_head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(values + target, plain, mask=is_element & (value_head >= 0)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def silu_product(gate_up, result, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes `silu(gate) * up` of some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    source = gate_up + row * 2 * num_columns + columns
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + num_columns, mask=is_column, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded in between, as two steps in the tensors' own dtype are.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    product = (activated * up.to(tl.float32)).to(gate.dtype)
    tl.store(result + row * num_columns + columns, product, mask=is_column)
