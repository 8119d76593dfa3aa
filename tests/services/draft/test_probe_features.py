"""`ProposeTree` of drafters that read hidden states: the request brings them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.draft.drafters.ngram import NgramDrafter
from shared.errors import FailedPrecondition, InvalidArgument
from shared.models.heads.feature_spec import FeatureSpec
from shared.ngram import NgramOptions
from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2, tensor_pb2
from shared.rpc.requests import tree_message
from shared.runtime.tensor_codec import tensor_message
from shared.tokens import TreeShape
from tests.helpers.block_setup import block_setup
from tests.helpers.drafting import GREEDY, draft_sequence, propose, random_text
from tests.helpers.mtp_heads import TinyMtp
from tests.helpers.mtp_setup import mtp_setup
from tests.services.draft.scripted_drafter import ScriptedDrafter
from tests.services.draft.service_bench import Bench, served

SHAPE = TreeShape(3, 1, 4)
SPEC = FeatureSpec((1, 3), torch.float32, 4, projection=torch.ones(4, 8))
GREEDY_MESSAGE = sampling_pb2.SamplingParams(temperature=GREEDY.temperature)


def _request(tokens: list[int], rows: Tensor | None) -> pb.ProposeTreeRequest:
    features = None if rows is None else tensor_message(rows)
    return pb.ProposeTreeRequest(
        token_ids=tokens, sampling_params=GREEDY_MESSAGE, features=features
    )


@pytest.mark.parametrize("is_projected", [True, False])
async def test_the_tree_is_the_one_a_target_with_these_features_would_get(
    tmp_path: Path, is_projected: bool
) -> None:
    setup, tokens = block_setup(tmp_path), random_text(3, 12)
    drafter, sequence = setup.drafter(), draft_sequence(tokens)
    setup.open(drafter, sequence)
    [expected] = propose(drafter, SHAPE, sequence)
    sent = setup.sent(sequence, 0, len(tokens) - 1).rows
    rows = sent if is_projected else setup.features(tokens)[:-1]
    assert rows.shape[1] == (32 if is_projected else 96)
    async with served(Bench(setup.drafter())) as bench:
        response = await bench.stub.ProposeTree(_request(tokens, rows))
        found = response.tree
        assert list(found.token_ids) == list(tree_message(expected).token_ids)
        assert list(found.log_probs) == pytest.approx(list(expected.log_probs), abs=1e-4)


async def test_features_of_a_probe_are_not_shared(tmp_path: Path) -> None:
    """Neither does a probe read what a target's features left for its tokens, nor the reverse."""
    setup, tokens = mtp_setup(tmp_path, TinyMtp()), random_text(3, 20)
    sequence, drafter = draft_sequence(tokens), setup.drafter()
    setup.open(drafter, sequence)
    [plain] = propose(drafter, SHAPE, sequence)
    own = setup.features(tokens)[:-1]
    async with served(Bench(setup.drafter())) as bench:
        other = await bench.stub.ProposeTree(_request(tokens, -own))
        again = await bench.stub.ProposeTree(_request(tokens, own))
        assert list(again.tree.token_ids) == list(plain.token_ids) != list(other.tree.token_ids)
        gauges = bench.engine.gauges().result()
        assert gauges["cached_page_count"] == gauges["held_page_count"] == 0


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (torch.zeros(2, 3), "are [2, 3] of torch.float32; 3 tokens need [2, 4] or [2, 8] of"),
        (torch.zeros(3, 4), "are [3, 4] of torch.float32"),
        (torch.zeros(8), "are [8] of torch.float32"),
        (torch.zeros(2, 4, dtype=torch.float16), "are [2, 4] of torch.float16"),
    ],
)
async def test_other_features_are_refused_by_shape(rows: Tensor, part: str) -> None:
    async with served(Bench(ScriptedDrafter(feature_spec=SPEC))) as bench:
        error = await bench.refusal("ProposeTree", _request([1, 2, 3], rows))
        assert isinstance(error, InvalidArgument)
        assert error.reason == "FEATURES_MALFORMED"
        assert part in error.message
        assert [violation.field for violation in error.violations] == ["features"]
        assert bench.drafter.batches == []


async def test_bytes_that_are_not_the_shape_are_refused() -> None:
    message = tensor_pb2.Tensor(
        data_type=tensor_pb2.DATA_TYPE_FLOAT32, shape=(2, 4), data=bytes(31)
    )
    request = pb.ProposeTreeRequest(token_ids=[1, 2, 3], features=message)
    async with served(Bench(ScriptedDrafter(feature_spec=SPEC))) as bench:
        error = await bench.refusal("ProposeTree", request)
        assert isinstance(error, InvalidArgument)
        assert "31 bytes; shape [2, 4] of torch.float32 takes 32" in error.message


async def test_a_head_without_features_says_which_it_needs() -> None:
    async with served(Bench(ScriptedDrafter(feature_spec=SPEC))) as bench:
        error = await bench.refusal("ProposeTree", _request([1, 2, 3], None))
        assert isinstance(error, FailedPrecondition)
        assert error.reason == "PROBE_NEEDS_FEATURES"
        assert "of layers [1, 3]: give [2, 4] or [2, 8] of torch.float32" in error.message
        assert bench.drafter.batches == []


async def test_features_for_a_drafter_of_tokens_are_refused() -> None:
    async with served(Bench(NgramDrafter(NgramOptions()))) as bench:
        error = await bench.refusal("ProposeTree", _request([1, 2], torch.zeros(1, 4)))
        assert isinstance(error, InvalidArgument)
        assert "drafts from tokens" in error.message


async def test_info_says_which_features_are_read() -> None:
    async with served(Bench(ScriptedDrafter(feature_spec=SPEC))) as bench:
        info = await bench.stub.GetDraftInfo(pb.GetDraftInfoRequest())
        assert list(info.feature_layer_indices) == [1, 3]
        assert (info.feature_width, info.feature_layer_width) == (4, 8)
        assert info.feature_data_type == tensor_pb2.DATA_TYPE_FLOAT32
