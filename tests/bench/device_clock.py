"""Times of work on a GPU, and the bandwidth of its memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch


def device_ms(work: Callable[[], object], *, repeats: int = 15, inner: int = 4) -> float:
    """Returns the median device time of one call."""
    for _ in range(3):
        work()
    times_ms = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(inner):
            work()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end) / inner)
    return statistics.median(times_ms)


def copy_bandwidth() -> float:
    """Returns bytes a millisecond of a large device copy, read and written."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    size = 2 * source.numel() * source.element_size()
    return size / device_ms(lambda: target.copy_(source), inner=2)


def product_rate() -> float:
    """Returns operations a millisecond of a large bfloat16 product."""
    left, right = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / device_ms(lambda: left @ right, inner=2)
