"""Bounds of one request: what a client may ask for, and what it may cost in memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Everything here is refused by name when exceeded.

    Attributes:
        max_body_bytes: of an HTTP request body.
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
    max_template_characters: int = 0
    max_choices: int = 128
    max_prompts: int = 1024
    max_generations: int = 1024
    max_stop_strings: int = 16
    max_stop_characters: int = 1024
    max_unread_tokens: int = 8192
    request_timeout_s: float | None = None
