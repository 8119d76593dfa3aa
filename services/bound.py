"""Runs a module as a child that ends with its parent: `python -m services.bound MODULE [ARGS]`.

A launcher that gets SIGKILL cannot stop its children. Linux can: the kernel sends SIGTERM to this
process when the parent is gone. The child asks for that itself, because Python code between fork
and exec may deadlock if the parent has threads.

The kernel takes the fork server for the parent of a process that it has forked, and the fork server
lives as long as any such process. So processes of multiprocessing watch the one that started them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import signal
import sys
import threading
from typing import TYPE_CHECKING

from shared.garbage import collect_from_here, collect_none

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Has SIGTERM sent to this process at the death of the process that started it. A process that
    multiprocessing did not start gets none outside Linux."""
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(
            target=_await_end, args=(starter.sentinel,), name="end with parent", daemon=True
        ).start()
        return
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _await_end(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def call_unpickled(call: bytes, pipe: Connection) -> None:
    """Calls a function with arguments and then the pipe; `call` is the pickled function and
    arguments. Runs in a new process. Unpickling loads modules, so garbage collection is off."""
    collect_none()
    function, arguments = pickle.loads(call)
    collect_from_here()
    function(*arguments, pipe)


def main() -> None:
    module, sys.argv = sys.argv[1], sys.argv[1:]
    end_with_parent()
    collect_none()  # while the service loads; it calls `collect_from_here` afterwards
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
