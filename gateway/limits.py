"""Bounds of one request, refused by name when exceeded, and of the time that work on it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.settings import GatewaySettings
from shared.errors import DeadlineExceeded, InvalidArgument

T = TypeVar("T")
WORK_TIMEOUT_S = 30.0
_MAX_STOP_CHARACTERS = 1024
# Of its own: what is given up on runs to its end all the same.
_THREADS = ThreadPoolExecutor(2, "gateway-work")


def check_prompts(settings: GatewaySettings, num_prompts: int) -> None:
    """Raises:
    InvalidArgument: a completion has none, or too many.
    """
    if not 1 <= num_prompts <= settings.max_prompts:
        message = f"prompt holds {num_prompts} prompts; it must hold [1, {settings.max_prompts}]"
        raise InvalidArgument.of("PROMPTS_OUT_OF_RANGE", "prompt", message)


def check_choices(settings: GatewaySettings, num_choices: int, num_prompts: int) -> None:
    """Raises:
    InvalidArgument: more is asked for than one request may.
    """
    if not 1 <= num_choices <= settings.max_choices:
        raise InvalidArgument.out_of_range("n", num_choices, f"[1, {settings.max_choices}]")
    if num_choices * num_prompts > settings.max_generations:
        message = (
            f"the request asks for {num_choices} choices of {num_prompts} prompts; "
            f"n times prompts must be at most {settings.max_generations}"
        )
        raise InvalidArgument.of("CHOICES_OUT_OF_RANGE", "n", message)


def check_stops(settings: GatewaySettings, field: str, stops: Sequence[str]) -> None:
    """Raises:
    InvalidArgument: there are too many, or one is empty or too long.
    """
    if len(stops) > settings.max_stop_strings:
        limit = f"at most {settings.max_stop_strings}"
        message = f"{field} has {len(stops):,} strings; it must have {limit}"
        raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)
    for stop in stops:
        if not 1 <= len(stop) <= _MAX_STOP_CHARACTERS:
            limit = f"[1, {_MAX_STOP_CHARACTERS}]"
            message = f"a stop string has {len(stop)} characters; it must have {limit}"
            raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)


async def off_loop(field: str, work: Callable[[], T], timeout_s: float = WORK_TIMEOUT_S) -> T:
    """Returns what `work` returns, of the data that came in `field`.

    Raises:
        DeadlineExceeded: it takes too long, its wait for a thread included.
    """
    running = asyncio.get_running_loop().run_in_executor(_THREADS, work)
    try:
        return await asyncio.wait_for(running, timeout_s)
    except TimeoutError as error:
        message = f"{field} takes longer than {timeout_s:g} s to prepare"
        raise DeadlineExceeded(message, reason="REQUEST_TOO_SLOW") from error
