"""Seeds of sampling."""

from __future__ import annotations

import secrets

_MASK = 2**64 - 1


def drawn_seed() -> int:
    """Returns a random seed in [0, 2^63), which an int64 holds."""
    return secrets.randbits(63)


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of one of `n` choices: the request's own for the first, distinct ones after.

    Source: Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators", mix64.
    """
    if choice == 0:
        return seed
    mixed = (seed + choice * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) >> 1
