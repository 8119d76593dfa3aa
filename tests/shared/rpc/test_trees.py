"""Trees and shapes over the wire; malformed ones are refused."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from shared.errors import InvalidArgument
from shared.pb.outrider.types.v1 import token_tree_pb2
from shared.rpc.trees import shape_from_message, shape_message, tree_from_message, tree_message
from shared.tokens import TokenTree, TreeShape
from tests.helpers.wire_values import shapes, trees


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


def test_shape_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_steps is 0"):
        shape_from_message(token_tree_pb2.TreeShape(topk=1, draft_token_count=2))
