"""One process per GPU, joined like the processes of a target, with a time limit."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.bound import end_with_parent
from services.followers import end_processes
from shared.layers.tensor_group import TensorGroup, open_group

_HOST = "127.0.0.1"
Work = Callable[[TensorGroup, torch.device], bool]


def run_ranks(work: Work, *, size: int, limit_s: float) -> list[int | None]:
    """Runs `work`, a function of a module, as every rank of a group and returns exit codes.

    A process that takes longer than `limit_s` is killed, because ranks can wait for each other in a
    kernel for ever. A rank fails when `work` raises or returns False.
    """
    # Nothing here uses NVLink multicast, and on some hosts it must not even be set up.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    context = multiprocessing.get_context("spawn")
    store = TCPStore(_HOST, 0, size, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(target=_run, args=(work, rank, size, store.port), name=f"rank-{rank}")
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end_processes(processes, limit_s)
    return [process.exitcode for process in processes]


def _run(work: Work, rank: int, size: int, port: int) -> None:
    """Runs one rank. If it fails it must not wait for the other ranks.

    It must not outlive its parent either: a waiting kernel occupies its GPU.
    """
    end_with_parent()
    logging.basicConfig(level=logging.INFO)
    try:
        is_right = _joined(work, rank, size, port)
    except Exception:
        logging.exception("rank %s", rank)
        os._exit(1)
    sys.exit(0 if is_right else 1)


def _joined(work: Work, rank: int, size: int, port: int) -> bool:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore(_HOST, port, size, is_master=False)
    group = open_group(store, rank=rank, size=size, device=device)
    with torch.inference_mode():
        is_right = work(group, device)
    torch.cuda.synchronize()
    if rank:
        os._exit(0 if is_right else 1)  # the way a follower process ends
    start_s = time.monotonic()
    group.close()
    logging.info("closing took %.2f s", time.monotonic() - start_s)
    return is_right
