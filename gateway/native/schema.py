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
    token_ids_logprob: Items[int] | Items[Items[int] | None] | None = Field(
        default=None, description="tokens whose log probabilities are told, too"
    )
    logprob_start_len: int | Items[int] | None = Field(
        default=None, description="from this position of the prompt on; -1: of the output only"
    )
    extra_key: str | None = Field(default=None, description="SGLang's name of `cache_salt`")
    return_text_in_logprobs: Flag = False
    return_routed_experts: Flag = Field(
        default=False, description="of a mixture of experts, by --enable-return-routed-experts"
    )
    speculation: Speculation | None = None


class PauseRequest(Body):
    """Body of `/pause_generation`."""

    mode: str = Field(default="abort", description="abort, retract or in_place")


class DiskUpdate(Body):
    """Body of `/update_weights_from_disk`."""

    model_path: str = Field(description="folder that every target can read")
    load_format: str | None = Field(default=None, description="auto, safetensors or pt")
    weight_version: str | None = None
    abort_all_requests: Flag = False
    rolling: Flag = Field(default=False, description="one target after the other")


class TensorUpdate(Body):
    """Body of `/update_weights_from_tensor`."""

    serialized_named_tensors: Items[str] = Field(description="base64 of safetensors")
    load_format: str | None = Field(default=None, description="must be safetensors")
    weight_version: str | None = None


class GroupUpdate(Body):
    """Body of `/update_weights_from_distributed`."""

    names: Items[str]
    dtypes: Items[str]
    shapes: Items[Items[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = Field(default=None, description="flattened_bucket or null")
    weight_version: str | None = None


class UpdateBracket(Body):
    """Body of `/begin_weight_update` and `/end_weight_update`."""

    selector: str | None = Field(default=None, description="target or all")
    weight_version: str | None = None


class InitGroup(Body):
    """Body of `/init_weights_update_group`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str | None = Field(default=None, description="nccl or gloo; by device when unset")


class GroupName(Body):
    """Body of `/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class WeightCheck(Body):
    """Body of `/weights_checker`."""

    action: str = Field(description="checksum, snapshot, compare or reset_tensors")


class MemoryTags(Body):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`."""

    tags: Items[str] | None = Field(default=None, description="kv_cache, weights; both when unset")
