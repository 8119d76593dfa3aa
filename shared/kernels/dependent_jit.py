"""Programmatic dependent launch: a kernel takes its place while the one before it still runs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit  # type: ignore[untyped-decorator]
def begin(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Waits until every kernel before this one is done, then lets the next one take its place.

    The first thing that a kernel launched with `dependent_launch` does. In this order a kernel
    that has begun knows all but its direct predecessor to be done.
    """
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
