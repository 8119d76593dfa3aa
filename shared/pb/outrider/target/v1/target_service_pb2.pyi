import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from shared.pb.outrider.types.v1 import grammar_pb2 as _grammar_pb2
from shared.pb.outrider.types.v1 import sampling_pb2 as _sampling_pb2
from shared.pb.outrider.types.v1 import token_tree_pb2 as _token_tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_CANCELLED: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_CANCELLED: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "sampling_params", "stop_params", "top_logprob_count", "speculation_params", "grammar", "priority", "logprobs_after_temperature", "prompt_logprob_params", "cache_salt", "predicted_token_ids", "logprob_token_ids", "return_routed_experts")
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _sampling_pb2.SamplingParams
    stop_params: _sampling_pb2.StopParams
    top_logprob_count: int
    speculation_params: SpeculationParams
    grammar: _grammar_pb2.Grammar
    priority: int
    logprobs_after_temperature: bool
    prompt_logprob_params: PromptLogprobParams
    cache_salt: str
    predicted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    return_routed_experts: bool
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams]] = ..., stop_params: _Optional[_Union[_sampling_pb2.StopParams]] = ..., top_logprob_count: _Optional[int] = ..., speculation_params: _Optional[_Union[SpeculationParams]] = ..., grammar: _Optional[_Union[_grammar_pb2.Grammar]] = ..., priority: _Optional[int] = ..., logprobs_after_temperature: _Optional[bool] = ..., prompt_logprob_params: _Optional[_Union[PromptLogprobParams]] = ..., cache_salt: _Optional[str] = ..., predicted_token_ids: _Optional[_Iterable[int]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., return_routed_experts: _Optional[bool] = ...) -> None: ...

class PromptLogprobParams(_message.Message):
    __slots__ = ("start_position", "top_logprob_count")
    start_position: int
    top_logprob_count: int
    def __init__(self, start_position: _Optional[int] = ..., top_logprob_count: _Optional[int] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("disabled", "trace", "algorithm", "step_count", "outcome_budget", "draft_token_count", "never_learnt")
    disabled: bool
    trace: bool
    algorithm: str
    step_count: int
    outcome_budget: int
    draft_token_count: int
    never_learnt: bool
    def __init__(self, disabled: _Optional[bool] = ..., trace: _Optional[bool] = ..., algorithm: _Optional[str] = ..., step_count: _Optional[int] = ..., outcome_budget: _Optional[int] = ..., draft_token_count: _Optional[int] = ..., never_learnt: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "delta", "finished", "prompt_logprobs")
    started: GenerationStarted
    delta: TokenDelta
    finished: GenerationFinished
    prompt_logprobs: PromptLogprobs
    def __init__(self, started: _Optional[_Union[GenerationStarted]] = ..., delta: _Optional[_Union[TokenDelta]] = ..., finished: _Optional[_Union[GenerationFinished]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("submit", "cancel")
    submit: Submit
    cancel: Cancel
    def __init__(self, submit: _Optional[_Union[Submit]] = ..., cancel: _Optional[_Union[Cancel]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "request", "trace_request_id", "traceparent", "timeout_duration")
    request_id: int
    request: GenerateRequest
    trace_request_id: str
    traceparent: str
    timeout_duration: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[int] = ..., request: _Optional[_Union[GenerateRequest]] = ..., trace_request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., timeout_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id",)
    request_id: int
    def __init__(self, request_id: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("events", "deltas")
    events: _containers.RepeatedCompositeFieldContainer[SessionEvent]
    deltas: TokenDeltas
    def __init__(self, events: _Optional[_Iterable[_Union[SessionEvent]]] = ..., deltas: _Optional[_Union[TokenDeltas]] = ...) -> None: ...

class TokenDeltas(_message.Message):
    __slots__ = ("request_ids", "token_counts", "token_ids", "accepted_token_counts", "drafted_token_counts")
    request_ids: _containers.RepeatedScalarFieldContainer[int]
    token_counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_token_counts: _containers.RepeatedScalarFieldContainer[int]
    drafted_token_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_ids: _Optional[_Iterable[int]] = ..., token_counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., accepted_token_counts: _Optional[_Iterable[int]] = ..., drafted_token_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("request_id", "response", "failure")
    request_id: int
    response: GenerateResponse
    failure: RequestFailure
    def __init__(self, request_id: _Optional[int] = ..., response: _Optional[_Union[GenerateResponse]] = ..., failure: _Optional[_Union[RequestFailure]] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_delay")
    code: int
    reason: str
    message: str
    field: str
    retry_delay: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_delay: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("cached_token_count", "queue_duration")
    cached_token_count: int
    queue_duration: _duration_pb2.Duration
    def __init__(self, cached_token_count: _Optional[int] = ..., queue_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class TokenDelta(_message.Message):
    __slots__ = ("token_ids", "logprobs", "accepted_token_count", "drafted_token_count", "trace", "weight_version")
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    accepted_token_count: int
    drafted_token_count: int
    trace: RoundTrace
    weight_version: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs]]] = ..., accepted_token_count: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., trace: _Optional[_Union[RoundTrace]] = ..., weight_version: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start_position", "logprobs")
    start_position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, start_position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs]]] = ...) -> None: ...

class RoundTrace(_message.Message):
    __slots__ = ("round", "tree", "accepted_node_indices", "row_count", "verify_duration", "wait_duration", "draft_duration", "algorithm")
    round: int
    tree: _token_tree_pb2.TokenTree
    accepted_node_indices: _containers.RepeatedScalarFieldContainer[int]
    row_count: int
    verify_duration: _duration_pb2.Duration
    wait_duration: _duration_pb2.Duration
    draft_duration: _duration_pb2.Duration
    algorithm: str
    def __init__(self, round: _Optional[int] = ..., tree: _Optional[_Union[_token_tree_pb2.TokenTree]] = ..., accepted_node_indices: _Optional[_Iterable[int]] = ..., row_count: _Optional[int] = ..., verify_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., algorithm: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("log_prob", "rank", "top_token_ids", "top_log_probs")
    log_prob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, log_prob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class GenerationFinished(_message.Message):
    __slots__ = ("finish_reason", "prompt_token_count", "output_token_count", "cached_token_count", "speculation", "stop_token_id", "routed_experts")
    finish_reason: FinishReason
    prompt_token_count: int
    output_token_count: int
    cached_token_count: int
    speculation: SpeculationStats
    stop_token_id: int
    routed_experts: bytes
    def __init__(self, finish_reason: _Optional[_Union[FinishReason, str]] = ..., prompt_token_count: _Optional[int] = ..., output_token_count: _Optional[int] = ..., cached_token_count: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationStats]] = ..., stop_token_id: _Optional[int] = ..., routed_experts: _Optional[bytes] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("round_count", "drafted_token_count", "accepted_token_count", "missed_round_count", "acceptance_histogram", "verified_round_count")
    round_count: int
    drafted_token_count: int
    accepted_token_count: int
    missed_round_count: int
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    verified_round_count: int
    def __init__(self, round_count: _Optional[int] = ..., drafted_token_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., missed_round_count: _Optional[int] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., verified_round_count: _Optional[int] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model_id", "tokenizer_sha256", "max_context_token_count", "vocab_size", "eos_token_ids", "draft_algorithms", "speculation_detail", "weight_version", "output_fingerprint", "weight_changes")
    model_id: str
    tokenizer_sha256: str
    max_context_token_count: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    draft_algorithms: _containers.RepeatedScalarFieldContainer[str]
    speculation_detail: str
    weight_version: str
    output_fingerprint: str
    weight_changes: _containers.RepeatedCompositeFieldContainer[WeightChange]
    def __init__(self, model_id: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., max_context_token_count: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., draft_algorithms: _Optional[_Iterable[str]] = ..., speculation_detail: _Optional[str] = ..., weight_version: _Optional[str] = ..., output_fingerprint: _Optional[str] = ..., weight_changes: _Optional[_Iterable[_Union[WeightChange]]] = ...) -> None: ...

class WeightChange(_message.Message):
    __slots__ = ("change_time", "algorithm", "weight_version")
    change_time: _timestamp_pb2.Timestamp
    algorithm: str
    weight_version: str
    def __init__(self, change_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp]] = ..., algorithm: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...
