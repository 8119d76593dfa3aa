"""Flights that lost their target and wait for another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from gateway.flight import Flight
from shared.errors import OutriderError

GiveUp = Callable[[Flight, OutriderError], None]


@dataclass(frozen=True, slots=True)
class _Place:
    error: OutriderError
    timer: asyncio.TimerHandle


class WaitingRoom:
    """Keeps each flight until the end of its window.

    Args:
        window_s: counts from the first time a flight waits.
        give_up: told of a flight whose window ended, with the error it came with.
    """

    def __init__(self, window_s: float, give_up: GiveUp) -> None:
        self._window_s = window_s
        self._give_up = give_up
        self._places: dict[Flight, _Place] = {}

    def __len__(self) -> int:
        return len(self._places)

    def enter(self, flight: Flight, error: OutriderError) -> None:
        """Lets a flight wait."""
        loop = asyncio.get_running_loop()
        if flight.wait_until_s is None:
            flight.wait_until_s = loop.time() + self._window_s
        timer = loop.call_at(flight.wait_until_s, self._end, flight)
        self._places[flight] = _Place(error, timer)

    def leave(self, flight: Flight) -> None:
        """Lets a flight go, where it is here."""
        place = self._places.pop(flight, None)
        if place is not None:
            place.timer.cancel()

    def empty(self) -> list[tuple[Flight, OutriderError]]:
        """Lets all go; returns each with the error it came with."""
        places, self._places = self._places, {}
        for place in places.values():
            place.timer.cancel()
        return [(flight, place.error) for flight, place in places.items()]

    def _end(self, flight: Flight) -> None:
        self._give_up(flight, self._places.pop(flight).error)
