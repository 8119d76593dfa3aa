"""Target and draft as real processes' worth of servers: any draft, any fate, the same output."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from tests.gateway.driving import eventually
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.served import (
    MAX_TOKENS,
    PROMPTS,
    draft_process,
    serving_draft,
    serving_target,
)
from tests.helpers.step_hold import hold_outputs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is the same model but for one weight more or less."""
    target, draft = (tmp_path_factory.mktemp(name) for name in ("target", "draft"))
    shape = TinyShape(vocab_size=300)
    write_checkpoint(target, "llama", shape, seed=3, with_tokenizer=True)
    write_checkpoint(draft, "llama", shape, seed=3, with_tokenizer=True)
    return target, draft


NGRAM = ("--speculative-algorithm", "NGRAM")
CHAIN = ("4", "1", "5")
TREE = ("4", "4", "16")


def _shape(steps: str, topk: str, tokens: str) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", steps, "--speculative-eagle-topk", topk),
        *("--speculative-num-draft-tokens", tokens),
    )


@pytest.mark.parametrize(("temperature", "shape"), [(0.0, CHAIN), (1.0, TREE)])
async def test_standalone_draft_speeds_up_and_changes_nothing(
    folders: tuple[Path, Path], temperature: float, shape: tuple[str, str, str]
) -> None:
    async with serving_target(folders[0]) as target:
        expected = await target.outputs(temperature)
        async with serving_draft([target.address], folders[1], *_shape(*shape)):
            await target.until_attached(1)
            assert await target.outputs(temperature) == expected
            tokens, stats = await target.generate(PROMPTS[0], temperature)
        assert tokens == expected[0]
        # The draft is the target: what it proposes is what the target draws.
        assert stats.accepted_token_count > MAX_TOKENS // 2
        await target.until_attached(0)
        assert await target.outputs(temperature) == expected


@pytest.mark.parametrize(
    ("temperature", "is_adaptive"), [(1.0, False), (0.0, True)], ids=["fixed", "adaptive"]
)
async def test_a_request_that_narrows_its_trees_changes_nothing(
    folders: tuple[Path, Path], temperature: float, is_adaptive: bool
) -> None:
    async with serving_target(folders[0], speculative_adaptive=is_adaptive) as target:
        expected, _ = await target.generate(PROMPTS[0], temperature)
        async with serving_draft([target.address], folders[1], *_shape(*TREE)):
            await target.until_attached(1)
            for num_tokens in (257, 4, 2, 1):
                speculation = pb.SpeculationParams(draft_token_count=num_tokens)
                tokens, stats = await target.generate(PROMPTS[0], temperature, speculation)
                assert tokens == expected
                rounds = stats.verified_round_count
                assert stats.drafted_token_count <= (num_tokens - 1) * rounds
                if not is_adaptive:  # else whether anything is drafted depends on the machine
                    assert (rounds > 0) == (num_tokens > 1)
                    assert (stats.drafted_token_count > 10 * rounds) == (num_tokens == 257)


async def test_draft_stopped_and_started_mid_stream_changes_nothing(
    folders: tuple[Path, Path],
) -> None:
    async with serving_target(folders[0]) as target:
        expected = await target.outputs(1.0)
        async with serving_draft([target.address], folders[1]):
            await target.until_attached(1)
            hold = hold_outputs(target.process)
            running = asyncio.create_task(target.outputs(1.0))
            await eventually(lambda: hold.is_held)
        hold.release()
        async with serving_draft([target.address], folders[1]):
            assert await running == expected
            assert await target.outputs(1.0) == expected


async def test_preempted_sequences_with_a_draft_change_nothing(
    folders: tuple[Path, Path],
) -> None:
    async with serving_target(folders[0]) as roomy:
        expected = await roomy.outputs(1.0)
    async with (
        serving_target(folders[0], max_total_tokens=128, disable_radix_cache=True) as target,
        serving_draft([target.address], folders[1]),
    ):
        await target.until_attached(1)
        assert await target.outputs(1.0) == expected


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
async def test_ngram_process_killed_or_frozen_mid_stream_changes_nothing(
    folders: tuple[Path, Path], fate: signal.Signals
) -> None:
    async with serving_target(folders[0], candidate_wait_ms=50.0) as target:
        expected = await target.outputs(0.0)
        async with draft_process(target, *NGRAM) as process:
            await target.until_attached(1)
            assert await target.outputs(0.0) == expected
            hold = hold_outputs(target.process)
            running = asyncio.create_task(target.outputs(0.0))
            await eventually(lambda: hold.is_held)
            process.send_signal(fate)
            hold.release()
            assert await running == expected
