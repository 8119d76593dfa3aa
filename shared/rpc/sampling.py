"""Sampling and stop parameters to and from protobuf."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, MutableSequence
from dataclasses import asdict, fields
from types import MappingProxyType
from typing import Any

from shared.pb.outrider.types.v1 import sampling_pb2 as pb
from shared.tokens import SamplingParams, StopParams, ThinkingBudget


def sampling_from_message(
    message: pb.SamplingParams, *, draw_seed: Callable[[], int]
) -> SamplingParams:
    """Returns the parameters. Fields of the message have their names, and defaults hold for those
    that are absent.

    Args:
        draw_seed: called when the message has no seed.

    Raises:
        InvalidArgument: a value is out of range or not a number.
    """
    given = {field.name: _plain(value) for field, value in message.ListFields()}
    if "seed" not in given:
        given["seed"] = draw_seed()
    return SamplingParams(**given)


def sampling_message(params: SamplingParams) -> pb.SamplingParams:
    """Returns the message with every field set, the seed included."""
    names = [field.name for field in fields(params)]
    values = {name: getattr(params, name) for name in names}
    values["bad_words"] = [pb.TokenRun(token_ids=word) for word in params.bad_words]
    if params.thinking is not None:
        values["thinking"] = pb.ThinkingBudget(**asdict(params.thinking))
    return pb.SamplingParams(**values)


def _plain(value: Any) -> Any:
    """Returns a field's value as the dataclass holds it."""
    if isinstance(value, MutableMapping):
        return MappingProxyType(dict(value))
    if isinstance(value, MutableSequence):
        return tuple(
            tuple(each.token_ids) if isinstance(each, pb.TokenRun) else each for each in value
        )
    if isinstance(value, pb.ThinkingBudget):
        start = value.start_token_id if value.HasField("start_token_id") else None
        return ThinkingBudget(value.max_tokens, value.end_token_id, start)
    return value


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
