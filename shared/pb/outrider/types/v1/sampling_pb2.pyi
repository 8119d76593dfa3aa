from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "thinking")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenRun]
    thinking: ThinkingBudget
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenRun]]] = ..., thinking: _Optional[_Union[ThinkingBudget]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("max_tokens", "end_token_id", "start_token_id")
    max_tokens: int
    end_token_id: int
    start_token_id: int
    def __init__(self, max_tokens: _Optional[int] = ..., end_token_id: _Optional[int] = ..., start_token_id: _Optional[int] = ...) -> None: ...

class TokenRun(_message.Message):
    __slots__ = ("token_ids",)
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StopParams(_message.Message):
    __slots__ = ("max_output_token_count", "min_output_token_count", "stop_token_ids", "ignore_eos")
    max_output_token_count: int
    min_output_token_count: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    def __init__(self, max_output_token_count: _Optional[int] = ..., min_output_token_count: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...
