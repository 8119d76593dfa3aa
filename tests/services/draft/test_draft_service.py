"""`DraftService` over a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from services.draft.drafters.ngram import NgramDrafter
from shared.errors import InvalidArgument, QueueFull, Unavailable
from shared.ngram import NgramOptions
from shared.pb.outrider.draft.v1 import draft_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2, token_tree_pb2
from shared.tokens import TreeShape
from tests.services.draft.scripted_drafter import ScriptedDrafter
from tests.services.draft.service_bench import Bench, served

REPEATED = [1, 2, 3, 4, 5, 1, 2]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with served(Bench(NgramDrafter(NgramOptions()))) as running:
        yield running


@pytest.fixture
async def small() -> AsyncIterator[Bench]:
    async with served(Bench(ScriptedDrafter(num_slots=0, vocab_size=50))) as running:
        yield running


def _shape(steps: int = 0, topk: int = 0, tokens: int = 0) -> token_tree_pb2.TreeShape:
    return token_tree_pb2.TreeShape(step_count=steps, topk=topk, draft_token_count=tokens)


async def test_propose_tree_answers_with_the_live_shape(bench: Bench) -> None:
    response = await bench.stub.ProposeTree(pb.ProposeTreeRequest(token_ids=REPEATED))
    assert list(response.tree.token_ids) == [3, 4, 5]
    assert list(response.tree.parent_indices) == [-1, 0, 1]
    assert response.draft_duration.ToNanoseconds() > 0


async def test_propose_tree_takes_a_shape_of_its_own(bench: Bench) -> None:
    request = pb.ProposeTreeRequest(token_ids=REPEATED, shape=_shape(1, 1, 2))
    response = await bench.stub.ProposeTree(request)
    assert list(response.tree.token_ids) == [3]
    assert bench.engine.shape == TreeShape(3, 1, 4)


async def test_propose_tree_holds_no_sequence_afterwards(bench: Bench) -> None:
    await bench.stub.ProposeTree(pb.ProposeTreeRequest(token_ids=[1] * 1_000))
    info = await bench.stub.GetDraftInfo(pb.GetDraftInfoRequest())
    assert info.sequence_count == 0


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.ProposeTreeRequest(), "PROMPT_EMPTY"),
        (pb.ProposeTreeRequest(token_ids=[1, -1]), "TOKEN_OUT_OF_RANGE"),
        (
            pb.ProposeTreeRequest(
                token_ids=[1], sampling_params=sampling_pb2.SamplingParams(temperature=3.0)
            ),
            "SAMPLING_PARAM_OUT_OF_RANGE",
        ),
        (pb.ProposeTreeRequest(token_ids=[1], shape=_shape(3, 1)), "TREE_SHAPE_INVALID"),
        (pb.ProposeTreeRequest(token_ids=[1], shape=_shape(3, 17, 5)), "TREE_SHAPE_INVALID"),
    ],
)
async def test_bad_proposals_are_refused(
    bench: Bench, request_: pb.ProposeTreeRequest, reason: str
) -> None:
    error = await bench.refusal("ProposeTree", request_)
    assert isinstance(error, InvalidArgument)
    assert error.reason == reason


async def test_a_shape_refusal_names_every_field_with_its_range(bench: Bench) -> None:
    request = pb.ProposeTreeRequest(token_ids=[1], shape=_shape(33, 17, 5))
    error = await bench.refusal("ProposeTree", request)
    assert [violation.field for violation in error.violations] == ["shape.step_count", "shape.topk"]
    assert "33; it must be in [1, 32]" in error.message


async def test_tokens_beyond_the_vocabulary_are_refused_by_number(small: Bench) -> None:
    error = await small.refusal("ProposeTree", pb.ProposeTreeRequest(token_ids=[3, 50]))
    assert error.message == "token_ids holds 50; ids must be in [0, 50)"


async def test_a_draft_without_memory_says_so(small: Bench) -> None:
    error = await small.refusal("ProposeTree", pb.ProposeTreeRequest(token_ids=[3]))
    assert isinstance(error, QueueFull)
    assert error.reason == "DRAFT_KV_FULL"
    assert error.retry_after_s == 1.0


async def test_info_shows_identity_links_and_shape(bench: Bench) -> None:
    info = await bench.stub.GetDraftInfo(pb.GetDraftInfoRequest())
    assert info == pb.GetDraftInfoResponse(
        worker_id="worker",
        model_id="ngram",
        algorithm="NGRAM",
        sequence_count=0,
        targets=[
            pb.TargetLink(address="a:1", attached=True, attachment_id="attachment-1"),
            pb.TargetLink(address="b:2", last_error="UNAVAILABLE: gone"),
        ],
        config=pb.DraftConfig(shape=_shape(3, 1, 4), pinned=False, outcome_budget=0),
    )


@pytest.mark.parametrize(
    ("change", "paths", "expected"),
    [
        (_shape(steps=5), None, TreeShape(5, 1, 4)),
        (_shape(5, 2, 9), ["shape"], TreeShape(5, 2, 9)),
        (_shape(5, 2, 9), ["shape.topk"], TreeShape(3, 2, 4)),
        (_shape(5, 2, 9), ["shape.topk", "shape.draft_token_count"], TreeShape(3, 2, 9)),
        (_shape(), None, TreeShape(3, 1, 4)),
    ],
)
async def test_update_changes_what_the_mask_names(
    bench: Bench,
    change: token_tree_pb2.TreeShape,
    paths: list[str] | None,
    expected: TreeShape,
) -> None:
    mask = None if paths is None else FieldMask(paths=paths)
    request = pb.UpdateDraftConfigRequest(config=pb.DraftConfig(shape=change), update_mask=mask)
    response = await bench.stub.UpdateDraftConfig(request)
    assert bench.engine.shape == expected
    assert response.config.shape.step_count == expected.num_steps


@pytest.mark.parametrize(
    ("config", "paths", "expected"),
    [
        (pb.DraftConfig(shape=_shape(steps=5)), None, True),
        (pb.DraftConfig(shape=_shape(5, 1, 6)), ["shape.step_count"], True),
        (pb.DraftConfig(shape=_shape(steps=5), pinned=False), None, False),
        (pb.DraftConfig(shape=_shape(steps=5), pinned=True), ["pinned"], True),
        (pb.DraftConfig(shape=_shape(5, 1, 6), pinned=False), ["shape"], True),
        (pb.DraftConfig(), None, False),
    ],
)
async def test_setting_a_shape_pins_it_unless_told_otherwise(
    bench: Bench, config: pb.DraftConfig, paths: list[str] | None, expected: bool
) -> None:
    mask = None if paths is None else FieldMask(paths=paths)
    request = pb.UpdateDraftConfigRequest(config=config, update_mask=mask)
    response = await bench.stub.UpdateDraftConfig(request)
    assert response.config.pinned == expected
    release = pb.UpdateDraftConfigRequest(config=pb.DraftConfig(pinned=False))
    assert not (await bench.stub.UpdateDraftConfig(release)).config.pinned


@pytest.mark.parametrize(
    ("change", "paths", "part"),
    [
        (_shape(steps=40), None, "config.shape.step_count: is 40"),
        (_shape(5, 2, 9), ["shape.breadth"], "update_mask names shape.breadth"),
        (_shape(5, 2, 300), ["shape"], "config.shape.draft_token_count: is 300"),
        (_shape(5), ["shape"], "config.shape.topk: is 0"),
    ],
)
async def test_a_bad_update_changes_nothing(
    bench: Bench, change: token_tree_pb2.TreeShape, paths: list[str] | None, part: str
) -> None:
    mask = None if paths is None else FieldMask(paths=paths)
    request = pb.UpdateDraftConfigRequest(config=pb.DraftConfig(shape=change), update_mask=mask)
    error = await bench.refusal("UpdateDraftConfig", request)
    assert isinstance(error, InvalidArgument)
    assert part in error.message
    assert bench.engine.shape == TreeShape(3, 1, 4)


async def test_outcome_budget_is_set_live(bench: Bench) -> None:
    request = pb.UpdateDraftConfigRequest(config=pb.DraftConfig(outcome_budget=6))
    response = await bench.stub.UpdateDraftConfig(request)
    assert response.config.outcome_budget == 6
    assert bench.engine.outcome_budget == 6
    assert not response.config.pinned, "the shape was not touched"
    masked = pb.UpdateDraftConfigRequest(
        config=pb.DraftConfig(outcome_budget=9), update_mask=FieldMask(paths=["pinned"])
    )
    assert (await bench.stub.UpdateDraftConfig(masked)).config.outcome_budget == 6
    request.config.outcome_budget = 65
    error = await bench.refusal("UpdateDraftConfig", request)
    assert isinstance(error, InvalidArgument)
    assert "outcome_budget is 65; it must be in [0, 64]" in error.message


async def test_calls_are_refused_before_loading_and_while_draining() -> None:
    bench = Bench(NgramDrafter(NgramOptions()))
    server = await bench.start()
    request = pb.ProposeTreeRequest(token_ids=REPEATED)
    starting = await bench.refusal("ProposeTree", request)
    await bench.load()
    await bench.lifecycle.drain()
    draining = await bench.refusal("ProposeTree", request)
    assert isinstance(starting, Unavailable)
    assert isinstance(draining, Unavailable)
    assert (starting.reason, draining.reason) == ("SERVER_STARTING", "SERVER_DRAINING")
    await bench.channel.close()
    await server.stop(0.0)
    bench.engine.stop()
