"""`DraftService`: one tree on request, what this worker is, and its shape, which may be updated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from grpc import aio

from services.draft.drafters.drafter import DrafterLimits
from services.draft.engine import DraftEngine
from services.draft.likely_verdicts import MAX_BUDGET, FanOut
from services.draft.link_codec import probe_features
from services.draft.worker import LinkStatus, WorkerIdentity
from shared.errors import FieldViolation, InvalidArgument, QueueFull, Unavailable
from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as pb_grpc
from shared.rpc.lifecycle import Lifecycle
from shared.rpc.requests import sampling_from_message, shape_message, tree_message
from shared.tokens import TreeShape

if TYPE_CHECKING:
    from shared.models.heads.feature_spec import FeatureSpec


# Field masks over a tree shape: which of its numbers a request changes, and whether it may.
#
# The wire's names are checked here, so that a refusal names the field its sender wrote.


class ShapeFields(Protocol):
    """A `TreeShape` message; 0 stands for an absent field, as it is in no field's range."""

    @property
    def step_count(self) -> int: ...
    @property
    def topk(self) -> int: ...
    @property
    def draft_token_count(self) -> int: ...


# Wire name: attribute of `TreeShape` and limits.
_FIELDS = {
    "step_count": ("num_steps", 1, 32),
    "topk": ("topk", 1, 16),
    "draft_token_count": ("num_draft_tokens", 2, 257),
}


def updated_shape(
    current: TreeShape | None, fields: ShapeFields, *, paths: Sequence[str] | None, prefix: str
) -> TreeShape:
    """Returns `current` with the fields of a request.

    Args:
        current: None when the request must bring all three numbers.
        paths: paths of a field mask, `shape`, `shape.<field>`, `pinned` or `outcome_budget`, which
            are no fields of the shape; None changes the set fields.
        prefix: path of the message in its request, for errors.

    Raises:
        InvalidArgument: an unknown path, or a value out of range; names every one of them.
    """
    values = {name: int(getattr(fields, name)) for name in _FIELDS}
    names = _changed(values, paths, is_partial=current is not None)
    violations = tuple(
        FieldViolation(f"{prefix}.{name}", _problem(name, values[name]))
        for name in names
        if not _FIELDS[name][1] <= values[name] <= _FIELDS[name][2]
    )
    if violations:
        message = "; ".join(f"{v.field}: {v.description}" for v in violations)
        raise InvalidArgument(message, reason="TREE_SHAPE_INVALID", violations=violations)
    changes: dict[str, Any] = {_FIELDS[name][0]: values[name] for name in names}
    return TreeShape(**changes) if current is None else replace(current, **changes)


def updated_pin(
    current: bool, wanted: bool | None, *, changes_shape: bool, paths: Sequence[str] | None
) -> bool:
    """Returns whether trees keep to the shape after a request.

    Args:
        wanted: what the request says; None when it does not.
        changes_shape: the request brings a shape, which pins it unless it says otherwise.
        paths: see `updated_shape`.
    """
    if wanted is not None and (paths is None or "pinned" in paths):
        return wanted
    is_named = paths is None or any(path.startswith("shape") for path in paths)
    return current or (changes_shape and is_named)


def updated_fan_out(
    current: FanOut, wanted: int | None, *, paths: Sequence[str] | None, prefix: str
) -> FanOut:
    """Returns which verdicts are prepared for after a request.

    Args:
        wanted: budget in the request; None when it names none.
        paths, prefix: see `updated_shape`.

    Raises:
        InvalidArgument: the budget is out of range.
    """
    if wanted is None or not (paths is None or "outcome_budget" in paths):
        return current
    if not 0 <= wanted <= MAX_BUDGET:
        message = f"outcome_budget is {wanted}; it must be in [0, {MAX_BUDGET}]"
        raise InvalidArgument.of("OUTCOME_BUDGET_INVALID", f"{prefix}.outcome_budget", message)
    return replace(current, budget=wanted)


def _changed(
    values: dict[str, int], paths: Sequence[str] | None, *, is_partial: bool
) -> Sequence[str]:
    if paths is None:
        return [name for name, value in values.items() if value or not is_partial]
    known = {f"shape.{name}": [name] for name in values}
    known |= {"shape": list(values), "pinned": [], "outcome_budget": []}
    unknown = [path for path in paths if path not in known]
    if unknown:
        message = f"update_mask names {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        raise InvalidArgument.of("FIELD_MASK_INVALID", "update_mask", message)
    return sorted({name for path in paths for name in known[path]})


def _problem(name: str, value: int) -> str:
    _, low, high = _FIELDS[name]
    return f"is {value}; it must be in [{low}, {high}]"


Context = aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class DraftBackend:
    """The loaded engine and model behind the service."""

    engine: DraftEngine
    identity: WorkerIdentity
    limits: DrafterLimits
    links: Callable[[], Sequence[LinkStatus]]


class DraftServicer(pb_grpc.DraftServiceServicer):
    """Translates and checks; the engine does the work. Answers UNAVAILABLE until it has one."""

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
            shape = updated_shape(None, request.shape, paths=None, prefix="shape")
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
        paths = list(request.update_mask.paths) if request.HasField("update_mask") else None
        shape = updated_shape(
            engine.shape, request.config.shape, paths=paths, prefix="config.shape"
        )
        is_pinned = updated_pin(
            engine.is_pinned,
            request.config.pinned if request.config.HasField("pinned") else None,
            changes_shape=request.config.HasField("shape"),
            paths=paths,
        )
        budget = request.config.outcome_budget
        fan_out = updated_fan_out(
            engine.fan_out,
            budget if request.config.HasField("outcome_budget") else None,
            paths=paths,
            prefix="config",
        )
        await asyncio.wrap_future(engine.set_shape(shape, is_pinned=is_pinned))
        await asyncio.wrap_future(engine.set_fan_out(fan_out))
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
        outcome_budget=engine.fan_out.budget,
    )


def _feature_fields(spec: FeatureSpec | None) -> dict[str, Any]:
    """Returns the fields of `GetDraftInfoResponse` that say what a drafter reads."""
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
