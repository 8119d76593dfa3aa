"""Runs a module as a child that ends with its parent: `python -m services.bound MODULE [ARGS]`.

A launcher that is killed outright cannot stop its children. Linux can: the kernel sends SIGTERM to
this process when the parent is gone. Set here rather than between fork and exec, where Python code
may deadlock in a parent that has threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """Asks the kernel for SIGTERM at the parent's death; does nothing outside Linux."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died while we asked
        os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    module, sys.argv = sys.argv[1], sys.argv[1:]
    end_with_parent()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
