"""The JSON bodies of SGLang's and vLLM's own interfaces."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt

from gateway.openapi import Answered, SchemaCheck, TracedRound
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

TokenEntry = tuple[float | None, int, str | None]
"""Log probability, token id, and the token's text with `return_text_in_logprobs`, else null."""
Alternatives = list[TokenEntry] | None


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
    continue_final_message: Flag = False
    chat_template: str | None = None
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
    rid: str | None = Field(
        default=None, max_length=128, description="names the request, for /abort_request"
    )
    stream: Flag = False
    return_logprob: Flag | Items[bool] = False
    top_logprobs_num: int | Items[int] | None = None
    token_ids_logprob: Items[int] | Items[Items[int] | None] | None = Field(
        default=None, description="further tokens whose log probabilities are reported"
    )
    logprob_start_len: int | Items[int] | None = Field(
        default=None, description="first position of the prompt; -1: output tokens only"
    )
    return_text_in_logprobs: Flag = False
    return_routed_experts: Flag = Field(
        default=False, description="for mixtures of experts; needs --enable-return-routed-experts"
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
    rolling: Flag = Field(default=False, description="update one target after the other")


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


class LengthReached(Answered):
    """The output has reached its length limit."""

    type: Literal["length"]
    length: NonNegativeInt


class Stopped(Answered):
    """The output ended by itself, or at a stop string or stop token."""

    type: Literal["stop"]
    matched: int | str | None = Field(description="the token or the text that ended it")


class AbortedRequest(Answered):
    """The request was aborted; the output holds what was generated until then."""

    type: Literal["abort"]
    message: str


class MetaInfo(Answered):
    """Metadata of an output. The fields of speculation are absent when no tree was verified."""

    id: str
    finish_reason: LengthReached | Stopped | AbortedRequest | None
    prompt_tokens: NonNegativeInt
    completion_tokens: NonNegativeInt
    cached_tokens: NonNegativeInt
    weight_version: str = Field(default="", description="of the last token")
    weight_version_spans: list[tuple[str, NonNegativeInt]] = Field(
        default=[],
        description="each weight version and its first token; absent with a single version",
    )
    routed_experts: str = Field(
        default="",
        description="with return_routed_experts, at the end: base64 of little-endian int32 "
        "[tokens - 1, layers, experts per token]",
    )
    schema_check: SchemaCheck | None = Field(
        default=None, description="of the parts of a schema that no grammar enforces"
    )
    e2e_latency: float = Field(default=0.0, description="seconds; once the output has ended")
    input_token_logprobs: list[TokenEntry] = Field(default=[], description="with return_logprob")
    output_token_logprobs: list[TokenEntry] = Field(default=[], description="with return_logprob")
    input_top_logprobs: list[Alternatives] = Field(default=[], description="with top_logprobs_num")
    output_top_logprobs: list[Alternatives] = Field(default=[], description="with top_logprobs_num")
    input_token_ids_logprobs: list[Alternatives] = Field([], description="with token_ids_logprob")
    output_token_ids_logprobs: list[Alternatives] = Field([], description="with token_ids_logprob")
    spec_rounds: list[TracedRound] = Field(default=[], description="with speculation.trace")
    spec_verify_ct: NonNegativeInt = Field(default=0, description="rounds that verified a tree")
    spec_accept_length: float = Field(default=1.0, description="tokens per round, bonus included")
    spec_accept_rate: float = 0.0
    spec_accept_token_num: NonNegativeInt = 0
    spec_draft_token_num: NonNegativeInt = 0
    spec_accept_histogram: list[NonNegativeInt] = Field(default=[])
    spec_num_correct_drafts: NonNegativeInt = 0
    spec_num_proposed_drafts: NonNegativeInt = 0
    spec_accepted_drafts: NonNegativeInt = 0
    spec_proposed_drafts: NonNegativeInt = 0
    spec_correct_drafts_histogram: list[NonNegativeInt] = Field(default=[])


class GenerateAnswer(Answered):
    """Answer of `/generate` for one prompt; a batch gets a list of them."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: NonNegativeInt = Field(default=0, description="place in the batch; absent without one")
