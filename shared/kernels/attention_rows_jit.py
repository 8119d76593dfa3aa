"""Triton kernels of paged attention for what the faster ones do not support: soft caps and sinks.
A program computes one row and up to 16 of its heads.

Keys are cut into spans of equal length; each is summed by itself, and the spans are added in order.
So a row's bits depend neither on the rest of the batch nor on how many programs share its keys.
Keys outside the window add exact zeros.

Source: online softmax, Milakov and Gimelshein, arXiv 1805.02867; split keys as in Flash-Decoding.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merged(high, mass, total, own_high, own_mass, own_total):  # type: ignore[no-untyped-def]
    """Returns the maximum, mass and sum over the union of two sets of keys; one may be empty."""
    low = float("-inf")
    both = tl.maximum(high, own_high)
    base = tl.where(both == low, 0.0, both)
    kept, added = tl.exp2(high - base), tl.exp2(own_high - base)
    mass = mass * kept + own_mass * added
    return both, mass, total * kept[:, None] + own_total * added[:, None]


@triton.jit
def capped(scores, cap):  # type: ignore[no-untyped-def]
    """Returns `cap * tanh(score / cap)`, with score and cap in base 2."""
    powers = tl.exp2(scores / cap * -2.0 * 1.4426950408889634)
    return cap * (1.0 - powers) / (1.0 + powers)


@triton.jit  # type: ignore[untyped-decorator]
def attend_span(  # type: ignore[no-untyped-def]
    query, query_rest, keys, values, pages, tail, first, end, position, shared,
    scale_log2, cap, window,
    HAS_TAIL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    BLOCK_MAIN: tl.constexpr, BLOCK_VALUES: tl.constexpr, SLOT_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE: tl.constexpr, IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Returns maximum, mass and sum over the keys `[first, end)` of one row's list."""
    low = float("-inf")
    precision: tl.constexpr = "ieee" if IS_FLOAT32 else "tf32"
    high = tl.full((HEADS,), low, tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, BLOCK_VALUES), tl.float32)
    dims, value_dims = tl.arange(0, BLOCK_MAIN), tl.arange(0, BLOCK_VALUES)
    for start in range(first, end, TILE):
        indices = start + tl.arange(0, TILE)
        inside = indices < end
        visible = inside
        if HAS_WINDOW:
            visible = inside & (indices > position - window)
        is_shared = inside & (indices < shared)
        page = tl.load(pages + indices // PAGE_SIZE, mask=is_shared, other=0)
        slots = page.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
        if HAS_TAIL:
            is_own = inside & (indices >= shared)
            slots = tl.where(is_own, tl.load(tail + indices - shared, mask=is_own, other=0), slots)
        slots = slots * SLOT_SIZE
        key = tl.load(
            keys + slots[:, None] + dims[None, :],
            mask=inside[:, None] & (dims < MAIN)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(key), input_precision=precision)
        if REST > 0:
            rest = tl.arange(0, REST)
            key_rest = tl.load(
                keys + slots[:, None] + (MAIN + rest)[None, :],
                mask=inside[:, None] & (MAIN + rest < DIM)[None, :], other=0.0,
            )  # fmt: skip
            scores += tl.dot(query_rest, tl.trans(key_rest), input_precision=precision)
        scores *= scale_log2
        if HAS_CAP:
            scores = capped(scores, cap)
        scores = tl.where(visible[None, :], scores, low)
        both = tl.maximum(high, tl.max(scores, 1))
        base = tl.where(both == low, 0.0, both)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(high - base)
        value = tl.load(
            values + slots[:, None] + value_dims[None, :],
            mask=inside[:, None] & (value_dims < DIM)[None, :], other=0.0,
        )  # fmt: skip
        mass = mass * kept + tl.sum(weights, 1)
        total *= kept[:, None]
        total += tl.dot(weights.to(value.dtype), value, input_precision=precision)
        high = both
    return high, mass, total


@triton.jit  # type: ignore[untyped-decorator]
def attend_rows(  # type: ignore[no-untyped-def]
    queries, keys, values, sinks, results, sums, highs, masses,
    sequences, row_lengths, positions, shared_lengths, page_table, tail_slots,
    query_stride, page_stride, tail_stride, num_spans, scale_log2, cap, window,
    HAS_TAIL: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, IS_WHOLE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, BLOCK_MAIN: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr, TILE: tl.constexpr, IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Attends from one row and some heads of one key head to one span of keys, or to all."""
    row = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (NUM_GROUPS + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // blocks
    groups = (tl.program_id(1) % blocks) * HEADS + tl.arange(0, HEADS)
    is_head = groups < NUM_GROUPS
    heads = kv_head * NUM_GROUPS + groups
    slot_size: tl.constexpr = NUM_KV_HEADS * DIM
    low = float("-inf")
    sequence = tl.load(sequences + row)
    length, position = tl.load(row_lengths + row), tl.load(positions + row)
    shared = tl.load(shared_lengths + sequence)
    pages, tail = page_table + sequence * page_stride, tail_slots + row * tail_stride
    dims = tl.arange(0, BLOCK_MAIN)
    own = queries + row * query_stride + heads[:, None] * DIM
    query = tl.load(own + dims[None, :], mask=is_head[:, None] & (dims < MAIN)[None, :], other=0.0)
    query_rest = query
    if REST > 0:
        rest = tl.arange(0, REST)
        query_rest = tl.load(
            own + (MAIN + rest)[None, :],
            mask=is_head[:, None] & (MAIN + rest < DIM)[None, :], other=0.0,
        )  # fmt: skip
    high = tl.full((HEADS,), low, tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    total = tl.zeros((HEADS, BLOCK_VALUES), tl.float32)
    first_span, end_span = tl.program_id(2), tl.program_id(2) + 1
    if IS_WHOLE:
        first_span, end_span = 0, tl.cdiv(length, SPAN)
    for span in range(first_span, end_span):
        first = span * SPAN
        if HAS_WINDOW:
            # Skips tiles before the window.
            hidden = tl.maximum(position - window + 1, 0)
            first = tl.maximum(first, (hidden // TILE * TILE).to(tl.int32))
        end = tl.minimum(span * SPAN + SPAN, length)
        own_high, own_mass, own_total = attend_span(
            query, query_rest, keys + kv_head * DIM, values + kv_head * DIM, pages, tail,
            first, end, position, shared, scale_log2, cap, window,
            HAS_TAIL, HAS_CAP, HAS_WINDOW, HEADS, DIM, MAIN, REST, BLOCK_MAIN,
            BLOCK_VALUES, slot_size, PAGE_SIZE, TILE, IS_FLOAT32,
        )  # fmt: skip
        if IS_WHOLE:
            high, mass, total = merged(high, mass, total, own_high, own_mass, own_total)
        else:
            high, mass, total = own_high, own_mass, own_total
    value_dims = tl.arange(0, BLOCK_VALUES)
    is_value = is_head[:, None] & (value_dims < DIM)[None, :]
    num_heads: tl.constexpr = NUM_KV_HEADS * NUM_GROUPS
    if IS_WHOLE:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
            sink *= 1.4426950408889634
            none = tl.zeros((HEADS, BLOCK_VALUES), tl.float32)
            high, mass, total = merged(high, mass, total, sink, mass * 0.0 + 1.0, none)
        place = (row * num_heads + heads)[:, None] * DIM + value_dims[None, :]
        tl.store(results + place, total / tl.maximum(mass, 1e-37)[:, None], mask=is_value)
    else:
        place = (row * num_heads + heads) * num_spans + tl.program_id(2)
        tl.store(highs + place, high, mask=is_head)
        tl.store(masses + place, mass, mask=is_head)
        tl.store(sums + place[:, None] * DIM + value_dims[None, :], total, mask=is_value)


@triton.jit  # type: ignore[untyped-decorator]
def join_spans(  # type: ignore[no-untyped-def]
    sums, highs, masses, sinks, row_lengths, results, num_spans,
    HAS_SINKS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Adds the spans of a row and a head in order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    one = tl.arange(0, 1)
    value_dims = tl.arange(0, BLOCK_VALUES)
    is_value = (value_dims < DIM)[None, :]
    high = tl.full((1,), float("-inf"), tl.float32)
    mass = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, BLOCK_VALUES), tl.float32)
    for span in range(tl.cdiv(tl.load(row_lengths + row), SPAN)):
        place = (row * NUM_HEADS + head) * num_spans + span + one
        own = tl.load(sums + place[:, None] * DIM + value_dims[None, :], mask=is_value, other=0.0)
        high, mass, total = merged(
            high, mass, total, tl.load(highs + place), tl.load(masses + place), own
        )
    if HAS_SINKS:
        sink = tl.load(sinks + head + one).to(tl.float32) * 1.4426950408889634
        none = tl.zeros((1, BLOCK_VALUES), tl.float32)
        high, mass, total = merged(high, mass, total, sink, mass * 0.0 + 1.0, none)
    place = (row * NUM_HEADS + head + one)[:, None] * DIM + value_dims[None, :]
    tl.store(results + place, total / tl.maximum(mass, 1e-37)[:, None], mask=is_value)
