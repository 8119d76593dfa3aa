"""Answers of `/generate`, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from gateway.reference.answered import Answered, SchemaCheck, TracedRound

TokenEntry = tuple[float | None, int, str | None]
"""Log probability, id, and text where `return_text_in_logprobs` asks for it."""
Alternatives = list[TokenEntry] | None


class LengthReached(Answered):
    """The output is as long as it may be."""

    type: Literal["length"]
    length: NonNegativeInt


class Stopped(Answered):
    """The output ended."""

    type: Literal["stop"]
    matched: int | str | None = Field(description="the token or the text that ended it")


class AbortedRequest(Answered):
    """Somebody aborted the request; the output is what it had."""

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
        default=[], description="each version with its first token; where there are several"
    )
    routed_experts: str = Field(
        default="",
        description="with return_routed_experts, at the end: base64 of little-endian int32 "
        "[tokens - 1, layers, experts a token]",
    )
    schema_check: SchemaCheck | None = Field(default=None, description="of what no grammar holds")
    e2e_latency: float = Field(default=0.0, description="seconds; once the output has ended")
    input_token_logprobs: list[TokenEntry] = Field(default=[], description="with return_logprob")
    output_token_logprobs: list[TokenEntry] = Field(default=[], description="with return_logprob")
    input_top_logprobs: list[Alternatives] = Field(default=[], description="with top_logprobs_num")
    output_top_logprobs: list[Alternatives] = Field(default=[], description="with top_logprobs_num")
    input_token_ids_logprobs: list[Alternatives] = Field(
        default=[], description="with token_ids_logprob"
    )
    output_token_ids_logprobs: list[Alternatives] = Field(
        default=[], description="with token_ids_logprob"
    )
    spec_rounds: list[TracedRound] = Field(default=[], description="with speculation.trace")
    spec_verify_ct: NonNegativeInt = Field(default=0, description="rounds that verified a tree")
    spec_accept_length: float = Field(default=1.0, description="tokens a round, bonus included")
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
