"""A draft in a process of its own takes part in the target's rounds through memory of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenizers import Tokenizer

from services.draft.settings_problems import DEMO_TARGET
from services.target.settings import DeviceRoundsChoice
from services.target.step_report import StepReport
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.helpers.served import Target, demo_head, draft_process, serving_target

QUESTIONS = ("Tell me a story about a dog.", "What is the capital of France?")
DRAFTS = {
    "a head's trees": ("EAGLE3", "3", "2", "6"),
    "a model's chains": ("STANDALONE", "3", "1", "4"),
}
# The other targets are held by two processes, of which the first shares its memory. Of the last one
# it has the features of all, and keys and values of sequences of its own.
CASES = [("a model's chains", 1, 1), ("a head's trees", 2, 1), ("a head's trees", 2, 2)]


class _Rounds:
    """Counts what rounds through the memory did."""

    def __init__(self) -> None:
        self.num_verified = self.num_accepted = 0

    def after_step(self, report: StepReport) -> None:
        if report.round_shape is not None:
            self.num_verified += report.num_rounds
            self.num_accepted += report.num_accepted


def _shape(draft: str) -> tuple[str, ...]:
    _, steps, topk, num_tokens = DRAFTS[draft]
    return (
        *("--speculative-num-steps", steps, "--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", num_tokens, "--max-total-tokens", "8192"),
    )


@asynccontextmanager
async def _head(target: Target, draft: str) -> AsyncIterator[asyncio.subprocess.Process]:
    flags = ("--speculative-algorithm", DRAFTS[draft][0], "--device", "cpu", *_shape(draft))
    async with draft_process(target, *flags) as process:
        await target.until_attached(1)
        yield process


def _request(
    question: str, max_tokens: int, temperature: float, *, disabled: bool = False
) -> pb.GenerateRequest:
    text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(text).ids
    return pb.GenerateRequest(
        prompt_token_ids=ids,
        sampling_params=sampling_pb2.SamplingParams(temperature=temperature, seed=7),
        stop_params=sampling_pb2.StopParams(max_output_token_count=max_tokens, ignore_eos=True),
        speculation_params=pb.SpeculationParams(disabled=disabled),
    )


async def _answer(target: Target, request: pb.GenerateRequest) -> list[int]:
    return [token async for each in target.stub.Generate(request) for token in each.delta.token_ids]


async def _until_rounds(target: Target, rounds: _Rounds) -> None:
    """Asks until an answer came by rounds: the head says when it is ready for them."""
    before = rounds.num_verified
    await _answer(target, _request(QUESTIONS[1], 8, 0.0))
    while rounds.num_verified == before:
        await asyncio.sleep(0.2)  # to leave the cores to a process that starts
        await _answer(target, _request(QUESTIONS[1], 8, 0.0))


@pytest.mark.timeout(300)  # two processes load torch, on cores that other tests use
@pytest.mark.parametrize(("draft", "tp_size", "dp_size"), CASES)
async def test_answers_are_those_of_plain_steps(draft: str, tp_size: int, dp_size: int) -> None:
    rounds = _Rounds()
    async with serving_target(
        DEMO_TARGET,
        rounds.after_step,
        max_total_tokens=4096,
        context_length=512,
        max_running_requests=4,
        device_rounds=DeviceRoundsChoice.ON,
        tp_size=tp_size,
        dp_size=dp_size,
        enable_dp_attention=dp_size > 1,
    ) as target:
        asked = [(QUESTIONS[0], 0.0), (QUESTIONS[1], 0.8)]
        plain = [await _answer(target, _request(q, 24, t, disabled=True)) for q, t in asked]
        async with _head(target, draft) as process:
            await _until_rounds(target, rounds)
            rounds.num_verified = rounds.num_accepted = 0
            answers = await asyncio.gather(*(_answer(target, _request(q, 24, t)) for q, t in asked))
            assert answers == plain
            # The head reads what the target wrote: without it hardly a token would be accepted.
            assert rounds.num_accepted > 0.4 * rounds.num_verified
            # In the middle of an answer the head is gone.
            late = asyncio.create_task(_answer(target, _request(QUESTIONS[0], 60, 0.0)))
            await _until_rounds(target, rounds)
            process.kill()
            await process.wait()
            alone = await late
        assert alone == await _answer(target, _request(QUESTIONS[0], 60, 0.0, disabled=True))
        await target.until_attached(0)
        if tp_size > 1:  # what one process does, and all have to
            async with demo_head(target, DRAFTS[draft][0], *_shape(draft)):
                await _until_rounds(target, rounds)
