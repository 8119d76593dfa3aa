"""When Python's garbage collector runs.

While a service loads its modules nothing becomes garbage, but the collector would walk the loaded
objects, some 200,000 with torch, again and again: a sixth of the start-up time. Later a full
collection of these objects takes 50 ms, in which no thread launches a step or sends a token.
"""

from __future__ import annotations

import gc


def collect_none() -> None:
    """Disables the collector until `collect_from_here`, which a service calls once it is loaded."""
    gc.disable()


def collect_from_here() -> None:
    """Enables the collector, for objects made from now on; older ones are never collected."""
    gc.freeze()
    gc.enable()
