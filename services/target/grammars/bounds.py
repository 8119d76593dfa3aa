"""Bounds that compiling a grammar has wherever it is done."""

from __future__ import annotations

from shared.errors import InvalidArgument

STACK_BYTES = 512 * 2**20
"""Of address space, for rules that name each other in a long chain: llguidance bounds how deeply
they are written, not how deeply they refer. What is not used costs no memory."""


def too_complex(message: str) -> InvalidArgument:
    """Returns the refusal of a grammar that is beyond a bound."""
    return InvalidArgument.of("GRAMMAR_TOO_COMPLEX", "grammar", message)
