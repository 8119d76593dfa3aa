import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import field_mask_pb2 as _field_mask_pb2
from shared.pb.outrider.types.v1 import sampling_pb2 as _sampling_pb2
from shared.pb.outrider.types.v1 import tensor_pb2 as _tensor_pb2
from shared.pb.outrider.types.v1 import token_tree_pb2 as _token_tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeTreeRequest(_message.Message):
    __slots__ = ("token_ids", "sampling_params", "shape", "features")
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _sampling_pb2.SamplingParams
    shape: _token_tree_pb2.TreeShape
    features: _tensor_pb2.Tensor
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams]] = ..., shape: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., features: _Optional[_Union[_tensor_pb2.Tensor]] = ...) -> None: ...

class ProposeTreeResponse(_message.Message):
    __slots__ = ("tree", "draft_duration")
    tree: _token_tree_pb2.TokenTree
    draft_duration: _duration_pb2.Duration
    def __init__(self, tree: _Optional[_Union[_token_tree_pb2.TokenTree]] = ..., draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("worker_id", "model_id", "algorithm", "sequence_count", "targets", "config", "feature_layer_indices", "feature_width", "feature_layer_width", "feature_data_type")
    worker_id: str
    model_id: str
    algorithm: str
    sequence_count: int
    targets: _containers.RepeatedCompositeFieldContainer[TargetLink]
    config: DraftConfig
    feature_layer_indices: _containers.RepeatedScalarFieldContainer[int]
    feature_width: int
    feature_layer_width: int
    feature_data_type: _tensor_pb2.DataType
    def __init__(self, worker_id: _Optional[str] = ..., model_id: _Optional[str] = ..., algorithm: _Optional[str] = ..., sequence_count: _Optional[int] = ..., targets: _Optional[_Iterable[_Union[TargetLink]]] = ..., config: _Optional[_Union[DraftConfig]] = ..., feature_layer_indices: _Optional[_Iterable[int]] = ..., feature_width: _Optional[int] = ..., feature_layer_width: _Optional[int] = ..., feature_data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ...) -> None: ...

class TargetLink(_message.Message):
    __slots__ = ("address", "attached", "attachment_id", "last_error")
    address: str
    attached: bool
    attachment_id: str
    last_error: str
    def __init__(self, address: _Optional[str] = ..., attached: _Optional[bool] = ..., attachment_id: _Optional[str] = ..., last_error: _Optional[str] = ...) -> None: ...

class DraftConfig(_message.Message):
    __slots__ = ("shape", "pinned", "outcome_budget")
    shape: _token_tree_pb2.TreeShape
    pinned: bool
    outcome_budget: int
    def __init__(self, shape: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., pinned: _Optional[bool] = ..., outcome_budget: _Optional[int] = ...) -> None: ...

class UpdateDraftConfigRequest(_message.Message):
    __slots__ = ("config", "update_mask")
    config: DraftConfig
    update_mask: _field_mask_pb2.FieldMask
    def __init__(self, config: _Optional[_Union[DraftConfig]] = ..., update_mask: _Optional[_Union[_field_mask_pb2.FieldMask]] = ...) -> None: ...

class UpdateDraftConfigResponse(_message.Message):
    __slots__ = ("config",)
    config: DraftConfig
    def __init__(self, config: _Optional[_Union[DraftConfig]] = ...) -> None: ...
