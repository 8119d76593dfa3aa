"""The pool of targets: picks the target of each generation, and another one when that one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gateway.generation import Event, Generation, TargetModel, TargetState
from gateway.settings import GatewaySettings
from gateway.target_link import LINK_TIMING, LinkTiming, TargetLink, is_retryable
from shared.errors import NotFound, OutriderError, QueueFull, StatusCode, Unavailable
from shared.generation import Failed, PromptScored, Started

Deliver = Callable[[Event], None]


class RoutedGeneration:
    """One generation: on a target, waiting for a target, or over.

    Until its first event arrives a generation may move to another target. After that its tokens
    may have been sent to the client, and a failure is final.

    Attributes:
        tried: addresses of the targets it was sent to, each with the target's `epoch` then.
        error: the error of its last target.
        wait_until_s: event loop time at which waiting ends; None before it first waited.
        timer: ends the waiting.
    """

    def __init__(
        self, pool: TargetPool, generation: Generation, name: str, deliver: Deliver
    ) -> None:
        self.generation = generation
        self.name = name
        self.tried: set[tuple[str, int]] = set()
        self.error: OutriderError
        self.wait_until_s: float | None = None
        self.timer: asyncio.TimerHandle
        self._pool = pool
        self._deliver = deliver
        self._placement: tuple[TargetLink, int] | None = None
        self._has_started = False
        self._is_over = False

    def place(self, link: TargetLink) -> None:
        """Raises:
        OutriderError: the link does not take the generation.
        """
        self.tried.add((link.address, link.epoch))
        self._placement = (link, link.submit(self.generation, self.receive, self._deliver))

    def receive(self, event: Event) -> None:
        """Takes any event but a delta, from the link or from a pool that gave up."""
        if isinstance(event, Failed) and event.may_retry and not self._has_started:
            self._placement = None
            self._pool.place_again(self, event.error)
            return
        self._has_started = True
        self._is_over = not isinstance(event, (Started, PromptScored))
        self._deliver(event)

    def cancel(self) -> None:
        """Cancels the generation; does nothing when it is over."""
        if self._is_over:
            return
        self._is_over = True
        if self._placement is not None:
            link, request_id = self._placement
            link.cancel(request_id)
        self._pool.stop_waiting(self)


class TargetPool:
    """Picks the target with the fewest reserved tokens.

    Args:
        tokenizer_sha256: hash of the gateway's tokenizer; a target with another one is not used.

    Attributes:
        links: one for each target.
    """

    def __init__(
        self, settings: GatewaySettings, tokenizer_sha256: str, timing: LinkTiming = LINK_TIMING
    ) -> None:
        self._settings = settings
        self._waiting: dict[RoutedGeneration, None] = {}  # in order of arrival
        self._tasks: list[asyncio.Task[None]] = []
        self.links: Sequence[TargetLink] = tuple(
            TargetLink(
                *(address, tokenizer_sha256, self._on_change, timing),
                *(settings.target_tls, settings.model_name),
            )
            for address in dict.fromkeys(settings.target)
        )

    def start(self) -> None:
        """Begins to connect."""
        self._tasks = [asyncio.create_task(link.run()) for link in self.links]

    async def close(self) -> None:
        """Closes every link; live generations fail."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_serving(self) -> bool:
        """Whether at least one target takes requests."""
        return any(link.state is TargetState.SERVING for link in self.links)

    @property
    def num_live(self) -> int:
        """Number of generations submitted and not over."""
        return sum(link.num_live for link in self.links) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        """Number of generations that lost their target and wait for another."""
        return len(self._waiting)

    def models(self) -> dict[str, TargetModel]:
        """Returns the models of all targets seen so far by the name clients use.

        Of several targets with the same model, a serving one describes it.
        """
        by_name: dict[str, TargetModel] = {}
        for link in sorted(self.links, key=lambda link: link.state is TargetState.SERVING):
            if link.model is not None and link.state is not TargetState.MISMATCHED:
                by_name[link.model.name] = link.model
        return by_name

    def aliases(self) -> dict[str, str]:
        """Returns the model's name by each of its aliases; none while there are several models."""
        models = self.models()
        name = next(iter(models)) if len(models) == 1 else None
        return {} if name is None else dict.fromkeys(self._settings.model_alias, name)

    def model(self, name: str | None) -> TargetModel:
        """Returns a model; the only one when `name` is None.

        Raises:
            NotFound: no target serves it.
            Unavailable: no target has been reached yet.
        """
        models = self.models()
        if not models:
            raise self._no_target()
        if len(models) == 1 and (not name or name in self._settings.model_alias):
            return next(iter(models.values()))
        if name not in models:
            message = f"model {name!r} is not served here; there is {', '.join(sorted(models))}"
            raise NotFound(message, reason="MODEL_NOT_FOUND")
        return models[name]

    def submit(self, generation: Generation, name: str, deliver: Deliver) -> RoutedGeneration:
        """Starts a generation of model `name`. Its last event is Finished or Failed.

        Raises:
            Unavailable: no target takes requests.
            QueueFull: no target that takes requests reads its session.
        """
        routed = RoutedGeneration(self, generation, name, deliver)
        error: OutriderError = self._no_target()
        while (link := self._pick(routed)) is not None:
            try:
                routed.place(link)
            except QueueFull as full:
                error = full
            else:
                return routed
        raise error

    def place_again(self, routed: RoutedGeneration, error: OutriderError) -> None:
        """Moves a generation whose target refused or lost it. Without another target it waits, or
        fails."""
        link = self._pick(routed)
        if link is not None:
            try:
                routed.place(link)
            except OutriderError as next_error:
                routed.receive(Failed(next_error, may_retry=is_retryable(next_error)))
            return
        # A full target stays full for a while; the client can decide better whether to wait.
        if error.code is StatusCode.RESOURCE_EXHAUSTED:
            routed.receive(Failed(error))
            return
        self._wait(routed, error)

    def _wait(self, routed: RoutedGeneration, error: OutriderError) -> None:
        """Keeps a generation until a target takes it. It fails with the error at the end of its
        retry window, which begins when it first waits."""
        loop = asyncio.get_running_loop()
        if routed.wait_until_s is None:
            routed.wait_until_s = loop.time() + self._settings.retry_window_s
        routed.error = error
        routed.timer = loop.call_at(routed.wait_until_s, self._give_up, routed)
        self._waiting[routed] = None

    def _give_up(self, routed: RoutedGeneration) -> None:
        del self._waiting[routed]
        routed.receive(Failed(routed.error))

    def stop_waiting(self, routed: RoutedGeneration) -> None:
        """Ends a generation's waiting; does nothing to one that does not wait."""
        if routed in self._waiting:
            del self._waiting[routed]
            routed.timer.cancel()

    def _pick(self, routed: RoutedGeneration) -> TargetLink | None:
        usable = (
            link
            for link in self.links
            if link.state is TargetState.SERVING
            and link.model is not None
            and link.model.name == routed.name
            and (link.address, link.epoch) not in routed.tried
        )
        return min(usable, key=lambda link: link.num_reserved_tokens, default=None)

    def _on_change(self) -> None:
        if not any(link.state is TargetState.SERVING for link in self.links):
            return
        for routed in list(self._waiting):
            self.stop_waiting(routed)
            self.place_again(routed, routed.error)

    def _no_target(self) -> Unavailable:
        reasons = "; ".join(f"{link.address} is {link.state.value}" for link in self.links)
        message = f"no target takes requests: {reasons}"
        return Unavailable(message, reason="NO_TARGET", retry_after_s=1.0)
