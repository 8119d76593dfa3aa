"""Fields that would change the answer and are not implemented: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from gateway.notices import give_notice
from gateway.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationBody,
    Speculation,
)
from shared.errors import InvalidArgument

_MAX_TOLD = 8  # unknown fields by name


@dataclass(frozen=True, slots=True)
class KnownFields:
    """Fields that clients of an interface send and the gateway does not read.

    Attributes:
        harmless: without effect on the text; accepted in silence.
        unimplemented: refused by name unless they are null, false or empty; those that an empty
            object turns on unless they are null.
        neutral: values of further fields that ask for what happens anyway; others are refused.
    """

    harmless: frozenset[str]
    unimplemented: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @classmethod
    def of_generation(
        cls,
        harmless: frozenset[str],
        unimplemented: frozenset[str] = frozenset(),
        neutral: Mapping[str, tuple[Any, ...]] | None = None,
    ) -> Self:
        """Returns the fields of an interface that generates: what another of them reads would
        change the answer here as well."""
        refused = unimplemented | (_UNIMPLEMENTED | _OF_OTHERS) - harmless
        return cls(harmless, refused, {**_NEUTRAL, **(neutral or {})})

    def refuse(self, unknown: Mapping[str, Any], prefix: str = "") -> None:
        """Tells the client of fields that nobody knows.

        Raises:
            InvalidArgument: a field asks for something the gateway cannot do; names it.
        """
        strange = [name for name, value in unknown.items() if not self._check(name, value, prefix)]
        if strange:
            names = ", ".join(repr(prefix + name[:64]) for name in strange[:_MAX_TOLD])
            give_notice(f"unknown fields are ignored: {names}")

    def _check(self, name: str, value: object, prefix: str) -> bool:
        """Returns whether the field is known and asks for nothing."""
        if name in self.harmless:
            return True
        if name not in self.unimplemented and name not in self.neutral:
            return False
        neutral = self.neutral.get(name, ())
        is_on = any(each is True for each in neutral)  # unless it is turned off
        is_asked = value is False if is_on else value and value not in neutral
        if is_asked or (name in _ON_IF_EMPTY and value is not None):
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
        "prompt_cache_options",
        "prompt_cache_retention",
        # Fast tokenizers put no space between special tokens, whatever is asked for.
        "spaces_between_special_tokens",
    }
)

_UNIMPLEMENTED = frozenset(
    {
        "audio",
        "custom_logit_processor",
        "custom_params",
        # llama.cpp's and others' samplers, and names of theirs for what has another name here.
        "dry_multiplier",
        "dynatemp_range",
        "mirostat",
        "n_predict",
        "repeat_penalty",
        "samplers",
        "tfs_z",
        "top_a",
        "top_n_sigma",
        "typical_p",
        "xtc_probability",
        "lora",
        "n_probs",
        "post_sampling_probs",
        "response_fields",
        "t_max_predict_ms",
        # vLLM's and SGLang's: further parts of an answer, and what ends or marks it.
        "enable_response_messages",
        "previous_input_messages",
        "repetition_detection",
        "require_reasoning",
        "max_thinking_tokens",
        "return_bytes",
        "return_cached_tokens_details",
        "return_entropy",
        "return_flat_raw_output_top_logprobs",
        "return_flat_raw_top_logprobs",
        "return_indexer_topk",
        "return_input_ids_in_sglext",
        "return_meta_info",
        "return_output_ids_in_sglext",
        "return_prompt_text",
        "return_prompt_token_ids",
        "return_routed_experts",
        "return_sampling_mask",
        "return_spec_tokens_details",
        "return_weight_versions",
        "routed_experts_prompt_start",
        "routed_experts_start_len",
        "sampling_logprobs_mode",
        "task",
        "thinking_budget",
        "watermark",
        "watermarking",
        "chat_template",
        "documents",
        "ec_transfer_params",
        "kv_transfer_params",
        "function_call",
        "functions",
        "input_embeds",
        "length_penalty",
        "lora_id",
        "lora_path",
        "lora_request",
        "logits_processors",
        "moderation",
        "prompt_embeds",
        "return_hidden_states",
        "session_params",
        "suffix",
        "token_ids_logprob",
        "use_beam_search",
        "web_search_options",
    }
)

_ON_IF_EMPTY = frozenset({"web_search_options"})

_NEUTRAL = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "include_reasoning": (True,),
    "adaptive_target": (-1.0,),
    "length_penalty": (1.0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_predict": (-1,),
    "parallel_tool_calls": (True,),
    "reasoning_format": ("auto", "deepseek"),
    "repeat_penalty": (1.0,),
    "response_format": ({"type": "text"},),
    "separate_reasoning": (True,),
    "tfs_z": (1.0,),
    "tool_choice": ("auto", "none"),
    "top_n_sigma": (-1.0,),
    "typical_p": (1.0,),
}

_OF_OTHERS = (ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()) - {
    *("metadata", "model", "priority", "service_tier", "store", "stream", "stream_options")
}

_OF_THOUGHTS = frozenset({"include_reasoning", "separate_reasoning"})
CHAT_FIELDS = KnownFields.of_generation(_HARMLESS)
COMPLETION_FIELDS = KnownFields.of_generation(_HARMLESS | _OF_THOUGHTS)
"""All of a completion is text, thoughts as well."""


def refuse_unimplemented(body: GenerationBody) -> None:
    """Tells the client of fields that nobody knows.

    Raises:
        InvalidArgument: a field asks for something the gateway cannot do; names it.
    """
    known = CHAT_FIELDS if isinstance(body, ChatCompletionRequest) else COMPLETION_FIELDS
    known.refuse(body.unknown_fields)
    content = () if body.prediction is None else body.prediction.content
    for index, part in enumerate(() if isinstance(content, str) else content):
        if part.type != "text":
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
    for name in ("function_call", "audio", "prefix", "partial"):
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
