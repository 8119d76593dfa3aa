import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from shared.pb.outrider.types.v1 import sampling_pb2 as _sampling_pb2
from shared.pb.outrider.types.v1 import tensor_pb2 as _tensor_pb2
from shared.pb.outrider.types.v1 import token_tree_pb2 as _token_tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Table(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TABLE_UNSPECIFIED: _ClassVar[Table]
    TABLE_EMBEDDING: _ClassVar[Table]
    TABLE_LM_HEAD: _ClassVar[Table]

class VerificationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFICATION_MODE_UNSPECIFIED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_COUPLED: _ClassVar[VerificationMode]
    VERIFICATION_MODE_POINT_MASS: _ClassVar[VerificationMode]
TABLE_UNSPECIFIED: Table
TABLE_EMBEDDING: Table
TABLE_LM_HEAD: Table
VERIFICATION_MODE_UNSPECIFIED: VerificationMode
VERIFICATION_MODE_COUPLED: VerificationMode
VERIFICATION_MODE_POINT_MASS: VerificationMode

class ReadTableRequest(_message.Message):
    __slots__ = ("table", "data_type", "update_count")
    table: Table
    data_type: _tensor_pb2.DataType
    update_count: int
    def __init__(self, table: _Optional[_Union[Table, str]] = ..., data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., update_count: _Optional[int] = ...) -> None: ...

class ReadTableResponse(_message.Message):
    __slots__ = ("rows",)
    rows: _tensor_pb2.Tensor
    def __init__(self, rows: _Optional[_Union[_tensor_pb2.Tensor]] = ...) -> None: ...

class SpeculateRequest(_message.Message):
    __slots__ = ("attach", "candidates", "release", "feature_ring_taken", "weights_updated", "mapped_head_ready")
    attach: Attach
    candidates: CandidateBatch
    release: Release
    feature_ring_taken: FeatureRingTaken
    weights_updated: DraftWeightsUpdated
    mapped_head_ready: MappedHeadReady
    def __init__(self, attach: _Optional[_Union[Attach]] = ..., candidates: _Optional[_Union[CandidateBatch]] = ..., release: _Optional[_Union[Release]] = ..., feature_ring_taken: _Optional[_Union[FeatureRingTaken]] = ..., weights_updated: _Optional[_Union[DraftWeightsUpdated]] = ..., mapped_head_ready: _Optional[_Union[MappedHeadReady]] = ...) -> None: ...

class SpeculateResponse(_message.Message):
    __slots__ = ("attached", "opened", "verdicts", "feature_chunk", "closed", "drain", "weights_updated", "mapped_head")
    attached: Attached
    opened: SequenceOpenedBatch
    verdicts: VerdictBatch
    feature_chunk: FeatureChunk
    closed: SequenceClosedBatch
    drain: Drain
    weights_updated: WeightsUpdated
    mapped_head: MappedHeadCommand
    def __init__(self, attached: _Optional[_Union[Attached]] = ..., opened: _Optional[_Union[SequenceOpenedBatch]] = ..., verdicts: _Optional[_Union[VerdictBatch]] = ..., feature_chunk: _Optional[_Union[FeatureChunk]] = ..., closed: _Optional[_Union[SequenceClosedBatch]] = ..., drain: _Optional[_Union[Drain]] = ..., weights_updated: _Optional[_Union[WeightsUpdated]] = ..., mapped_head: _Optional[_Union[MappedHeadCommand]] = ...) -> None: ...

class WeightsUpdated(_message.Message):
    __slots__ = ("update_count", "weight_version")
    update_count: int
    weight_version: str
    def __init__(self, update_count: _Optional[int] = ..., weight_version: _Optional[str] = ...) -> None: ...

class DraftWeightsUpdated(_message.Message):
    __slots__ = ("weight_version",)
    weight_version: str
    def __init__(self, weight_version: _Optional[str] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("worker_id", "model_id", "tokenizer_sha256", "max_sequence_count", "max_node_count", "feature_spec", "algorithm", "max_context_token_count", "shape", "feature_ring", "learns", "mapped_head")
    worker_id: str
    model_id: str
    tokenizer_sha256: str
    max_sequence_count: int
    max_node_count: int
    feature_spec: FeatureSpec
    algorithm: str
    max_context_token_count: int
    shape: _token_tree_pb2.TreeShape
    feature_ring: FeatureRingOffer
    learns: bool
    mapped_head: MappedHeadOffer
    def __init__(self, worker_id: _Optional[str] = ..., model_id: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., max_sequence_count: _Optional[int] = ..., max_node_count: _Optional[int] = ..., feature_spec: _Optional[_Union[FeatureSpec]] = ..., algorithm: _Optional[str] = ..., max_context_token_count: _Optional[int] = ..., shape: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., feature_ring: _Optional[_Union[FeatureRingOffer]] = ..., learns: _Optional[bool] = ..., mapped_head: _Optional[_Union[MappedHeadOffer]] = ...) -> None: ...

class MappedHeadOffer(_message.Message):
    __slots__ = ("host_id", "device_id", "page_size", "vocab_size", "max_context_token_count", "shape_pinned", "outcome_count")
    host_id: str
    device_id: str
    page_size: int
    vocab_size: int
    max_context_token_count: int
    shape_pinned: bool
    outcome_count: int
    def __init__(self, host_id: _Optional[str] = ..., device_id: _Optional[str] = ..., page_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_context_token_count: _Optional[int] = ..., shape_pinned: _Optional[bool] = ..., outcome_count: _Optional[int] = ...) -> None: ...

class MappedHeadReady(_message.Message):
    __slots__ = ("pages",)
    pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pages: _Optional[_Iterable[int]] = ...) -> None: ...

class MappedHeadCommand(_message.Message):
    __slots__ = ("open", "prepare", "round")
    open: MappedHeadOpen
    prepare: MappedHeadPrepare
    round: MappedHeadRound
    def __init__(self, open: _Optional[_Union[MappedHeadOpen]] = ..., prepare: _Optional[_Union[MappedHeadPrepare]] = ..., round: _Optional[_Union[MappedHeadRound]] = ...) -> None: ...

class MappedHeadOpen(_message.Message):
    __slots__ = ("shared_file", "cuda_ipc_handle", "feature_shared_file", "feature_cuda_ipc_handle", "feature_start_bytes", "feature_row_count", "last_round", "shapes")
    shared_file: str
    cuda_ipc_handle: bytes
    feature_shared_file: str
    feature_cuda_ipc_handle: bytes
    feature_start_bytes: int
    feature_row_count: int
    last_round: int
    shapes: _containers.RepeatedCompositeFieldContainer[MappedHeadShape]
    def __init__(self, shared_file: _Optional[str] = ..., cuda_ipc_handle: _Optional[bytes] = ..., feature_shared_file: _Optional[str] = ..., feature_cuda_ipc_handle: _Optional[bytes] = ..., feature_start_bytes: _Optional[int] = ..., feature_row_count: _Optional[int] = ..., last_round: _Optional[int] = ..., shapes: _Optional[_Iterable[_Union[MappedHeadShape]]] = ...) -> None: ...

class MappedHeadShape(_message.Message):
    __slots__ = ("tree", "row_count", "max_kv_length", "max_sequence_count", "outcome_count")
    tree: _token_tree_pb2.TreeShape
    row_count: int
    max_kv_length: int
    max_sequence_count: int
    outcome_count: int
    def __init__(self, tree: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., row_count: _Optional[int] = ..., max_kv_length: _Optional[int] = ..., max_sequence_count: _Optional[int] = ..., outcome_count: _Optional[int] = ...) -> None: ...

class MappedHeadPrepare(_message.Message):
    __slots__ = ("shape_number", "slot_count", "sampling_kind", "last")
    shape_number: int
    slot_count: int
    sampling_kind: int
    last: bool
    def __init__(self, shape_number: _Optional[int] = ..., slot_count: _Optional[int] = ..., sampling_kind: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class MappedHeadRound(_message.Message):
    __slots__ = ("shape_number", "slot_count", "sampling_kind", "backlogs", "ahead", "open_shape_number")
    shape_number: int
    slot_count: int
    sampling_kind: int
    backlogs: _containers.RepeatedCompositeFieldContainer[MappedHeadBacklog]
    ahead: bool
    open_shape_number: int
    def __init__(self, shape_number: _Optional[int] = ..., slot_count: _Optional[int] = ..., sampling_kind: _Optional[int] = ..., backlogs: _Optional[_Iterable[_Union[MappedHeadBacklog]]] = ..., ahead: _Optional[bool] = ..., open_shape_number: _Optional[int] = ...) -> None: ...

class MappedHeadBacklog(_message.Message):
    __slots__ = ("token_ids", "start", "end", "pages", "head_pages")
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    end: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    head_pages: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., head_pages: _Optional[_Iterable[int]] = ...) -> None: ...

class FeatureRingOffer(_message.Message):
    __slots__ = ("host_id", "reads_cuda")
    host_id: str
    reads_cuda: bool
    def __init__(self, host_id: _Optional[str] = ..., reads_cuda: _Optional[bool] = ...) -> None: ...

class FeatureRing(_message.Message):
    __slots__ = ("shared_file", "cuda_ipc_handle", "row_count")
    shared_file: str
    cuda_ipc_handle: bytes
    row_count: int
    def __init__(self, shared_file: _Optional[str] = ..., cuda_ipc_handle: _Optional[bytes] = ..., row_count: _Optional[int] = ...) -> None: ...

class RingRows(_message.Message):
    __slots__ = ("start", "row_count")
    start: int
    row_count: int
    def __init__(self, start: _Optional[int] = ..., row_count: _Optional[int] = ...) -> None: ...

class FeatureRingTaken(_message.Message):
    __slots__ = ("end",)
    end: int
    def __init__(self, end: _Optional[int] = ...) -> None: ...

class FeatureSpec(_message.Message):
    __slots__ = ("layer_indices", "data_type", "projection")
    layer_indices: _containers.RepeatedScalarFieldContainer[int]
    data_type: _tensor_pb2.DataType
    projection: _tensor_pb2.Tensor
    def __init__(self, layer_indices: _Optional[_Iterable[int]] = ..., data_type: _Optional[_Union[_tensor_pb2.DataType, str]] = ..., projection: _Optional[_Union[_tensor_pb2.Tensor]] = ...) -> None: ...

class Attached(_message.Message):
    __slots__ = ("attachment_id", "max_node_count", "max_sequence_count", "candidate_wait_duration", "feature_width", "verification_mode", "max_context_token_count", "vocab_size", "max_conditional_candidate_count", "feature_ring", "candidate_shapes")
    attachment_id: str
    max_node_count: int
    max_sequence_count: int
    candidate_wait_duration: _duration_pb2.Duration
    feature_width: int
    verification_mode: VerificationMode
    max_context_token_count: int
    vocab_size: int
    max_conditional_candidate_count: int
    feature_ring: FeatureRing
    candidate_shapes: _containers.RepeatedCompositeFieldContainer[_token_tree_pb2.TreeShape]
    def __init__(self, attachment_id: _Optional[str] = ..., max_node_count: _Optional[int] = ..., max_sequence_count: _Optional[int] = ..., candidate_wait_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., feature_width: _Optional[int] = ..., verification_mode: _Optional[_Union[VerificationMode, str]] = ..., max_context_token_count: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_conditional_candidate_count: _Optional[int] = ..., feature_ring: _Optional[_Union[FeatureRing]] = ..., candidate_shapes: _Optional[_Iterable[_Union[_token_tree_pb2.TreeShape]]] = ...) -> None: ...

class SequenceOpenedBatch(_message.Message):
    __slots__ = ("sequences",)
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceOpened]
    def __init__(self, sequences: _Optional[_Iterable[_Union[SequenceOpened]]] = ...) -> None: ...

class SequenceOpened(_message.Message):
    __slots__ = ("sequence_id", "token_ids", "sampling_params", "round", "prompt_token_count", "wanted_shape", "paused", "trace_request_id", "traceparent", "wanted_outcome_count", "cache_salt")
    sequence_id: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _sampling_pb2.SamplingParams
    round: int
    prompt_token_count: int
    wanted_shape: _token_tree_pb2.TreeShape
    paused: bool
    trace_request_id: str
    traceparent: str
    wanted_outcome_count: int
    cache_salt: str
    def __init__(self, sequence_id: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_sampling_pb2.SamplingParams]] = ..., round: _Optional[int] = ..., prompt_token_count: _Optional[int] = ..., wanted_shape: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., paused: _Optional[bool] = ..., trace_request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., wanted_outcome_count: _Optional[int] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class CandidateBatch(_message.Message):
    __slots__ = ("draft_duration", "pinned_shape", "warming", "sequence_ids", "rounds", "committed_token_counts", "node_offsets", "token_ids", "parent_indices", "log_probs", "candidate_ids", "condition_bonus_token_ids", "condition_node_indices", "condition_candidate_ids", "shapes", "shape_numbers")
    draft_duration: _duration_pb2.Duration
    pinned_shape: _token_tree_pb2.TreeShape
    warming: bool
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    rounds: _containers.RepeatedScalarFieldContainer[int]
    committed_token_counts: _containers.RepeatedScalarFieldContainer[int]
    node_offsets: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parent_indices: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    candidate_ids: _containers.RepeatedScalarFieldContainer[int]
    condition_bonus_token_ids: _containers.RepeatedScalarFieldContainer[int]
    condition_node_indices: _containers.RepeatedScalarFieldContainer[int]
    condition_candidate_ids: _containers.RepeatedScalarFieldContainer[int]
    shapes: _containers.RepeatedCompositeFieldContainer[_token_tree_pb2.TreeShape]
    shape_numbers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, draft_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ..., pinned_shape: _Optional[_Union[_token_tree_pb2.TreeShape]] = ..., warming: _Optional[bool] = ..., sequence_ids: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Iterable[int]] = ..., committed_token_counts: _Optional[_Iterable[int]] = ..., node_offsets: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., parent_indices: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., candidate_ids: _Optional[_Iterable[int]] = ..., condition_bonus_token_ids: _Optional[_Iterable[int]] = ..., condition_node_indices: _Optional[_Iterable[int]] = ..., condition_candidate_ids: _Optional[_Iterable[int]] = ..., shapes: _Optional[_Iterable[_Union[_token_tree_pb2.TreeShape]]] = ..., shape_numbers: _Optional[_Iterable[int]] = ...) -> None: ...

class VerdictBatch(_message.Message):
    __slots__ = ("sequence_ids", "rounds", "outcomes", "committed_token_counts", "committed_offsets", "committed_token_ids", "accepted_offsets", "accepted_node_indices", "candidate_ids", "next_candidate_ids", "wanted_shapes", "wanted_shape_numbers", "paused", "wanted_outcome_counts", "feature_row_counts", "feature_ring_starts", "features", "runner_up_offsets", "runner_up_token_ids", "runner_up_log_probs")
    class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        OUTCOME_UNSPECIFIED: _ClassVar[VerdictBatch.Outcome]
        OUTCOME_VERIFIED: _ClassVar[VerdictBatch.Outcome]
        OUTCOME_MISSED: _ClassVar[VerdictBatch.Outcome]
        OUTCOME_STALE: _ClassVar[VerdictBatch.Outcome]
        OUTCOME_VERIFIED_NEXT_READY: _ClassVar[VerdictBatch.Outcome]
    OUTCOME_UNSPECIFIED: VerdictBatch.Outcome
    OUTCOME_VERIFIED: VerdictBatch.Outcome
    OUTCOME_MISSED: VerdictBatch.Outcome
    OUTCOME_STALE: VerdictBatch.Outcome
    OUTCOME_VERIFIED_NEXT_READY: VerdictBatch.Outcome
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    rounds: _containers.RepeatedScalarFieldContainer[int]
    outcomes: _containers.RepeatedScalarFieldContainer[VerdictBatch.Outcome]
    committed_token_counts: _containers.RepeatedScalarFieldContainer[int]
    committed_offsets: _containers.RepeatedScalarFieldContainer[int]
    committed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    accepted_offsets: _containers.RepeatedScalarFieldContainer[int]
    accepted_node_indices: _containers.RepeatedScalarFieldContainer[int]
    candidate_ids: _containers.RepeatedScalarFieldContainer[int]
    next_candidate_ids: _containers.RepeatedScalarFieldContainer[int]
    wanted_shapes: _containers.RepeatedCompositeFieldContainer[_token_tree_pb2.TreeShape]
    wanted_shape_numbers: _containers.RepeatedScalarFieldContainer[int]
    paused: _containers.RepeatedScalarFieldContainer[bool]
    wanted_outcome_counts: _containers.RepeatedScalarFieldContainer[int]
    feature_row_counts: _containers.RepeatedScalarFieldContainer[int]
    feature_ring_starts: _containers.RepeatedScalarFieldContainer[int]
    features: _tensor_pb2.Tensor
    runner_up_offsets: _containers.RepeatedScalarFieldContainer[int]
    runner_up_token_ids: _containers.RepeatedScalarFieldContainer[int]
    runner_up_log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ..., rounds: _Optional[_Iterable[int]] = ..., outcomes: _Optional[_Iterable[_Union[VerdictBatch.Outcome, str]]] = ..., committed_token_counts: _Optional[_Iterable[int]] = ..., committed_offsets: _Optional[_Iterable[int]] = ..., committed_token_ids: _Optional[_Iterable[int]] = ..., accepted_offsets: _Optional[_Iterable[int]] = ..., accepted_node_indices: _Optional[_Iterable[int]] = ..., candidate_ids: _Optional[_Iterable[int]] = ..., next_candidate_ids: _Optional[_Iterable[int]] = ..., wanted_shapes: _Optional[_Iterable[_Union[_token_tree_pb2.TreeShape]]] = ..., wanted_shape_numbers: _Optional[_Iterable[int]] = ..., paused: _Optional[_Iterable[bool]] = ..., wanted_outcome_counts: _Optional[_Iterable[int]] = ..., feature_row_counts: _Optional[_Iterable[int]] = ..., feature_ring_starts: _Optional[_Iterable[int]] = ..., features: _Optional[_Union[_tensor_pb2.Tensor]] = ..., runner_up_offsets: _Optional[_Iterable[int]] = ..., runner_up_token_ids: _Optional[_Iterable[int]] = ..., runner_up_log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class FeatureChunk(_message.Message):
    __slots__ = ("sequence_id", "position_offset", "rows", "last", "ring_rows")
    sequence_id: int
    position_offset: int
    rows: _tensor_pb2.Tensor
    last: bool
    ring_rows: RingRows
    def __init__(self, sequence_id: _Optional[int] = ..., position_offset: _Optional[int] = ..., rows: _Optional[_Union[_tensor_pb2.Tensor]] = ..., last: _Optional[bool] = ..., ring_rows: _Optional[_Union[RingRows]] = ...) -> None: ...

class SequenceClosedBatch(_message.Message):
    __slots__ = ("sequence_ids",)
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequence_ids",)
    sequence_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sequence_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_duration",)
    grace_duration: _duration_pb2.Duration
    def __init__(self, grace_duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration]] = ...) -> None: ...
