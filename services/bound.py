"""Runs a module as a child that ends with its parent: `python -m services.bound MODULE [ARGS]`.

A launcher that gets SIGKILL cannot stop its children. Linux can: the kernel sends SIGTERM to this
process when the parent is gone. The child asks for that itself, because Python code between fork
and exec may deadlock if the parent has threads.

That fails for processes that multiprocessing's fork server forks: the fork server is their parent,
and it lives as long as one of them. A process of multiprocessing therefore waits, in a thread, for
the end of the process that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
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
    from multiprocessing.process import BaseProcess

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Has SIGTERM sent to this process at the death of the process that started it. Outside Linux
    only processes of multiprocessing get it."""
    starter = multiprocessing.parent_process()
    if starter is not None:
        threading.Thread(
            target=_end_with, args=(starter,), name="end with parent", daemon=True
        ).start()
        return
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), signal.SIGTERM)


def _end_with(starter: BaseProcess) -> None:
    starter.join()
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
