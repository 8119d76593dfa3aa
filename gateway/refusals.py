"""Fields that would change the answer and are not implemented: refused by name, never ignored."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.notices import give_notice
from gateway.schema import ChatMessage, ContentPart, GenerationBody, Speculation
from shared.errors import InvalidArgument

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Fields that clients of an interface send and the gateway does not read.

    Attributes:
        harmless: without effect on the text; accepted in silence.
        unimplemented: refused by name unless they are null, false or empty.
        neutral: values of further fields that ask for what happens anyway; others are refused.
    """

    harmless: frozenset[str]
    unimplemented: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def refuse(self, unknown: Mapping[str, Any], prefix: str = "") -> None:
        """Logs fields nobody knows.

        Raises:
            InvalidArgument: a field asks for something the gateway cannot do; names it.
        """
        strange = [name for name, value in unknown.items() if not self._check(name, value, prefix)]
        if strange:
            names = ", ".join(repr(name[:64]) for name in strange)
            _log.warning("ignored unknown fields: %s", names)

    def _check(self, name: str, value: object, prefix: str) -> bool:
        """Returns whether the field is known and asks for nothing."""
        if name in self.harmless:
            return True
        if name not in self.unimplemented and name not in self.neutral:
            return False
        if value and value not in self.neutral.get(name, ()):
            raise unimplemented(prefix + name)
        return True


_HARMLESS = frozenset(
    {
        "user",
        "store",
        "metadata",
        "stream_reasoning",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)

_UNIMPLEMENTED = frozenset(
    {
        "audio",
        "custom_logit_processor",
        "custom_params",
        "chat_template",
        "documents",
        "echo",
        "function_call",
        "functions",
        "input_embeds",
        "length_penalty",
        "lora_id",
        "lora_path",
        "lora_request",
        "logits_processors",
        "prompt_embeds",
        "return_hidden_states",
        "session_params",
        "suffix",
        "token_ids_logprob",
        "use_beam_search",
        "web_search_options",
    }
)

OPENAI_FIELDS = KnownFields(
    _HARMLESS,
    _UNIMPLEMENTED,
    {
        "modalities": (["text"],),
        "length_penalty": (1.0,),
    },
)


def refuse_unimplemented(body: GenerationBody) -> None:
    """Logs fields nobody knows.

    Raises:
        InvalidArgument: a field asks for something the gateway cannot do; names it.
    """
    OPENAI_FIELDS.refuse(body.unknown_fields)
    parts = () if body.prediction is None else body.prediction.content
    for index, part in enumerate(parts):
        if isinstance(part, ContentPart) and part.type != "text":
            name = f"prediction.content[{index}].type"
            raise unimplemented(name, f"content of type {part.type[:64]!r}")
    if body.speculation is not None:
        for name in body.speculation.unknown_fields:
            raise unimplemented(f"speculation.{name}")


def leave_out_hosted(field: str, kind: str) -> None:
    """Tells that a tool which its maker's own servers run is left out: the model may answer without
    it, and agents bring it with every request."""
    give_notice(f"{field} is left out: tools of type {kind[:64]!r} are not run here")


def refuse_rounds(speculation: Speculation | None) -> None:
    """Raises:
    InvalidArgument: an interface whose answers have no place for rounds is asked for them.
    """
    if speculation is not None and speculation.trace:
        raise unimplemented("speculation.trace", "speculation.trace in this interface")


def refuse_unimplemented_message(index: int, message: ChatMessage) -> None:
    """Raises:
    InvalidArgument: the message needs media, or an interface of calls that is no more.
    """
    if message.role == "function":
        raise unimplemented(f"messages[{index}].role", f"role {message.role!r}")
    for name in ("function_call", "audio"):
        if message.unknown_fields.get(name):
            raise unimplemented(f"messages[{index}].{name}")
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if part.type != "text":
                name = f"messages[{index}].content[{number}].type"
                raise unimplemented(name, f"content of type {part.type[:64]!r}")


def unimplemented(field: str, what: str | None = None) -> InvalidArgument:
    """Returns the refusal of a field; `what` says more than its name."""
    return InvalidArgument.of("NOT_IMPLEMENTED", field, f"{what or field} is not implemented")
