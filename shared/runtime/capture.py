"""Capturing CUDA graphs in a process that does other things as well."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Captures into `graph` what its body queues.

    Another thread of the process may use the device meanwhile. No garbage is collected: a graph
    among it would be destroyed, which breaks the capture under way.

    Args:
        pool: of `torch.cuda.graph_pool_handle`.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()
