"""The engine's clock."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds since a fixed moment; never goes back."""
