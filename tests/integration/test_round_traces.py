"""Traces and the choice of drafts over real sockets: told in full, and the output is the same."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from grpc import aio

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.requests import tree_from_message
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.served import PROMPTS, Target, serving_draft, serving_target

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=300), seed=3, with_tokenizer=True)
    return folder


async def _deltas(target: Target, **speculation: object) -> list[pb.TokenDelta]:
    request = pb.GenerateRequest(
        prompt_token_ids=PROMPTS[0],
        sampling_params=sampling_pb2.SamplingParams(temperature=1.0, seed=5),
        stop_params=sampling_pb2.StopParams(max_output_token_count=MAX_TOKENS, ignore_eos=True),
        speculation_params=pb.SpeculationParams(**speculation),  # type: ignore[arg-type]
    )
    responses = [response async for response in target.stub.Generate(request)]
    return [each.delta for each in responses if each.HasField("delta")]


def _tokens(deltas: list[pb.TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_each_delta_tells_its_round_and_no_token_changes(folder: Path) -> None:
    async with serving_target(folder) as target:
        plain = await _deltas(target)
        assert not any(delta.HasField("trace") for delta in plain)
        async with serving_draft([target.address], folder):
            await target.until_attached(1)
            deltas = await _deltas(target, trace=True)
    assert _tokens(deltas) == _tokens(plain)
    assert [delta.trace.round for delta in deltas] == list(range(len(deltas)))
    assert any(delta.trace.accepted_node_indices for delta in deltas)
    for delta in deltas:
        trace, tree = delta.trace, tree_from_message(delta.trace.tree)
        path = list(trace.accepted_node_indices)
        assert [tree.token_ids[node] for node in path] == list(delta.token_ids[: len(path)])
        assert len(path) == delta.accepted_token_count
        assert len(tree) == delta.drafted_token_count
        assert trace.verify_duration.ToNanoseconds() > 0
        assert trace.wait_duration.ToNanoseconds() >= 0
        assert trace.algorithm == "STANDALONE"


async def test_a_request_chooses_among_the_drafts_that_are_attached(folder: Path) -> None:
    async with (
        serving_target(folder) as target,
        serving_draft([target.address], folder),
        serving_draft([target.address], folder, algorithm="OTHER"),
    ):
        await target.until_attached(2)
        model = await target.stub.GetModel(pb.GetModelRequest())
        assert list(model.draft_algorithms) == ["OTHER", "STANDALONE"]
        answers = []
        for algorithm in model.draft_algorithms:
            deltas = await _deltas(target, trace=True, algorithm=algorithm)
            assert {delta.trace.algorithm for delta in deltas} == {algorithm}
            assert any(delta.accepted_token_count for delta in deltas)
            answers.append(_tokens(deltas))
        off = await _deltas(target, trace=True, disabled=True)
        assert {delta.trace.algorithm for delta in off} == {""}
        assert answers == [_tokens(off)] * 2


async def test_an_algorithm_nobody_has_is_refused_by_name(folder: Path) -> None:
    async with serving_target(folder) as target:
        with pytest.raises(aio.AioRpcError) as caught:
            await _deltas(target, algorithm="EAGEL")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "'EAGEL'" in (caught.value.details() or "")
