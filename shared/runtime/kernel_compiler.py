"""Compiles Triton's kernels on several threads, before CUDA graphs are captured.

Triton compiles a kernel at its first launch, in about half a second, and keeps it on disk for the
next start. The first start of an 8B with an EAGLE-3 head needs some two hundred kernels.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from shared.runtime.graphs import capturing

logger = logging.getLogger(__name__)

_MOST_THREADS = 16  # each takes some hundred MB, and Python runs one at a time


@torch.inference_mode()
def compile_kernels(work: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Compiles the kernels that some functions launch. Runs nothing on the device: each function is
    captured into a CUDA graph that is dropped. On a CPU there is nothing to compile.

    Ends after the first function if its kernels are all on disk, as they are at later starts. What
    is missing then, Triton compiles at the first launch.

    Args:
        work: functions that keep no tensor which they create: it would never be written.
    """
    if device.type != "cuda":
        return
    began_s = time.monotonic()
    matrix = torch.zeros((16, 16), dtype=torch.bfloat16, device=device)
    matrix.mm(matrix)  # cuBLAS must not begin inside of a capture
    graphs: list[torch.cuda.CUDAGraph] = []
    memory = torch.cuda.graph_pool_handle()
    with _Compiler(device) as compiler:
        try:
            for launch in work:
                graphs.append(torch.cuda.CUDAGraph())
                with capturing(graphs[-1], memory):
                    matrix.zero_()  # torch warns of an empty graph
                    launch()
                if not compiler.has_compiled:
                    compiler.wait()
                    if not compiler.has_compiled:
                        break
        except RuntimeError as error:
            logger.warning("kernels are compiled one after the other: %s", error)
        compiler.wait()
    graphs.clear()
    torch.cuda.empty_cache()
    if compiler.has_compiled:
        logger.info("compiled kernels within %.1f s", time.monotonic() - began_s)


class _Compiler:
    """Threads that compile kernels. In its context, the thread that made this object launches no
    kernel that is not compiled yet, but hands it to these threads.

    Attributes:
        has_compiled: some kernel was not on disk.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_compiled = False
        self._threads = ThreadPoolExecutor(
            min(len(os.sched_getaffinity(0)), _MOST_THREADS),
            thread_name_prefix="compile",
            initializer=torch.cuda.set_device,
            initargs=(device,),
        )
        self._launcher = threading.get_ident()
        self._kernels: dict[tuple[str, str, str], Future[None]] = {}
        self._hooks: tuple[Any, Any] = (None, None)

    def __enter__(self) -> _Compiler:
        from triton.knobs import compilation, runtime

        self._hooks = runtime.jit_cache_hook, compilation.listener
        runtime.jit_cache_hook, compilation.listener = self._skips_launch, self._listen
        return self

    def __exit__(self, *_: object) -> None:
        from triton.knobs import compilation, runtime

        self._threads.shutdown(cancel_futures=True)
        runtime.jit_cache_hook, compilation.listener = self._hooks

    def _skips_launch(self, *, fn: Any, **given: Any) -> bool:
        """Triton's `jit_cache_hook`, called at the launch of a kernel that this process has neither
        compiled nor loaded yet. Returns True to skip the launch. Those of other threads are not
        skipped: to compile a kernel, these threads call the hook, too."""
        if threading.get_ident() != self._launcher:
            return False
        key = (fn.module, fn.name, str(given["key"]))
        if key not in self._kernels:
            data = given["compile"]["specialization_data"]
            self._kernels[key] = self._threads.submit(_load, fn.name, fn.jit_function, data)
        return True

    def _listen(self, *, cache_hit: bool, **_: object) -> None:
        """Triton's `listener`, called when a kernel was compiled or read from disk."""
        if not cache_hit:
            self.has_compiled = True

    def wait(self) -> None:
        """Waits for all kernels."""
        concurrent.futures.wait(self._kernels.values())


def _load(name: str, function: Any, specialization_data: str) -> None:
    """Compiles a kernel and loads it onto the device: that must not happen in a capture."""
    try:
        kernel = function.preload(specialization_data)
        kernel.run  # noqa: B018 - loads the kernel
    except Exception as error:
        logger.warning("kernel %s is compiled when it is launched: %r", name, error)
