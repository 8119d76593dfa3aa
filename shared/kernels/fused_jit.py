"""Triton kernels of the small steps between products: norms, rotation, activation.

No program computes two rows, so a row's bits do not depend on the batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.dependent_jit import begin, early

# Around this number, float32 has just the integers.
_INTEGERS: tl.constexpr = tl.constexpr(1.5 * 2**23)


@triton.jit  # type: ignore[untyped-decorator]
def before_weight(wide, dtype: tl.constexpr, weight_dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns normed float32 numbers, rounded to `dtype` unless the norm's weight is float32; see
    `shared.kernels.pointwise.rms_norm`."""
    return wide if weight_dtype == tl.float32 else wide.to(dtype).to(tl.float32)


@triton.jit
def normed_row(values, weights, num_columns, eps):  # type: ignore[no-untyped-def]
    """Returns the norm of a row, padded with zeros; see `shared.kernels.pointwise.rms_norm`."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / num_columns + eps)
    result = before_weight(wide * scale, values.dtype, weights.dtype) * weights.to(tl.float32)
    return result.to(values.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def summed(parts, places, mask, size, dtype, NUM_PARTS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns some elements of a tensor in `dtype`. The tensor may be given as NUM_PARTS parts of
    `size` elements, which are added; see `shared.kernels.pointwise.Partials`."""
    if NUM_PARTS == 1:
        return tl.load(parts + places, mask=mask, other=0.0).to(dtype)
    # Starts from zero, like every sum over segments of a product.
    total = 0.0 + tl.load(parts + places, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        total += tl.load(parts + part * size + places, mask=mask, other=0.0)
    return total.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm(  # type: ignore[no-untyped-def]
    hidden, update, weight, sums, normed, rows, num_columns, hidden_stride, part_size, eps,
    HAS_UPDATE: tl.constexpr, NUM_PARTS: tl.constexpr, HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes `hidden + update` and its norm, for one row, or for the one that `rows` names."""
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    weights = tl.load(weight + columns, mask=is_column, other=0.0)
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    source = row
    if HAS_ROWS:
        source = tl.load(rows + row)
    values = tl.load(hidden + source * hidden_stride + columns, mask=is_column, other=0.0)
    if HAS_UPDATE:
        # Rounded like a sum in the tensors' own dtype.
        places = source * num_columns + columns
        more = summed(update, places, is_column, part_size, values.dtype, NUM_PARTS)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(values.dtype)
        tl.store(sums + row * num_columns + columns, values, mask=is_column)
    result = normed_row(values, weights, num_columns, eps)
    tl.store(normed + row * num_columns + columns, result, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def rotate_store(  # type: ignore[no-untyped-def]
    heads, norm_weight, cos, signed_sin, slots, queries, keys, values,
    key_scales, value_scales, row_stride, part_size, eps,
    NUM_PARTS: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_SCALES: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates some heads of one row; writes keys and values to the row's slot."""
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_DIM)
    partners = (dims + HEAD_DIM // 2) % HEAD_DIM
    is_element = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    is_rotated = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    weights = norm_weight + head[:, None] * HEAD_DIM
    straight_weights = early(weights + dims[None, :], is_rotated, HAS_NORM)
    crossed_weights = early(weights + partners[None, :], is_rotated, HAS_NORM)
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    dtype = queries.dtype.element_ty
    places = row * row_stride + head[:, None] * HEAD_DIM
    plain = summed(heads, places + dims[None, :], is_element, part_size, dtype, NUM_PARTS)
    swapped = summed(heads, places + partners[None, :], is_rotated, part_size, dtype, NUM_PARTS)
    straight = plain.to(tl.float32)
    crossed = swapped.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(straight * straight, 1) / HEAD_DIM + eps)[:, None]
        weight_dtype: tl.constexpr = norm_weight.dtype.element_ty
        straight = before_weight(straight * scale, plain.dtype, weight_dtype)
        straight = (straight * straight_weights).to(plain.dtype).to(tl.float32)
        crossed = before_weight(crossed * scale, plain.dtype, weight_dtype)
        crossed = (crossed * crossed_weights).to(plain.dtype).to(tl.float32)
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
    is_key = is_rotated & (key_head >= 0)[:, None]
    value_head = key_head - NUM_KV_HEADS
    is_value = is_element & (value_head >= 0)[:, None]
    if HAS_SCALES:
        is_head = (key_head >= 0) & (value_head < 0)
        scale = tl.load(key_scales + key_head, mask=is_head, other=1.0)
        rotated = narrowed(rotated.to(tl.float32) / scale[:, None], keys)
        is_head = (value_head >= 0) & (value_head < NUM_KV_HEADS)
        scale = tl.load(value_scales + value_head, mask=is_head, other=1.0)
        plain = narrowed(plain.to(tl.float32) / scale[:, None], values)
    tl.store(keys + target, rotated.to(keys.dtype.element_ty), mask=is_key)
    target = (slot * NUM_KV_HEADS + value_head[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(values + target, plain.to(values.dtype.element_ty), mask=is_value)


@triton.jit
def narrowed(wide, cache):  # type: ignore[no-untyped-def]
    """Returns the e4m3 numbers that are nearest to float32 numbers."""
    return tl.minimum(tl.maximum(wide, -448.0), 448.0).to(cache.dtype.element_ty)


@triton.jit
def silu_times(gate, up):  # type: ignore[no-untyped-def]
    """Returns `silu(gate) * up`, rounded after each step, like two operations in the tensors' own
    dtype."""
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def silu_product(  # type: ignore[no-untyped-def]
    gate_up, result, num_columns, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr
):
    """Writes `silu(gate) * up` of some columns of one row."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < num_columns
    source = gate_up + row * 2 * num_columns + columns
    gate = tl.load(source, mask=is_column, other=0.0)
    up = tl.load(source + num_columns, mask=is_column, other=0.0)
    tl.store(result + row * num_columns + columns, silu_times(gate, up), mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def join_inputs(  # type: ignore[no-untyped-def]
    token_ids, embedding, hidden, rows, embedding_weight, hidden_weight, inputs, residual,
    num_columns, embedding_eps, hidden_eps,
    HAS_ROWS: tl.constexpr, HAS_NORMS: tl.constexpr, NORMED_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes one half of a head's input row: the token's embedding, or the hidden state."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    is_hidden = tl.program_id(1) == 1
    if is_hidden:
        source = row
        if HAS_ROWS:
            source = tl.load(rows + row)
        values = tl.load(hidden + source * num_columns + columns, mask=is_column, other=0.0)
    else:
        token = tl.load(token_ids + row)
        values = tl.load(embedding + token * num_columns + columns, mask=is_column, other=0.0)
    result = values
    if HAS_NORMS:
        if is_hidden:
            weights = tl.load(hidden_weight + columns, mask=is_column, other=0.0)
        else:
            weights = tl.load(embedding_weight + columns, mask=is_column, other=0.0)
        eps = tl.where(is_hidden, hidden_eps, embedding_eps)
        result = normed_row(values, weights, num_columns, eps)
    half = tl.where(is_hidden, num_columns, 0)
    tl.store(inputs + row * 2 * num_columns + half + columns, result, mask=is_column)
    if is_hidden:
        kept = values
        if NORMED_RESIDUAL:
            kept = result
        tl.store(residual + row * num_columns + columns, kept, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def embed_own(  # type: ignore[no-untyped-def]
    token_ids, embedding, rows, first_token, num_tokens, num_columns,
    BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the embedding of a row's token if this process has it, else zeros."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < num_columns
    token = tl.load(token_ids + row) - first_token
    is_own = (token >= 0) & (token < num_tokens)
    source = embedding + token * num_columns + columns
    values = tl.load(source, mask=is_column & is_own, other=0.0)
    tl.store(rows + row * num_columns + columns, values, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def fill_tables(  # type: ignore[no-untyped-def]
    positions, frequencies, cos, signed_sin, frequency_stride, factor,
    HALF: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Writes the rotation tables of one position."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_column = columns < HALF
    frequency = tl.load(frequencies + row * frequency_stride + columns, mask=is_column, other=0.0)
    angle = tl.load(positions + row).to(tl.float32) * frequency
    row_cos = tl.cos(angle) * factor
    row_sin = tl.sin(angle) * factor
    own = row * 2 * HALF + columns
    tl.store(cos + own, row_cos, mask=is_column)
    tl.store(cos + own + HALF, row_cos, mask=is_column)
    tl.store(signed_sin + own, -row_sin, mask=is_column)
    tl.store(signed_sin + own + HALF, row_sin, mask=is_column)


@triton.jit  # type: ignore[untyped-decorator]
def round_rows(  # type: ignore[no-untyped-def]
    rows, results, scales, num_rows, num_blocks, width, LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr, NUM_BLOCKS: tl.constexpr, SIZE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds NUM_BLOCKS blocks of a row to e4m3 or int8; see `quantised.quantised_rows`.

    Args:
        width: of a block.
        LARGEST: the largest number of the type.
        SIZE: `width`, or the next power of two.
    """
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.program_id(1) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    columns = tl.arange(0, SIZE)
    is_block = blocks < num_blocks
    is_element = is_block[:, None] & (columns < width)[None, :]
    places = (row * num_blocks + blocks[:, None]) * width + columns[None, :]
    values = tl.load(rows + places, mask=is_element, other=0.0).to(tl.float32)
    # Bits of numbers without a sign have their order, and those of NaN come last.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    largest = bits.to(tl.float32, bitcast=True)
    limits = tl.full(largest.shape, LARGEST, tl.float32)
    largest = tl.where(largest < SMALLEST, SMALLEST, largest)
    own, inverse = tl.div_rn(largest, limits), tl.div_rn(limits, largest)
    rounded = values * inverse[:, None]
    if results.dtype.element_ty == tl.int8:
        # The sum has no bits for fractions, and its lowest byte is the nearest integer.
        rounded = (rounded + _INTEGERS).to(tl.int32, bitcast=True)
    rounded = rounded.to(results.dtype.element_ty)
    tl.store(results + places, rounded, mask=is_element)
    tl.store(scales + blocks.to(tl.int64) * num_rows + row, own, mask=is_block)
