"""The JSON bodies of SGLang's and vLLM's own interfaces."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gateway.schema import (
    Body,
    ChatMessage,
    Flag,
    Items,
    SamplingFields,
    ServingFields,
    Speculation,
    ToolDefinition,
)


class TokenizeRequest(Body):
    """Body of `/tokenize`: `prompt`, or `messages` through the chat template.

    `add_special_tokens` is true for a prompt and has no effect on messages: a chat template
    writes the special tokens itself.
    """

    model: str | None = None
    prompt: str | Items[str] | None = None
    messages: Items[ChatMessage] | None = None
    tools: Items[ToolDefinition] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: Flag = False


class DetokenizeRequest(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool | None = Field(default=None, description="true by default")


class AbortRequest(Body):
    """Body of `/abort_request`."""

    rid: str | None = Field(default=None, description="`rid`, `id` or `x-request-id` of a request")
    abort_all: Flag = False


class NativeSampling(SamplingFields):
    """`sampling_params` of `/generate`, by SGLang's names."""

    max_new_tokens: int | None = Field(default=None, description="128 by default")
    min_new_tokens: int | None = Field(default=None, description="SGLang's name of `min_tokens`")
    sampling_seed: int | None = Field(default=None, description="SGLang's name of `seed`")
    n: int | None = None
    regex: str | None = None
    ebnf: str | None = Field(default=None, description="GBNF, EBNF or Lark")
    json_schema: dict[str, Any] | str | None = None
    structural_tag: dict[str, Any] | str | None = None


class GenerateRequest(ServingFields):
    """Body of `/generate`: one prompt or a batch, as `text` or as `input_ids`."""

    model: str | None = None
    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    sampling_params: NativeSampling | Items[NativeSampling] | None = None
    rid: str | None = Field(default=None, description="names the request, for /abort_request")
    stream: Flag = False
    return_logprob: Flag | Items[bool] = False
    top_logprobs_num: int | Items[int] | None = None
    logprob_start_len: int | Items[int] | None = Field(
        default=None, description="from this position of the prompt on; -1: of the output only"
    )
    extra_key: str | None = Field(default=None, description="SGLang's name of `cache_salt`")
    return_text_in_logprobs: Flag = False
    speculation: Speculation | None = None
