from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class TokenTree(_message.Message):
    __slots__ = ("token_ids", "parent_indices", "log_probs")
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_indices: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parent_indices: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class TreeShape(_message.Message):
    __slots__ = ("step_count", "topk", "draft_token_count")
    step_count: int
    topk: int
    draft_token_count: int
    def __init__(self, step_count: _Optional[int] = ..., topk: _Optional[int] = ..., draft_token_count: _Optional[int] = ...) -> None: ...
