"""A target of latent attention whose two processes attend from sequences of their own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.pb.outrider.admin.v1 import admin_service_pb2
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.helpers.checkpoints import write_byte_tokenizer
from tests.helpers.mixtures import write_mixture
from tests.helpers.served import Target, running_target

SPREAD = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
MTP = (
    *("--draft", "embedded", "--speculative-algorithm", "MTP", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "5"),
)
PROMPTS = [[*range(20, 20 + 9 * key)] for key in (1, 2, 3, 4)]
MAX_TOKENS = 512
"""In the cache of each process."""


@dataclass(frozen=True)
class _Answer:
    token_ids: list[int]
    end: pb.GenerationFinished


async def _answers(target: Target) -> list[_Answer]:
    async def one(prompt: list[int]) -> _Answer:
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
            stop_params=sampling_pb2.StopParams(max_output_token_count=20, ignore_eos=True),
        )
        responses = [response async for response in target.stub.Generate(request)]
        tokens = [token for each in responses for token in each.delta.token_ids]
        return _Answer(tokens, responses[-1].finished)

    return await asyncio.gather(*map(one, PROMPTS))


async def _gauges(target: Target) -> dict[str, float]:
    info = await target.admin.GetServerInfo(admin_service_pb2.GetServerInfoRequest())
    return dict(info.gauges)


@pytest.mark.parametrize(
    "draft",
    [(), (*MTP, "--device-rounds", "on"), (*MTP, "--device-rounds", "off")],
    ids=["plain", "rounds", "pushed trees"],
)
async def test_answers_are_those_of_one_process(draft: tuple[str, ...], tmp_path: Path) -> None:
    write_mixture(tmp_path, "deepseek_v3", vocab_size=300)
    write_byte_tokenizer(tmp_path)
    arguments = [
        *("--model-path", str(tmp_path), "--port", "0", "--device", "cpu", "--page-size", "4"),
        *("--max-total-tokens", str(MAX_TOKENS), "--context-length", "128"),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000"),
    ]
    async with running_target(arguments) as target:
        expected = [each.token_ids for each in await _answers(target)]
    assert {len(each) for each in expected} == {20}
    async with running_target([*arguments, *SPREAD, *draft]) as target:
        answers = await _answers(target)
        assert [each.token_ids for each in answers] == expected
        drafted = sum(each.end.speculation.drafted_token_count for each in answers)
        assert (drafted > 0) is bool(draft)
        # Prefixes are found in the process that has them.
        again = await _answers(target)
        assert [each.token_ids for each in again] == expected
        found = [each.end.cached_token_count for each in again]
        assert found == [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]
        gauges = await _gauges(target)
    assert gauges["page_count"] == 2 * MAX_TOKENS / 4
    assert gauges["held_page_count"] == 0
