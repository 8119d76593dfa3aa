import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_RETRACT: _ClassVar[PauseMode]
    PAUSE_MODE_IN_PLACE: _ClassVar[PauseMode]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_RETRACT: PauseMode
PAUSE_MODE_IN_PLACE: PauseMode

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("service", "version", "start_time", "state", "settings", "gauges")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        STATE_UNSPECIFIED: _ClassVar[GetServerInfoResponse.State]
        STATE_STARTING: _ClassVar[GetServerInfoResponse.State]
        STATE_ACTIVE: _ClassVar[GetServerInfoResponse.State]
        STATE_DRAINING: _ClassVar[GetServerInfoResponse.State]
    STATE_UNSPECIFIED: GetServerInfoResponse.State
    STATE_STARTING: GetServerInfoResponse.State
    STATE_ACTIVE: GetServerInfoResponse.State
    STATE_DRAINING: GetServerInfoResponse.State
    class SettingsEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class GaugesEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    service: str
    version: str
    start_time: _timestamp_pb2.Timestamp
    state: GetServerInfoResponse.State
    settings: _containers.ScalarMap[str, str]
    gauges: _containers.ScalarMap[str, float]
    def __init__(self, service: _Optional[str] = ..., version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp]] = ..., state: _Optional[_Union[GetServerInfoResponse.State, str]] = ..., settings: _Optional[_Mapping[str, str]] = ..., gauges: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ListAttachmentsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAttachmentsResponse(_message.Message):
    __slots__ = ("attachments",)
    attachments: _containers.RepeatedCompositeFieldContainer[Attachment]
    def __init__(self, attachments: _Optional[_Iterable[_Union[Attachment]]] = ...) -> None: ...

class Attachment(_message.Message):
    __slots__ = ("attachment_id", "worker_id", "model_id", "algorithm", "sequence_count", "verified_round_count", "accepted_token_count", "missed_round_count", "stale_candidate_count", "attach_time", "paused_sequence_count", "wanted_step_count", "turnaround_duration", "draft_duration", "level_acceptances", "wanted_outcome_count", "warming", "wanted_topk", "wanted_draft_token_count", "idle_detail")
    attachment_id: str
    worker_id: str
    model_id: str
    algorithm: str
    sequence_count: int
    verified_round_count: int
    accepted_token_count: int
    missed_round_count: int
    stale_candidate_count: int
    attach_time: _timestamp_pb2.Timestamp
    paused_sequence_count: int
    wanted_step_count: int
    turnaround_duration: _duration_pb2.Duration
    draft_duration: _duration_pb2.Duration
    level_acceptances: _containers.RepeatedScalarFieldContainer[float]
    wanted_outcome_count: int
    warming: bool
    wanted_topk: int
    wanted_draft_token_count: int
    idle_detail: str
    def __init__(self, attachment_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., model_id: _Optional[str] = ..., algorithm: _Optional[str] = ..., sequence_count: _Optional[int] = ..., verified_round_count: _Optional[int] = ..., accepted_token_count: _Optional[int] = ..., missed_round_count: _Optional[int] = ..., stale_candidate_count: _Optional[int] = ..., attach_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp]] = ..., paused_sequence_count: _Optional[int] = ..., wanted_step_count: _Optional[int] = ..., turnaround_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., level_acceptances: _Optional[_Iterable[float]] = ..., wanted_outcome_count: _Optional[int] = ..., warming: _Optional[bool] = ..., wanted_topk: _Optional[int] = ..., wanted_draft_token_count: _Optional[int] = ..., idle_detail: _Optional[str] = ...) -> None: ...

class DrainServerRequest(_message.Message):
    __slots__ = ("grace_duration",)
    grace_duration: _duration_pb2.Duration
    def __init__(self, grace_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class DrainServerResponse(_message.Message):
    __slots__ = ("running_request_count",)
    running_request_count: int
    def __init__(self, running_request_count: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("only_when_idle",)
    only_when_idle: bool
    def __init__(self, only_when_idle: _Optional[bool] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_page_count",)
    freed_page_count: int
    def __init__(self, freed_page_count: _Optional[int] = ...) -> None: ...

class UpdateDraftWeightsRequest(_message.Message):
    __slots__ = ("model_path", "weight_version")
    model_path: str
    weight_version: str
    def __init__(self, model_path: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...

class UpdateDraftWeightsResponse(_message.Message):
    __slots__ = ("pause_duration",)
    pause_duration: _duration_pb2.Duration
    def __init__(self, pause_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class GetWeightStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetWeightStatusResponse(_message.Message):
    __slots__ = ("weight_version", "update_count", "pause_mode", "released_tags", "process_count", "waiting_request_count", "running_request_count", "max_token_count", "used_token_count", "can_release_memory", "stage_count")
    weight_version: str
    update_count: int
    pause_mode: PauseMode
    released_tags: _containers.RepeatedScalarFieldContainer[str]
    process_count: int
    waiting_request_count: int
    running_request_count: int
    max_token_count: int
    used_token_count: int
    can_release_memory: bool
    stage_count: int
    def __init__(self, weight_version: _Optional[str] = ..., update_count: _Optional[int] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ..., released_tags: _Optional[_Iterable[str]] = ..., process_count: _Optional[int] = ..., waiting_request_count: _Optional[int] = ..., running_request_count: _Optional[int] = ..., max_token_count: _Optional[int] = ..., used_token_count: _Optional[int] = ..., can_release_memory: _Optional[bool] = ..., stage_count: _Optional[int] = ...) -> None: ...

class PauseGenerationRequest(_message.Message):
    __slots__ = ("mode",)
    mode: PauseMode
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseGenerationResponse(_message.Message):
    __slots__ = ("request_count",)
    request_count: int
    def __init__(self, request_count: _Optional[int] = ...) -> None: ...

class ContinueGenerationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ContinueGenerationResponse(_message.Message):
    __slots__ = ("dropped_update",)
    dropped_update: bool
    def __init__(self, dropped_update: _Optional[bool] = ...) -> None: ...

class BeginWeightUpdateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeginWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("disk", "distributed", "safetensors", "weight_version")
    class Disk(_message.Message):
        __slots__ = ("model_path", "load_format")
        model_path: str
        load_format: str
        def __init__(self, model_path: _Optional[str] = ..., load_format: _Optional[str] = ...) -> None: ...
    class Distributed(_message.Message):
        __slots__ = ("group_name", "tensors", "is_flattened")
        group_name: str
        tensors: _containers.RepeatedCompositeFieldContainer[UpdateWeightsRequest.TensorSpec]
        is_flattened: bool
        def __init__(self, group_name: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[UpdateWeightsRequest.TensorSpec]]] = ..., is_flattened: _Optional[bool] = ...) -> None: ...
    class TensorSpec(_message.Message):
        __slots__ = ("name", "dtype", "shape")
        name: str
        dtype: str
        shape: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...
    disk: UpdateWeightsRequest.Disk
    distributed: UpdateWeightsRequest.Distributed
    safetensors: bytes
    weight_version: str
    def __init__(self, disk: _Optional[_Union[UpdateWeightsRequest.Disk]] = ..., distributed: _Optional[_Union[UpdateWeightsRequest.Distributed]] = ..., safetensors: _Optional[bytes] = ..., weight_version: _Optional[str] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("update",)
    update: WeightUpdate
    def __init__(self, update: _Optional[_Union[WeightUpdate]] = ...) -> None: ...

class WeightUpdate(_message.Message):
    __slots__ = ("weight_version", "retracted_request_count", "freed_page_count", "pause_duration")
    weight_version: str
    retracted_request_count: int
    freed_page_count: int
    pause_duration: _duration_pb2.Duration
    def __init__(self, weight_version: _Optional[str] = ..., retracted_request_count: _Optional[int] = ..., freed_page_count: _Optional[int] = ..., pause_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class EndWeightUpdateRequest(_message.Message):
    __slots__ = ("weight_version", "drop")
    weight_version: str
    drop: bool
    def __init__(self, weight_version: _Optional[str] = ..., drop: _Optional[bool] = ...) -> None: ...

class EndWeightUpdateResponse(_message.Message):
    __slots__ = ("update",)
    update: WeightUpdate
    def __init__(self, update: _Optional[_Union[WeightUpdate]] = ...) -> None: ...

class InitWeightUpdateGroupRequest(_message.Message):
    __slots__ = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str
    def __init__(self, master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., rank_offset: _Optional[int] = ..., world_size: _Optional[int] = ..., group_name: _Optional[str] = ..., backend: _Optional[str] = ...) -> None: ...

class InitWeightUpdateGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DestroyWeightUpdateGroupRequest(_message.Message):
    __slots__ = ("group_name",)
    group_name: str
    def __init__(self, group_name: _Optional[str] = ...) -> None: ...

class DestroyWeightUpdateGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckWeightsRequest(_message.Message):
    __slots__ = ("action",)
    class Action(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ACTION_UNSPECIFIED: _ClassVar[CheckWeightsRequest.Action]
        ACTION_CHECKSUM: _ClassVar[CheckWeightsRequest.Action]
        ACTION_SNAPSHOT: _ClassVar[CheckWeightsRequest.Action]
        ACTION_COMPARE: _ClassVar[CheckWeightsRequest.Action]
        ACTION_RESET: _ClassVar[CheckWeightsRequest.Action]
    ACTION_UNSPECIFIED: CheckWeightsRequest.Action
    ACTION_CHECKSUM: CheckWeightsRequest.Action
    ACTION_SNAPSHOT: CheckWeightsRequest.Action
    ACTION_COMPARE: CheckWeightsRequest.Action
    ACTION_RESET: CheckWeightsRequest.Action
    action: CheckWeightsRequest.Action
    def __init__(self, action: _Optional[_Union[CheckWeightsRequest.Action, str]] = ...) -> None: ...

class CheckWeightsResponse(_message.Message):
    __slots__ = ("checksums", "changed")
    class ChecksumsEntry(_message.Message):
        __slots__ = ("key", "value")
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    checksums: _containers.ScalarMap[str, str]
    changed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checksums: _Optional[_Mapping[str, str]] = ..., changed: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseMemoryRequest(_message.Message):
    __slots__ = ("tags",)
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseMemoryResponse(_message.Message):
    __slots__ = ("freed_bytes", "kept")
    freed_bytes: int
    kept: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, freed_bytes: _Optional[int] = ..., kept: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeMemoryRequest(_message.Message):
    __slots__ = ("tags",)
    tags: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tags: _Optional[_Iterable[str]] = ...) -> None: ...

class ResumeMemoryResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
