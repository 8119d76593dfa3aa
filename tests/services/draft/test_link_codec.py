"""Features on the wire: what a draft asks for, and what it refuses to take."""

from __future__ import annotations

import pytest
import torch

from services.draft.events import FeaturesArrived, RoundsDecided, WorkerIdentity
from services.draft.link_codec import attach_request, event_from_response, terms_from_message
from shared.errors import FailedPrecondition, InvalidArgument
from shared.models.heads.feature_spec import FeatureSpec
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.types.v1 import tensor_pb2
from shared.rpc.columns import add_verdicts
from shared.rpc.requests import shape_message
from shared.runtime.tensor_codec import tensor_from_message, tensor_message
from shared.tokens import Outcome, TreeShape, Verdict

SPEC = FeatureSpec((2, 3, 5), torch.bfloat16, 4, torch.arange(48.0).view(4, 12).bfloat16())
ROWS = torch.arange(12.0).view(3, 4).bfloat16()


def _attach(spec: FeatureSpec | None) -> pb.Attach:
    identity = WorkerIdentity("w", "m", "EAGLE3", "ab", 4, 128, feature_spec=spec)
    return attach_request(identity).attach


def _attached(width: int) -> pb.Attached:
    return pb.Attached(
        feature_width=width, verification_mode=pb.VERIFICATION_MODE_COUPLED, vocab_size=9
    )


def _chunk(rows: tensor_pb2.Tensor, offset: int = 7) -> pb.SpeculateResponse:
    chunk = pb.FeatureChunk(sequence_id=5, position_offset=offset, rows=rows, last=True)
    return pb.SpeculateResponse(feature_chunk=chunk)


def test_the_attachment_names_layers_type_and_projection() -> None:
    assert SPEC.projection is not None
    message = _attach(SPEC).feature_spec
    assert list(message.layer_indices) == [2, 3, 5]
    assert message.data_type == tensor_pb2.DATA_TYPE_BFLOAT16
    assert torch.equal(tensor_from_message(message.projection), SPEC.projection)


def test_what_is_not_wanted_is_absent() -> None:
    assert not _attach(None).HasField("feature_spec")
    bare = FeatureSpec((7,), torch.float32, 4)
    assert not _attach(bare).feature_spec.HasField("projection")


def test_a_target_with_rows_of_another_width_is_refused() -> None:
    assert terms_from_message(_attached(4), SPEC).vocab_size == 9
    with pytest.raises(FailedPrecondition, match="features 12 wide; this draft reads 4"):
        terms_from_message(_attached(12), SPEC)
    with pytest.raises(FailedPrecondition, match="features 4 wide; this draft reads 0"):
        terms_from_message(_attached(4), None)


def test_the_shapes_that_may_be_requested_are_terms() -> None:
    attached = _attached(4)
    assert terms_from_message(attached, SPEC).shapes == ()
    attached.candidate_shapes.append(shape_message(TreeShape(5, 1, 6)))
    assert terms_from_message(attached, SPEC).shapes == (TreeShape(5, 1, 6),)


def test_prompt_rows_arrive_as_a_tensor() -> None:
    event = event_from_response(3, _chunk(tensor_message(ROWS)), SPEC)
    assert isinstance(event, FeaturesArrived)
    assert (event.link, event.sequence_id) == (3, 5)
    assert event.rows.position_offset == 7
    assert torch.equal(event.rows.rows, ROWS)


def test_the_rows_of_a_verdict_begin_at_the_trees_root() -> None:
    response = pb.SpeculateResponse()
    verdict = Verdict(5, 2, Outcome.VERIFIED, (0, 3), (11, 12, 13), 20)
    add_verdicts(response.verdicts, [verdict])
    bare = pb.SpeculateResponse.FromString(response.SerializeToString())
    response.verdicts.feature_row_counts.append(3)
    response.verdicts.features.CopyFrom(tensor_message(ROWS))
    event = event_from_response(3, response, SPEC)
    assert isinstance(event, RoundsDecided)
    features = event.results[0].features
    assert features is not None
    assert features.position_offset == 16
    assert features.position_offset + len(features.rows) == 20 - 1
    event = event_from_response(3, bare, None)
    assert isinstance(event, RoundsDecided)
    assert event.results[0].features is None


def _decided(counts: list[int], starts: list[int] | None = None) -> pb.SpeculateResponse:
    """Two verdicts with the three rows."""
    response = pb.SpeculateResponse()
    found = [Verdict(each, 2, Outcome.MISSED, (), (11, 12), 20) for each in (5, 6)]
    add_verdicts(response.verdicts, found)
    response.verdicts.feature_row_counts.extend(counts)
    response.verdicts.feature_ring_starts.extend(starts or [])
    response.verdicts.features.CopyFrom(tensor_message(ROWS))
    return response


def test_rows_of_several_verdicts_lie_end_to_end() -> None:
    event = event_from_response(3, _decided([1, 2]), SPEC)
    assert isinstance(event, RoundsDecided)
    first, second = [each.features for each in event.results]
    assert first is not None
    assert second is not None
    assert torch.equal(torch.cat([first.rows, second.rows]), ROWS)
    assert len(first.rows) == 1
    assert second.position_offset == 17


class _Ring:
    """Row n of the ring is n, n, n, n; notes what is copied."""

    def __init__(self) -> None:
        self.copied: list[tuple[int, int]] = []

    def read(self, start: int, count: int) -> torch.Tensor:
        self.copied.append((start, count))
        return torch.arange(start, start + count).unsqueeze(1).expand(-1, 4)


def test_rows_side_by_side_in_the_ring_are_one_copy() -> None:
    ring = _Ring()
    response = pb.SpeculateResponse()
    found = [Verdict(each, 2, Outcome.MISSED, (), (11, 12), 20) for each in range(6)]
    add_verdicts(response.verdicts, found)
    response.verdicts.feature_row_counts.extend([2, 1, 3, 0, 1, 2])
    response.verdicts.feature_ring_starts.extend([7, 9, -1, 5, 6, 20])
    response.verdicts.features.CopyFrom(tensor_message(ROWS))
    event = event_from_response(3, response, SPEC, ring)  # type: ignore[arg-type]
    assert isinstance(event, RoundsDecided)
    rows = [None if each.features is None else each.features.rows for each in event.results]
    assert ring.copied == [(6, 4), (20, 2)]
    assert rows[3] is None
    assert rows[2] is not None
    assert torch.equal(rows[2], ROWS)
    starts = [None if rows[place] is None else int(rows[place][0, 0]) for place in (0, 1, 4, 5)]
    assert starts == [7, 9, 6, 20]
    assert [len(rows[place]) for place in (0, 1, 4, 5)] == [2, 1, 1, 2]


@pytest.mark.parametrize(
    ("response", "spec", "said"),
    [
        (_decided([1, 2]), None, "none were asked for"),
        (_decided([1, 1]), SPEC, "3 rows arrived; the verdicts count 2"),
        (_decided([4, -1]), SPEC, "a verdict has -1 rows"),
        (_decided([1, 2], [-1, 0]), SPEC, "3 rows arrived; the verdicts count 1"),
        (_decided([3, 2], [-1, 0]), SPEC, "none was opened"),
        (_chunk(tensor_message(ROWS)), None, "none were asked for"),
        (_chunk(tensor_message(ROWS[:, :3])), SPEC, "[3, 3] of torch.bfloat16"),
        (_chunk(tensor_message(ROWS.float())), SPEC, "must be [R, 4] of torch.bfloat16"),
        (_chunk(tensor_message(ROWS.flatten())), SPEC, "[12]"),
        (_chunk(tensor_message(ROWS), -1), SPEC, "position -1"),
        (_chunk(tensor_pb2.Tensor()), SPEC, "data_type is 0"),
    ],
    ids=[
        *("unwanted rows", "too many", "fewer than none", "beside a ring", "no ring"),
        "unwanted",
        "narrow",
        "type",
        "flat",
        "negative",
        "empty",
    ],
)
def test_features_that_were_not_asked_for_are_refused(
    response: pb.SpeculateResponse, spec: FeatureSpec | None, said: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        event_from_response(1, response, spec)
    assert said in caught.value.message
