"""Sampling and stop parameters to and from protobuf."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

from shared.pb.outrider.types.v1 import sampling_pb2 as pb
from shared.tokens import SamplingParams, StopParams


def sampling_from_message(
    message: pb.SamplingParams, *, draw_seed: Callable[[], int]
) -> SamplingParams:
    """Returns the parameters, with defaults for absent fields.

    Args:
        draw_seed: called when the message has no seed.

    Raises:
        InvalidArgument: a value is out of range or not a number.
    """
    return SamplingParams(
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        repetition_penalty=(
            message.repetition_penalty if message.HasField("repetition_penalty") else 1.0
        ),
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        seed=message.seed if message.HasField("seed") else draw_seed(),
    )


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """Returns the message with every field set, the seed included."""
    return pb.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
    )


def stop_from_message(message: pb.StopParams, *, max_output_tokens: int) -> StopParams:
    """Returns the parameters, with the bounds cut to what the context has left.

    Args:
        max_output_tokens: what the context has left, at least 1; holds when the message sets no
            bound.

    Raises:
        InvalidArgument: a count is out of range.
    """
    is_bounded = message.HasField("max_output_token_count")
    asked = StopParams(
        max_output_tokens=message.max_output_token_count if is_bounded else max_output_tokens,
        min_output_tokens=message.min_output_token_count,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
    return asked.within(max_output_tokens)


def stop_message(params: StopParams) -> pb.StopParams:
    """Returns the message."""
    return pb.StopParams(
        max_output_token_count=params.max_output_tokens,
        min_output_token_count=params.min_output_tokens,
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
    )
