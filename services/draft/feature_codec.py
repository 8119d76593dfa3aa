"""Feature rows on the wire: checked against what the drafter reads, because what is not that would
only fail later, inside a forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.draft.events import FeatureRows
from shared.errors import FailedPrecondition, InvalidArgument
from shared.pb.outrider.types.v1 import tensor_pb2

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed; so does this module.
    from torch import Tensor

    from shared.models.heads.feature_spec import FeatureSpec


def rows_from_message(message: tensor_pb2.Tensor, spec: FeatureSpec) -> Tensor:
    """Returns rows `[R, W]` of a target, in host memory.

    Raises:
        InvalidArgument: they are not as the spec asked for; names both shapes.
    """
    from shared.runtime.tensor_codec import tensor_from_message

    rows = tensor_from_message(message)
    if rows.ndim != 2 or rows.shape[1] != spec.width or rows.dtype != spec.dtype:
        raise bad_features(
            f"rows are {list(rows.shape)} of {rows.dtype}; they must be [R, {spec.width}] of "
            f"{spec.dtype}"
        )
    return rows


def probe_features(
    message: tensor_pb2.Tensor | None, spec: FeatureSpec | None, *, num_tokens: int, algorithm: str
) -> FeatureRows | None:
    """Returns the features of a probe; None for a drafter that reads tokens.

    Args:
        message: None when the request brings none.
        num_tokens: of the prompt; each but the last has a row.

    Raises:
        FailedPrecondition: the drafter reads features, and there are none.
        InvalidArgument: they are not what it reads; names both shapes.
    """
    if spec is None:
        if message is not None:
            raise bad_features(
                f"{algorithm} drafts from tokens; leave the features out", field="features"
            )
        return None
    widths = sorted({spec.width, spec.layer_width})
    wanted = " or ".join(f"[{num_tokens - 1}, {width}]" for width in widths)
    if message is None:
        raise FailedPrecondition(
            f"{algorithm} drafts from the target's hidden states of layers "
            f"{list(spec.layer_indices)}: give {wanted} of {spec.dtype} as features",
            reason="PROBE_NEEDS_FEATURES",
        )
    from shared.runtime.tensor_codec import tensor_from_message

    rows = tensor_from_message(message)
    fits = rows.ndim == 2 and rows.shape[0] == num_tokens - 1 and rows.shape[1] in widths
    if not fits or rows.dtype != spec.dtype:
        raise bad_features(
            f"features are {list(rows.shape)} of {rows.dtype}; {num_tokens:,} tokens need "
            f"{wanted} of {spec.dtype}",
            field="features",
        )
    return FeatureRows(0, spec.projected(rows))


def bad_features(message: str, *, field: str = "rows") -> InvalidArgument:
    """Returns the error for rows that no drafter asked for in this form."""
    return InvalidArgument.of("FEATURES_MALFORMED", field, message)
