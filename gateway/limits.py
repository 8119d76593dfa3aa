"""Bounds of one request: what a client may ask for, and what it may cost in memory and time; and of
the responses that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from shared.errors import DeadlineExceeded, InvalidArgument

T = TypeVar("T")
WORK_TIMEOUT_S = 30.0
# Of its own: what is given up on runs to its end all the same.
_THREADS = ThreadPoolExecutor(2, "gateway-work")


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of the store of responses.

    Attributes:
        max_bytes: of the JSON of all entries.
        max_age_s: of an entry since it changed last.
        max_history_bytes: of the stored items that one request continues.
    """

    max_bytes: int = 256 * 2**20
    max_age_s: float = 30 * 24 * 3600.0
    max_history_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Everything here is refused by name when exceeded.

    Attributes:
        max_body_bytes: of an HTTP request body.
        max_buffered_bytes: of all bodies that are not complete yet.
        body_timeout_s: from the headers of a request to the last byte of its body.
        max_template_characters: of a `chat_template` in a request; 0 refuses all of them.
        max_choices: largest `n`.
        max_prompts: most prompts of one completion request.
        max_generations: most `n` times prompts.
        max_stop_strings: most entries of `stop`.
        max_stop_characters: longest entry of `stop`.
        max_unread_tokens: tokens kept for a client that reads too slowly. What piles up goes out
            as one chunk; past this bound the request is cancelled.
        request_timeout_s: time a generation may take on a target, queueing included.
    """

    max_body_bytes: int = 16 * 2**20
    max_buffered_bytes: int = 256 * 2**20
    body_timeout_s: float = 60.0
    max_template_characters: int = 0
    max_choices: int = 128
    max_prompts: int = 1024
    max_generations: int = 1024
    max_stop_strings: int = 16
    max_stop_characters: int = 1024
    max_unread_tokens: int = 8192
    request_timeout_s: float | None = None

    def check_prompts(self, num_prompts: int) -> None:
        """Raises:
        InvalidArgument: a completion has none, or too many.
        """
        if not 1 <= num_prompts <= self.max_prompts:
            message = f"prompt holds {num_prompts} prompts; it must hold [1, {self.max_prompts}]"
            raise InvalidArgument.of("PROMPTS_OUT_OF_RANGE", "prompt", message)

    def check_choices(self, num_choices: int, num_prompts: int) -> None:
        """Raises:
        InvalidArgument: more is asked for than one request may.
        """
        if not 1 <= num_choices <= self.max_choices:
            raise InvalidArgument.out_of_range("n", num_choices, f"[1, {self.max_choices}]")
        if num_choices * num_prompts > self.max_generations:
            message = (
                f"the request asks for {num_choices} choices of {num_prompts} prompts; "
                f"n times prompts must be at most {self.max_generations}"
            )
            raise InvalidArgument.of("CHOICES_OUT_OF_RANGE", "n", message)

    def check_stops(self, field: str, stops: Sequence[str]) -> None:
        """Raises:
        InvalidArgument: there are too many, or one is empty or too long.
        """
        if len(stops) > self.max_stop_strings:
            limit = f"at most {self.max_stop_strings}"
            message = f"{field} has {len(stops):,} strings; it must have {limit}"
            raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)
        for stop in stops:
            if not 1 <= len(stop) <= self.max_stop_characters:
                limit = f"[1, {self.max_stop_characters}]"
                message = f"a stop string has {len(stop)} characters; it must have {limit}"
                raise InvalidArgument.of("STOP_OUT_OF_RANGE", field, message)

    def check_template(self, source: str) -> None:
        """Raises:
        InvalidArgument: requests may bring no template, or none so long.
        """
        limit = self.max_template_characters
        if limit == 0:
            message = "chat_template is refused: this gateway takes no templates from requests"
            raise InvalidArgument.of("REQUEST_TEMPLATES_OFF", "chat_template", message)
        if len(source) > limit:
            message = f"chat_template has {len(source):,} characters; it may have {limit:,}"
            raise InvalidArgument.of("CHAT_TEMPLATE_TOO_LARGE", "chat_template", message)


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
