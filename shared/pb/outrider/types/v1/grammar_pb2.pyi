from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "ebnf", "choices", "structural_tag")
    json_schema: str
    regex: str
    ebnf: str
    choices: TextChoices
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., ebnf: _Optional[str] = ..., choices: _Optional[_Union[TextChoices]] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class TextChoices(_message.Message):
    __slots__ = ("texts",)
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...
