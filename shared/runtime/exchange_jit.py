"""Triton kernels that synchronize rounds between two GPUs, and read the memory of another GPU.

Addresses are integers, because the memory belongs to another process, or to the host. They are
annotated, because Triton passes an integer as 32 bits where its value allows that, and addresses of
host memory may be so small.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _now_ns():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _wait_for(counter, count, limit_us, gone):  # type: ignore[no-untyped-def]
    """Waits until a counter is at least `count`, or the host reports that the peer has gone;
    returns the last value of the counter."""
    end = _now_ns() + limit_us.to(tl.int64) * 1000
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
    now = end - 1
    has_gone = tl.load(gone, volatile=True)
    while (seen < count) & (now < end) & (has_gone == 0):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
        now = _now_ns()
        has_gone = tl.load(gone, volatile=True)
    return seen


@triton.jit(do_not_specialize=["go", "done", "late", "forgiven", "count", "limit_us"])  # type: ignore[untyped-decorator]
def exchange(  # type: ignore[no-untyped-def]
    go: tl.int64, done: tl.int64, late: tl.int64, forgiven, count, limit_us
):
    """The target's side of a round: raises `go` to the round's number `count`, and waits for
    `done`. If that takes too long, or the head has failed (see `FAILED`), stores the number in
    `late`. Does not wait at all if `late` already holds a round other than `forgiven`: rounds are
    queued before the host knows that one was late. The host's gone flag lies next to `late`."""
    pointer = tl.pointer_type(tl.int32)
    tl.atomic_xchg(go.to(pointer), count, sem="release", scope="sys")
    noted, counters = late.to(pointer), done.to(pointer)
    limit_us = tl.where(tl.load(noted, volatile=True) == forgiven, limit_us, 0)
    seen = _wait_for(counters, count, limit_us, noted + 1)
    failed = tl.atomic_add(counters + 1, 0, sem="acquire", scope="sys")
    tl.store(noted, count, mask=(seen < count) | (failed == count))


@triton.jit(do_not_specialize=["go", "gone", "count", "limit_us"])  # type: ignore[untyped-decorator]
def await_go(  # type: ignore[no-untyped-def]
    go: tl.int64, gone: tl.int64, current, count, limit_us
):
    """The head's side: waits for `go`, and stores the round's number for `raise_done`."""
    pointer = tl.pointer_type(tl.int32)
    _wait_for(go.to(pointer), count, limit_us, gone.to(pointer))
    tl.store(current, count)


@triton.jit(do_not_specialize=["done"])  # type: ignore[untyped-decorator]
def raise_done(done: tl.int64, current):  # type: ignore[no-untyped-def]
    """Raises `done` to the number of the round under way, behind all earlier work."""
    count = tl.load(current)
    tl.atomic_xchg(done.to(tl.pointer_type(tl.int32)), count, sem="release", scope="sys")


@triton.jit(do_not_specialize=["source"])  # type: ignore[untyped-decorator]
def gather_words(  # type: ignore[no-untyped-def]
    source: tl.int64, rows, out, NUM_WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies rows of `NUM_WORDS` int64 each from memory of another process."""
    row = tl.program_id(0)
    first = tl.load(rows + row) * NUM_WORDS
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_word = words < NUM_WORDS
    memory = source.to(tl.pointer_type(tl.int64))
    value = tl.load(memory + first + words, mask=is_word)
    tl.store(out + row.to(tl.int64) * NUM_WORDS + words, value, mask=is_word)
