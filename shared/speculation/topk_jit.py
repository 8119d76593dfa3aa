"""Device functions of `topk` in Triton.

A *key* orders like `stable_topk`: by value, then by the lowest index. Its high half is the float's
bits, made to order like integers, its low half the index from above.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_KEY = tl.constexpr(-(2**63))
_NO_HALF = tl.constexpr(-(2**31))


@triton.jit
def keys_of(values, indices):  # type: ignore[no-untyped-def]
    """Returns int64 keys of float32 values; indices are below 2^32."""
    # Adding zero turns -0.0, whose bits order below 0.0, into 0.0.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - indices.to(tl.int64))


@triton.jit
def value_of(keys):  # type: ignore[no-untyped-def]
    """Returns the float32 values of keys."""
    ordered = (keys >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def index_of(keys):  # type: ignore[no-untyped-def]
    """Returns the int64 indices of keys."""
    return 0xFFFFFFFF - (keys & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def best_of(keys, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the highest keys along an axis, which keeps one: what `tl.max` does, but faster.

    A warp has an instruction for the highest of 32 numbers of 32 bits. Indices are below 2^31, so
    that low halves order like signed numbers.
    """
    high = (keys >> 32).to(tl.int32)
    highest = tl.max(high, axis, keep_dims=True)
    lows = tl.where(high == highest, keys.to(tl.int32), _NO_HALF)
    lowest_index = tl.max(lows, axis, keep_dims=True)
    return (highest.to(tl.int64) << 32) | (lowest_index.to(tl.int64) & 0xFFFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def best_in_lists(  # type: ignore[no-untyped-def]
    keys, num_rows, num_lists, list_size,
    COUNT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Returns the COUNT best keys of each row, best first, `[ROWS, LANES]`, `NO_KEY` behind them.

    Args:
        keys: of `num_rows` rows, each of `num_lists` lists of `list_size` keys, best first.
        LANES: at least as many as lists and as COUNT, so that no key changes its thread.
    """
    # On one axis, so that a warp takes one row after the other whatever the strides.
    places = tl.arange(0, ROWS * LANES)
    row = places // LANES
    lane = places % LANES
    nexts = keys + (row * num_lists + lane) * list_size
    heads = tl.load(nexts, mask=(row < num_rows) & (lane < num_lists), other=NO_KEY)
    num_left = tl.zeros_like(places) + list_size
    heads = heads.reshape(ROWS, LANES)
    found = tl.zeros_like(heads) + NO_KEY
    rank = lane.reshape(ROWS, LANES)
    for place in tl.static_range(COUNT):
        best = best_of(heads, 1)
        found = tl.where(rank == place, best, found)
        if place + 1 < COUNT:
            is_best = (heads == best) & (heads != NO_KEY)
            is_taken = is_best.reshape(ROWS * LANES)
            num_left -= is_taken.to(tl.int32)
            nexts += is_taken.to(tl.int32)
            following = tl.load(nexts, mask=is_taken & (num_left > 0), other=NO_KEY)
            heads = tl.where(is_best, following.reshape(ROWS, LANES), heads)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def num_before(values, count, BLOCK: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns how many keys are above that of each of `count` stored values, `[BLOCK]`."""
    own = tl.arange(0, BLOCK)
    keys = keys_of(tl.load(values + own, mask=own < count, other=float("-inf")), own)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, CHUNK):
        others = start + tl.arange(0, CHUNK)
        value = tl.load(values + others, mask=others < count, other=float("-inf"))
        # Those past the last one have the highest indices, so that they are above none.
        before += tl.sum((keys_of(value, others)[:, None] > keys[None, :]).to(tl.int32), 0)
    return before
