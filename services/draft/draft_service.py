"""`DraftService`: proposes one tree on request, describes this worker, and updates its config."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from google.protobuf.field_mask_pb2 import FieldMask
from grpc import aio

from services.draft.drafters.drafter import DrafterLimits
from services.draft.engine import DraftEngine
from services.draft.events import LinkStatus, WorkerIdentity
from services.draft.likely_verdicts import MAX_BUDGET
from services.draft.link_codec import probe_features
from shared.errors import FieldViolation, InvalidArgument, QueueFull, Unavailable
from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1.token_tree_pb2 import TreeShape as TreeShapeMessage
from shared.rpc.requests import sampling_from_message, shape_message, tree_message
from shared.rpc.server import Lifecycle
from shared.tokens import TreeShape

if TYPE_CHECKING:
    from shared.models.heads.feature_spec import FeatureSpec


# Limits by wire name. 0 means an absent field, as it is in no field's range.
_SHAPE_FIELDS = {"step_count": (1, 32), "topk": (1, 16), "draft_token_count": (2, 257)}
_SHAPE_PATHS = tuple(f"shape.{name}" for name in _SHAPE_FIELDS)
_PATHS = ("shape", *_SHAPE_PATHS, "pinned", "outcome_budget")


def shape_of_message(
    message: TreeShapeMessage, prefix: str, named: Collection[str] = tuple(_SHAPE_FIELDS)
) -> TreeShape:
    """Returns the shape of a message.

    Args:
        prefix: path of the message in its request, for errors.
        named: fields that the request sets; the others are known to be in range.

    Raises:
        InvalidArgument: a value is out of range; names every such field by its path.
    """
    values = {name: int(getattr(message, name)) for name in _SHAPE_FIELDS}
    violations = tuple(
        FieldViolation(f"{prefix}.{name}", f"is {values[name]}; it must be in [{low}, {high}]")
        for name, (low, high) in _SHAPE_FIELDS.items()
        if name in named and not low <= values[name] <= high
    )
    if violations:
        problems = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgument(problems, reason="TREE_SHAPE_INVALID", violations=violations)
    return TreeShape(message.step_count, message.topk, message.draft_token_count)


def updated_config(current: pb.DraftConfig, request: pb.UpdateDraftConfigRequest) -> pb.DraftConfig:
    """Returns the configuration updated with the fields that the request's mask names, or without a
    mask with all fields that the request sets.

    A new shape is pinned unless the request says otherwise.

    Raises:
        InvalidArgument: an unknown path, or a value out of range.
    """
    new, shape = request.config, request.config.shape
    paths = set(request.update_mask.paths)
    if not request.HasField("update_mask"):
        paths = {f"shape.{name}" for name in _SHAPE_FIELDS if getattr(shape, name)}
        paths |= {"pinned", "outcome_budget"}
    unknown = sorted(paths - set(_PATHS))
    if unknown:
        message = f"update_mask names {', '.join(unknown)}; known are {', '.join(sorted(_PATHS))}"
        raise InvalidArgument.of("FIELD_MASK_INVALID", "update_mask", message)
    if "shape" in paths:
        paths |= set(_SHAPE_PATHS)
    named = [path for path in _SHAPE_PATHS if path in paths]
    config = pb.DraftConfig()
    config.CopyFrom(current)
    FieldMask(paths=named).MergeMessage(new, config)
    shape_of_message(config.shape, "config.shape", [path.removeprefix("shape.") for path in named])
    if "pinned" in paths and new.HasField("pinned"):
        config.pinned = new.pinned
    elif new.HasField("shape") and (named or not request.HasField("update_mask")):
        config.pinned = True
    if "outcome_budget" in paths and new.HasField("outcome_budget"):
        config.outcome_budget = budget = new.outcome_budget
        if not 0 <= budget <= MAX_BUDGET:
            message = f"outcome_budget is {budget}; it must be in [0, {MAX_BUDGET}]"
            raise InvalidArgument.of("OUTCOME_BUDGET_INVALID", "config.outcome_budget", message)
    return config


Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class DraftBackend:
    """The loaded engine and model behind the service."""

    engine: DraftEngine
    identity: WorkerIdentity
    limits: DrafterLimits
    links: Callable[[], Sequence[LinkStatus]]


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Checks requests and passes them to the engine. Answers UNAVAILABLE until `load`."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._loaded: DraftBackend | None = None

    def load(self, backend: DraftBackend) -> None:
        """Gives the service its backend."""
        self._loaded = backend

    async def ProposeTree(
        self, request: pb.ProposeTreeRequest, context: Context
    ) -> pb.ProposeTreeResponse:
        backend = self._backend()
        self._lifecycle.check_open()
        _check_prompt(request.token_ids, backend.limits)
        features = probe_features(
            request.features if request.HasField("features") else None,
            backend.limits.feature_spec,
            num_tokens=len(request.token_ids),
            algorithm=backend.identity.algorithm,
        )
        sampling = sampling_from_message(
            request.sampling_params, draw_seed=lambda: random.getrandbits(63)
        )
        shape = None
        if request.HasField("shape"):
            shape = shape_of_message(request.shape, "shape")
        done = await asyncio.wrap_future(
            backend.engine.propose_once(
                tuple(request.token_ids), sampling, shape, features=features
            )
        )
        if done.tree is None:
            raise QueueFull(
                f"the draft has no KV memory for {len(request.token_ids):,} tokens beside the "
                f"{backend.engine.num_sequences:,} sequences it holds",
                reason="DRAFT_KV_FULL",
                retry_after_s=1.0,
            )
        response = pb.ProposeTreeResponse(tree=tree_message(done.tree))
        response.draft_duration.FromNanoseconds(round(done.draft_s * 1e9))
        return response

    async def GetDraftInfo(
        self, request: pb.GetDraftInfoRequest, context: Context
    ) -> pb.GetDraftInfoResponse:
        backend = self._backend()
        return pb.GetDraftInfoResponse(
            worker_id=backend.identity.worker_id,
            model_id=backend.identity.model_id,
            algorithm=backend.identity.algorithm,
            sequence_count=backend.engine.num_sequences,
            targets=map(_link_message, backend.links()),
            config=_config_message(backend.engine),
            **_feature_fields(backend.limits.feature_spec),
        )

    async def UpdateDraftConfig(
        self, request: pb.UpdateDraftConfigRequest, context: Context
    ) -> pb.UpdateDraftConfigResponse:
        engine = self._backend().engine
        config = updated_config(_config_message(engine), request)
        shape = shape_of_message(config.shape, "config.shape")
        await asyncio.wrap_future(engine.set_shape(shape, is_pinned=config.pinned))
        await asyncio.wrap_future(engine.set_outcome_budget(config.outcome_budget))
        return pb.UpdateDraftConfigResponse(config=_config_message(engine))

    def _backend(self) -> DraftBackend:
        if self._loaded is None:
            raise Unavailable.starting()
        return self._loaded


def _check_prompt(token_ids: Sequence[int], limits: DrafterLimits) -> None:
    """Raises:
    InvalidArgument: the prompt is empty, too long or names a token the draft does not know.
    """
    if not token_ids:
        raise InvalidArgument.prompt_empty()
    if limits.max_context_tokens is not None and len(token_ids) > limits.max_context_tokens:
        raise InvalidArgument.prompt_too_long(len(token_ids), limits.max_context_tokens)
    low, high = min(token_ids), max(token_ids)
    is_known = limits.vocab_size is None or high < limits.vocab_size
    if low < 0 or not is_known:
        end = "2^31" if limits.vocab_size is None else str(limits.vocab_size)
        token = low if low < 0 else high
        message = f"token_ids holds {token}; ids must be in [0, {end})"
        raise InvalidArgument.of("TOKEN_OUT_OF_RANGE", "token_ids", message)


def _config_message(engine: DraftEngine) -> pb.DraftConfig:
    return pb.DraftConfig(
        shape=shape_message(engine.shape),
        pinned=engine.is_pinned,
        outcome_budget=engine.outcome_budget,
    )


def _feature_fields(spec: FeatureSpec | None) -> dict[str, Any]:
    """Returns the fields of `GetDraftInfoResponse` that describe the features a drafter reads."""
    if spec is None:
        return {}
    from shared.runtime.tensor_codec import data_type_number

    return {
        "feature_layer_indices": spec.layer_indices,
        "feature_width": spec.width,
        "feature_layer_width": spec.layer_width,
        "feature_data_type": data_type_number(spec.dtype),
    }


def _link_message(status: LinkStatus) -> pb.TargetLink:
    return pb.TargetLink(
        address=status.address,
        attached=status.attachment_id is not None,
        attachment_id=status.attachment_id or "",
        last_error=status.last_error or "",
    )
