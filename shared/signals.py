"""When a process ends at SIGINT or SIGTERM.

While a process starts, which may block its event loop for minutes, a signal ends it at once: there
is nothing to drain. From `stop_at_signals` on, just before it serves, a signal asks it to stop in
order.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import NoReturn

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_SIGNALLED = 128  # exit codes of signals begin here


def end_at_signals() -> None:
    """Has signals end the process, without a traceback, until `stop_at_signals`."""
    for number in _NUMBERS:
        # As the first process of a container it would ignore signals without a handler.
        signal.signal(number, _end)


def stop_event() -> asyncio.Event:
    """Returns an event that is set at SIGINT or SIGTERM from now on."""
    stop = asyncio.Event()
    stop_at_signals(stop)
    return stop


def stop_at_signals(stop: asyncio.Event) -> None:
    """Sets the event at SIGINT or SIGTERM from now on."""
    call_at_signals(stop.set)


def call_at_signals(function: Callable[[], None]) -> None:
    """Has the event loop call the function at each SIGINT or SIGTERM from now on."""
    for number in _NUMBERS:
        asyncio.get_running_loop().add_signal_handler(number, function)


def _end(number: int, frame: object) -> NoReturn:  # noqa: ARG001 - the interpreter gives it
    os._exit(_SIGNALLED + number)
