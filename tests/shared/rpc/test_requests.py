"""Sampling, stop parameters, trees and shapes over the wire: what was set survives, what is absent
is default, and malformed trees are refused."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.pb.outrider.types.v1 import sampling_pb2 as pb
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.rpc.requests import (
    sampling_from_message,
    sampling_message,
    shape_from_message,
    shape_message,
    stop_from_message,
    stop_message,
    tree_from_message,
    tree_message,
)
from shared.tokens import SamplingParams, StopParams, ThinkingBudget, TokenTree, TreeShape
from tests.helpers.wire_values import shapes, trees


def floats(low: float, high: float, *, exclude_min: bool = False) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32, exclude_min=exclude_min)


params = st.builds(
    SamplingParams,
    temperature=floats(0, 2),
    top_k=st.integers(0, 2**31 - 1),
    top_p=floats(0, 1, exclude_min=True),
    min_p=floats(0, 1),
    frequency_penalty=floats(-2, 2),
    presence_penalty=floats(-2, 2),
    repetition_penalty=floats(0, 2, exclude_min=True),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), floats(-100, 100), max_size=5),
    allowed_token_ids=st.lists(st.integers(0, 9), unique=True, max_size=5).map(tuple),
    bad_words=st.lists(
        st.lists(st.integers(10, 2**31 - 1), min_size=1, max_size=4).map(tuple), max_size=3
    ).map(tuple),
    thinking=st.none()
    | st.builds(
        ThinkingBudget,
        st.integers(0, 2**31 - 1),
        st.integers(0, 9),
        st.none() | st.integers(0, 9),
    ),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def never() -> int:
    raise AssertionError("a seed was drawn although one was given")


def read(message: pb.SamplingParams, draw_seed: Callable[[], int] = never) -> SamplingParams:
    sent = pb.SamplingParams.FromString(message.SerializeToString())
    return sampling_from_message(sent, draw_seed=draw_seed)


@given(params)
def test_params_survive_the_wire(params: SamplingParams) -> None:
    assert read(sampling_message(params)) == params


def test_absent_fields_are_defaults_and_the_seed_is_drawn() -> None:
    assert read(pb.SamplingParams(), lambda: 17) == SamplingParams(seed=17)


def test_explicit_zeros_are_not_absent() -> None:
    message = pb.SamplingParams(temperature=0.0, seed=0)
    assert read(message) == SamplingParams(temperature=0.0, seed=0)


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("temperature", 0, 2),
        ("top_p", 1e-6, 1),
        ("min_p", 0, 1),
        ("frequency_penalty", -2, 2),
        ("presence_penalty", -2, 2),
        ("repetition_penalty", 1e-6, 2),
    ],
)
def test_value_out_of_range_is_refused_with_field_value_and_limit(
    name: str, low: float, high: float
) -> None:
    for value in (low - 0.01, high + 0.01, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidArgument) as caught:
            read(pb.SamplingParams(seed=1, **{name: value}))
        assert caught.value.reason == "SAMPLING_PARAM_OUT_OF_RANGE"
        assert caught.value.violations[0].field == name
        assert f"{float32(value)}" in caught.value.message
        assert f"{high:g}]" in caught.value.message
    for value in (low, high):
        read(pb.SamplingParams(seed=1, **{name: value}))


@pytest.mark.parametrize("bias", [100.5, -101, math.nan, math.inf])
def test_bias_out_of_range_is_refused_with_its_token(bias: float) -> None:
    with pytest.raises(InvalidArgument, match=r"logit_bias\[42\] is .* \[-100, 100\]"):
        read(pb.SamplingParams(seed=1, logit_bias={42: bias}))


def test_negative_top_k_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="top_k is -1"):
        read(pb.SamplingParams(seed=1, top_k=-1))


@given(
    max_output=st.integers(1, 10**6),
    min_share=st.floats(0, 1),
    stops=st.frozensets(st.integers(0, 2**31 - 1), max_size=4),
    ignore_eos=st.booleans(),
)
def test_stop_params_survive_the_wire(
    max_output: int, min_share: float, stops: frozenset[int], ignore_eos: bool
) -> None:
    params = StopParams(max_output, int(min_share * max_output), stops, ignore_eos)
    assert stop_from_message(stop_message(params), max_output_tokens=10**6) == params


def test_absent_bound_is_what_the_context_has_left() -> None:
    assert stop_from_message(pb.StopParams(), max_output_tokens=9) == StopParams(9)


def test_bounds_are_cut_to_what_the_context_has_left() -> None:
    message = pb.StopParams(max_output_token_count=100, min_output_token_count=50)
    assert stop_from_message(message, max_output_tokens=9) == StopParams(9, 9)
    plain = dataclasses.replace(StopParams(9, 9), min_output_tokens=2)
    message.min_output_token_count = 2
    assert stop_from_message(message, max_output_tokens=9) == plain


@pytest.mark.parametrize(
    "message",
    [
        pb.StopParams(max_output_token_count=0),
        pb.StopParams(max_output_token_count=-1),
        pb.StopParams(max_output_token_count=5, min_output_token_count=6),
        pb.StopParams(min_output_token_count=10),
        pb.StopParams(min_output_token_count=-1),
    ],
)
def test_count_out_of_range_is_refused(message: pb.StopParams) -> None:
    with pytest.raises(InvalidArgument):
        stop_from_message(message, max_output_tokens=9)


@given(trees())
def test_tree_survives_the_wire(tree: TokenTree) -> None:
    sent = token_tree_pb2.TokenTree.FromString(tree_message(tree).SerializeToString())
    assert tree_from_message(sent) == tree


@given(shapes)
def test_shape_survives_the_wire(shape: TreeShape) -> None:
    assert shape_from_message(shape_message(shape)) == shape


@pytest.mark.parametrize(
    "message",
    [
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[0]),
        token_tree_pb2.TokenTree(token_ids=[1, 2], parent_indices=[1, -1]),
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[-2]),
        token_tree_pb2.TokenTree(token_ids=[1, 2], parent_indices=[-1]),
        token_tree_pb2.TokenTree(parent_indices=[-1]),
        token_tree_pb2.TokenTree(token_ids=[1], parent_indices=[-1], log_probs=[-1, -1]),
        *(
            token_tree_pb2.TokenTree(
                token_ids=[1, 2, 3], parent_indices=[-1] * 3, log_probs=[-1.0, *bad]
            )
            for bad in ([math.nan, 0.0], [math.inf, 0.0], [-math.inf, 0.0], [math.inf, -math.inf])
        ),
    ],
)
def test_malformed_tree_is_refused(message: token_tree_pb2.TokenTree) -> None:
    with pytest.raises(InvalidArgument) as caught:
        tree_from_message(message)
    assert caught.value.reason == "TREE_MALFORMED"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (token_tree_pb2.TreeShape(topk=1, draft_token_count=2), r"num_steps is 0.*\[1, 32\]"),
        (
            token_tree_pb2.TreeShape(step_count=2, topk=1, draft_token_count=1),
            r"num_draft_tokens is 1.*\[2, 257\]",
        ),
        (
            token_tree_pb2.TreeShape(step_count=2, topk=17, draft_token_count=3),
            r"topk is 17.*\[1, 16\]",
        ),
    ],
    ids=["no-steps", "no-nodes", "too-wide"],
)
def test_shape_out_of_range_is_refused(message: token_tree_pb2.TreeShape, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        shape_from_message(message)
