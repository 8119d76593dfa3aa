"""Capturing CUDA graphs in a process that does other things as well."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# torch captures on one stream of the process, whichever thread asks.
_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Captures into `graph` what its body queues.

    Another thread of the process may use the device meanwhile, and waits to capture. It must not
    wait for the whole device, which breaks the capture under way; this waits for it before it
    begins. No garbage is collected: a graph among it would be destroyed, which breaks it, too.

    Args:
        pool: of `torch.cuda.graph_pool_handle`.
    """
    with _ONE_AT_A_TIME:
        collects = gc.isenabled()
        gc.disable()
        # torch leaves the thread on the stream of captures when one cannot end.
        own_stream = torch.cuda.stream(torch.cuda.current_stream())
        try:
            with own_stream, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                yield
        finally:
            if collects:
                gc.enable()
