"""One generation that the pool routes to a target, and perhaps to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.generation import Delta, Event, Failed, Generation, PromptScored, Started
from gateway.target_link import TargetLink
from shared.errors import OutriderError

Deliver = Callable[[Event], None]


class Placer(Protocol):
    """Chooses the target of a generation."""

    def place_again(self, routed: RoutedGeneration, error: OutriderError) -> None:
        """Called when its target refused or lost it."""

    def forget(self, routed: RoutedGeneration) -> None:
        """Called when it was cancelled."""


class RoutedGeneration:
    """One generation: on a target, waiting for one, or over.

    Until the first event arrives it may move to another target; after that its tokens may have
    been sent on, and a failure is final.

    Attributes:
        tried: targets that refused or lost it, each with its `epoch` at that time.
        wait_until_s: event loop time at which waiting ends; None before it first waited.
    """

    def __init__(self, placer: Placer, generation: Generation, name: str, deliver: Deliver) -> None:
        self.generation = generation
        self.name = name
        self.tried: set[tuple[str, int]] = set()
        self.wait_until_s: float | None = None
        self._placer = placer
        self._deliver = deliver
        self._placed: tuple[TargetLink, int] | None = None
        self._has_started = False
        self._is_over = False

    def place(self, link: TargetLink) -> None:
        """Raises:
        OutriderError: the link does not take it.
        """
        self.tried.add((link.address, link.epoch))
        self._placed = (link, link.submit(self.generation, self.receive))

    def receive(self, event: Event) -> None:
        """Takes an event from the link, or from the pool that gave up."""
        if isinstance(event, Failed) and event.may_retry and not self._has_started:
            self._placed = None
            self._placer.place_again(self, event.error)
            return
        self._has_started = True
        self._is_over = not isinstance(event, (Delta, Started, PromptScored))
        self._deliver(event)

    def cancel(self) -> None:
        """Ends interest in the generation; does nothing when it is over."""
        if self._is_over:
            return
        self._is_over = True
        if self._placed is not None:
            link, request_id = self._placed
            link.cancel(request_id)
        self._placer.forget(self)
