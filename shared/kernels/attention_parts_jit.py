"""Triton functions of the splits of a key list: where they are cut, and how their parts add up."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merged(best, mass, total, part_best, part_mass, part_total):  # type: ignore[no-untyped-def]
    """Adds the part of one split to maxima, masses and sums."""
    new_best = tl.maximum(best, part_best)
    keep = power_of_two(best, new_best)
    weight = power_of_two(part_best, new_best)
    mass = mass * keep + part_mass * weight
    total = total * keep[:, None] + part_total * weight[:, None]
    return new_best, mass, total


@triton.jit
def power_of_two(best, new_best):  # type: ignore[no-untyped-def]
    """Returns `2 ** (best - new_best)`, exactly, of maxima that are whole or -inf.

    With whole maxima a sum is scaled without rounding. So one that is scaled when a larger maximum
    turns up has the bits of one whose parts are all scaled by the last maximum, and a compiler may
    contract product and sum or not.
    """
    reference = tl.where(new_best == float("-inf"), 0.0, new_best)
    exponent = tl.maximum(best - reference, -127.0).to(tl.int32)
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def bounds_of_split(  # type: ignore[no-untyped-def]
    split, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the first key of a split, and how many it has."""
    size = FIRST_SPLIT << (split // LEVEL_SPLITS)
    return LEVEL_SPLITS * (size - FIRST_SPLIT) + split % LEVEL_SPLITS * size, size


@triton.jit  # type: ignore[untyped-decorator]
def split_of(  # type: ignore[no-untyped-def]
    key, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns the index of the split that holds a key."""
    level_start = 0
    first = 0
    size = FIRST_SPLIT
    while key >= level_start + LEVEL_SPLITS * size:
        level_start += LEVEL_SPLITS * size
        first += LEVEL_SPLITS
        size *= 2
    return first + (key - level_start) // size


@triton.jit  # type: ignore[untyped-decorator]
def end_of_split(  # type: ignore[no-untyped-def]
    key, FIRST_SPLIT: tl.constexpr, LEVEL_SPLITS: tl.constexpr
):
    """Returns where the split that holds a key ends."""
    split = split_of(key, FIRST_SPLIT, LEVEL_SPLITS)
    start, size = bounds_of_split(split, FIRST_SPLIT, LEVEL_SPLITS)
    return start + size
