"""The process of the demo's EAGLE-3 head is killed in the middle of an answer; another head
attaches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tokenizers import Tokenizer

from services.draft.settings_problems import DEMO_TARGET
from services.target.step_report import StepReport
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.helpers.served import Target, demo_head, draft_process, serving_target

LONGEST = 1800
NUM_ROUNDS = 12
QUESTION = "<|im_start|>user\nTell me a story about a dog.<|im_end|>\n<|im_start|>assistant\n"
CHAIN = (
    *("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "6"),
)


@asynccontextmanager
async def _head(target: Target) -> AsyncIterator[asyncio.subprocess.Process]:
    flags = ("--speculative-algorithm", "EAGLE3", "--device", "cpu", *CHAIN)
    async with draft_process(target, *flags) as process:
        await target.until_attached(1)
        yield process


def _prompt() -> list[int]:
    return list(Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json")).encode(QUESTION).ids)


def _request(max_tokens: int, *, disabled: bool) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        prompt_token_ids=_prompt(),
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(max_output_token_count=max_tokens, ignore_eos=True),
        speculation_params=pb.SpeculationParams(disabled=disabled),
    )


class _Answer:
    """One long answer, read as it comes."""

    def __init__(self, target: Target) -> None:
        self._call = target.stub.Generate(_request(LONGEST, disabled=False))
        self.token_ids: list[int] = []

    async def accepted(self) -> float:
        """Reads until that many trees were verified; returns drafted tokens accepted of each."""
        found: list[int] = []
        async for response in self._call:
            delta = response.delta
            self.token_ids += delta.token_ids
            if delta.drafted_token_count:
                found.append(delta.accepted_token_count)
            if len(found) == NUM_ROUNDS:
                return sum(found) / NUM_ROUNDS
        raise AssertionError(f"only {len(found)} trees were verified to the end of the answer")

    def cancel(self) -> None:
        self._call.cancel()


class _Pace:
    """Stops a target that has verified enough trees until its head is killed, and makes its steps
    long while it is without it, so that the answer lasts until another draft has loaded the head
    again, however busy the machine is."""

    def __init__(self) -> None:
        self.is_killed, self.is_back = threading.Event(), threading.Event()
        self._num_trees = 0

    def after_step(self, report: StepReport) -> None:
        self._num_trees += report.num_drafted > 0
        if self._num_trees > NUM_ROUNDS:
            self.is_killed.wait()
            self.is_back.wait(0.3)


@pytest.mark.timeout(300)  # a process loads torch, on cores that other tests use
async def test_acceptance_recovers_when_a_killed_head_is_back() -> None:
    pace = _Pace()
    async with serving_target(
        DEMO_TARGET, pace.after_step, max_total_tokens=4096, context_length=2048
    ) as target:
        async with _head(target) as process:
            answer = _Answer(target)
            before = await answer.accepted()
            process.kill()
            await process.wait()
            pace.is_killed.set()
        await target.until_attached(0)
        num_alone = len(answer.token_ids)
        async with demo_head(target, "EAGLE3", *CHAIN):
            pace.is_back.set()
            after = await answer.accepted()
        answer.cancel()
        # What came before the head was back had no head to come from.
        assert len(answer.token_ids) > num_alone
        call = target.stub.Generate(_request(len(answer.token_ids), disabled=True))
        plain = [token async for response in call for token in response.delta.token_ids]
    assert answer.token_ids == plain
    assert before > 0.5
    assert after > 0.5 * before
