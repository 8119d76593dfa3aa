"""Verdicts of a step over the wire: what comes out is what went in, or is refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidArgument
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.rpc.columns import add_verdicts, verdicts_from_message
from shared.tokens import Outcome, Verdict
from tests.helpers.wire_values import verdicts

TWO = [
    Verdict(1, 2, Outcome.VERIFIED, (0, 2), (5, 6, 7), 20),
    Verdict(3, 2, Outcome.MISSED, (), (8,), 9),
]


def _sent(found: list[Verdict]) -> pb.VerdictBatch:
    batch = pb.VerdictBatch()
    add_verdicts(batch, found)
    return pb.VerdictBatch.FromString(batch.SerializeToString())


@given(st.lists(verdicts, max_size=4))
def test_verdicts_survive_the_wire(found: list[Verdict]) -> None:
    assert verdicts_from_message(_sent(found)) == found


def test_columns_that_say_nothing_are_left_out() -> None:
    said = {field.name for field, _ in _sent(TWO).ListFields()}
    fence = {"sequence_ids", "rounds", "outcomes", "committed_token_counts"}
    accepted = {"accepted_offsets", "accepted_node_indices"}
    assert said == fence | accepted | {"committed_offsets", "committed_token_ids"}


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("rounds", [1], "rounds has 1 entries; it must have 2"),
        ("outcomes", [0, 1], "an outcome is 0"),
        ("outcomes", [1], "outcomes has 1 entries"),
        ("committed_offsets", [0, 4, 4], "a verdict commits at least 1 token; one has 0"),
        ("committed_offsets", [0, 5, 4], "committed_offsets descends from 5 to 4 at 2"),
        ("committed_offsets", [], "committed_offsets has 0 entries; it must have one more"),
        ("accepted_offsets", [0, 1, 1], "ends at 1; accepted_node_indices has 2 entries"),
        ("candidate_ids", [1], "candidate_ids has 1 entries"),
        ("paused", [True], "paused has 1 entries"),
        ("wanted_shape_numbers", [0, 2], "wanted_shape_numbers holds 2; wanted_shapes has 0"),
        ("wanted_outcome_counts", [-2, 0], "wanted_outcome_counts is -2"),
    ],
)
def test_columns_that_do_not_fit_are_refused_by_name(
    name: str, values: list[int], said: str
) -> None:
    batch = _sent(TWO)
    del getattr(batch, name)[:]
    getattr(batch, name).extend(values)
    with pytest.raises(InvalidArgument) as caught:
        verdicts_from_message(batch)
    assert said in caught.value.message
