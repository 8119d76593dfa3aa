"""Fields that would change the answer and are not implemented: refused by name, never ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from gateway.schema import ChatMessage, CompletionRequest, GenerationBody
from shared.errors import InvalidArgument

_log = logging.getLogger(__name__)

_HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "include_reasoning",
    }
)
"""Known to clients, without effect on the text: accepted in silence."""

_UNIMPLEMENTED = frozenset(
    {
        "allowed_token_ids",
        "audio",
        "bad_words",
        "chat_template",
        "continue_final_message",
        "documents",
        "ebnf",
        "function_call",
        "functions",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "json_schema",
        "length_penalty",
        "logits_processors",
        "prediction",
        "priority",
        "prompt_embeds",
        "prompt_logprobs",
        "regex",
        "structured_outputs",
        "suffix",
        "tools",
        "truncate_prompt_tokens",
        "use_beam_search",
        "verbosity",
        "web_search_options",
    }
)

# Values that ask for what happens anyway.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "length_penalty": (1.0,),
}


def refuse_unimplemented(body: GenerationBody) -> None:
    """Logs fields nobody knows.

    Raises:
        InvalidArgument: a field asks for something the gateway cannot do; names it.
    """
    unknown = [name for name, value in body.unknown_fields.items() if not _check(name, value)]
    if unknown:
        _log.warning("ignored unknown fields: %s", ", ".join(repr(name[:64]) for name in unknown))
    if body.speculation is not None:
        for name in body.speculation.unknown_fields:
            raise _unimplemented(f"speculation.{name}")
    if isinstance(body, CompletionRequest) and body.echo and body.logprobs is not None:
        message = "echo with logprobs is not implemented; ask for one of them"
        raise InvalidArgument.of("NOT_IMPLEMENTED", "logprobs", message)


def refuse_unimplemented_message(index: int, message: ChatMessage) -> None:
    """Raises:
    InvalidArgument: the message needs tools or media.
    """
    if message.role in ("tool", "function"):
        raise _unimplemented(f"messages[{index}].role", f"role {message.role!r}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.unknown_fields.get(name):
            raise _unimplemented(f"messages[{index}].{name}")
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if part.type != "text":
                field = f"messages[{index}].content[{number}].type"
                raise _unimplemented(field, f"content of type {part.type[:64]!r}")


def _check(name: str, value: object) -> bool:
    """Returns whether the field is known and asks for nothing."""
    if name in _HARMLESS:
        return True
    if name not in _UNIMPLEMENTED and name not in _NEUTRAL:
        return False
    if value and value not in _NEUTRAL.get(name, ()):
        raise _unimplemented(name)
    return True


def _unimplemented(field: str, what: str | None = None) -> InvalidArgument:
    return InvalidArgument.of("NOT_IMPLEMENTED", field, f"{what or field} is not implemented")
