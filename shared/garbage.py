"""When Python looks for garbage.

While a service loads its modules nothing becomes garbage, and what is there, some 200,000 objects
with torch, would be looked through again and again: a sixth of a start. Later a full collection
that walks them takes 50 ms, in which no thread launches a step or sends a token.
"""

from __future__ import annotations

import gc


def collect_none() -> None:
    """Collects nothing until `collect_from_here`, which each service calls once it has loaded."""
    gc.disable()


def collect_from_here() -> None:
    """Collects garbage among what is made from here on; what is there stays."""
    gc.freeze()
    gc.enable()
