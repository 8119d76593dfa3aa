"""Generations that lost their target and wait for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.routed_generation import RoutedGeneration
from shared.errors import OutriderError

GiveUp = Callable[[RoutedGeneration, OutriderError], None]


@dataclass(frozen=True, slots=True)
class _Place:
    error: OutriderError
    timer: asyncio.TimerHandle


class RetryQueue:
    """Keeps a generation until its retry window ends.

    Args:
        window_s: counted from the first time that a generation waits.
        give_up: called when a window ends, with the generation and the error of its last target.
    """

    def __init__(self, window_s: float, give_up: GiveUp) -> None:
        self._window_s = window_s
        self._give_up = give_up
        self._places: dict[RoutedGeneration, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def add(self, routed: RoutedGeneration, error: OutriderError) -> None:
        """Adds a generation with the error of its last target."""
        loop = asyncio.get_running_loop()
        if routed.wait_until_s is None:
            routed.wait_until_s = loop.time() + self._window_s
        timer = loop.call_at(routed.wait_until_s, self._end, routed)
        self._places[routed] = _Place(error, timer)

    def remove(self, routed: RoutedGeneration) -> None:
        """Removes a generation, if it is here."""
        place = self._places.pop(routed, None)
        if place is not None:
            place.timer.cancel()

    def take_all(self) -> list[tuple[RoutedGeneration, OutriderError]]:
        """Removes all; returns each with the error of its last target."""
        places, self._places = self._places, {}
        for place in places.values():
            place.timer.cancel()
        return [(routed, place.error) for routed, place in places.items()]

    def _end(self, routed: RoutedGeneration) -> None:
        self._give_up(routed, self._places.pop(routed).error)
