"""Drafting ahead over real sockets: it hides a long wire, and a lost end changes nothing."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.target.drafts.draft_exchange import DraftExchange
from services.target.settings import DeviceRoundsChoice
from services.target.step_report import StepReport
from tests.helpers.ahead_cases import total_outcomes
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.relay import relayed
from tests.helpers.served import PROMPTS, Target, serving_draft, serving_target

DELAY_S = 0.003
SHAPE = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
AHEAD = (*SHAPE, "--speculative-outcome-budget", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target that is its own draft, so that every verdict can be foreseen."""
    folder = tmp_path_factory.mktemp("target")
    return write_checkpoint(
        folder,
        "llama",
        TinyShape(vocab_size=300, max_position_embeddings=512),
        seed=3,
        with_tokenizer=True,
    )


@pytest.fixture
def long_verification(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every verification of a tree as long as a draft needs to prepare for its verdicts, as
    it is where the target is much larger than its draft."""
    take_offers = DraftExchange.take_offers

    def wait_and_take(exchange: DraftExchange) -> None:
        until_s = time.monotonic() + 60.0
        while not _is_prepared(exchange) and time.monotonic() < until_s:
            take_offers(exchange)
            time.sleep(1e-3)
        take_offers(exchange)

    monkeypatch.setattr(DraftExchange, "take_offers", wait_and_take)


def _is_prepared(exchange: DraftExchange) -> bool:
    """Whether the draft has prepared for every verdict that the step under way is to bring."""
    return all(
        each.has_pushed
        for each in exchange.attachments.assignments
        if each.is_stepping and each.tree.token_ids
    )


@pytest.mark.usefixtures("long_verification")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_rounds_are_hit_without_waiting_for_a_long_wire(
    folder: Path, temperature: float
) -> None:
    reports: list[StepReport] = []
    num_tokens = 60
    async with serving_target(folder, reports.append) as target:
        expected, _ = await target.generate(PROMPTS[0], temperature, num_tokens=num_tokens)
        async with (
            relayed(target.address, DELAY_S) as relay,
            serving_draft([relay.address], folder, *AHEAD),
        ):
            await target.until_attached(1)
            reports.clear()
            tokens, stats = await target.generate(PROMPTS[0], temperature, num_tokens=num_tokens)
    assert tokens == expected
    tally = total_outcomes(reports)
    # 4 tokens a round; the first is the prompt's own, and its tree may come late.
    assert tally.num_hits > num_tokens // 4 - 6
    assert tally.num_misses + tally.num_unprepared <= 3
    assert tally.num_late_hits == 0
    assert stats.missed_round_count <= 1
    assert min(relay.num_bytes) > 1000, "the wire was not used"


@pytest.mark.parametrize(
    ("temperature", "rounds"), [(0.0, DeviceRoundsChoice.ON), (1.0, DeviceRoundsChoice.OFF)]
)
async def test_any_wire_changes_nothing(
    folder: Path, temperature: float, rounds: DeviceRoundsChoice
) -> None:
    async with serving_target(folder, device_rounds=rounds) as target:
        expected = await target.outputs(temperature)
        for delay_s in (0.0, DELAY_S):
            async with (
                relayed(target.address, delay_s) as relay,
                serving_draft([relay.address], folder, *AHEAD),
            ):
                await target.until_attached(1)
                assert await target.outputs(temperature) == expected


@pytest.mark.parametrize("rounds", [DeviceRoundsChoice.OFF, DeviceRoundsChoice.ON])
async def test_wire_cut_in_mid_stream_and_mended_changes_nothing(
    folder: Path, rounds: DeviceRoundsChoice
) -> None:
    async with serving_target(folder, device_rounds=rounds) as target:
        expected = await target.outputs(1.0)
        async with (
            relayed(target.address, DELAY_S) as relay,
            serving_draft([relay.address], folder, *AHEAD),
        ):
            await target.until_attached(1)
            for _ in range(2):
                running = asyncio.create_task(target.outputs(1.0))
                await _some_bytes(relay.num_bytes)
                await relay.cut()
                assert await running == expected
                await target.until_attached(1)
            assert await target.outputs(1.0) == expected


async def test_two_drafts_on_one_target_one_of_them_cut_off(folder: Path) -> None:
    async with serving_target(folder) as target:
        expected = await target.outputs(1.0)
        async with (
            relayed(target.address, DELAY_S) as relay,
            serving_draft([relay.address], folder, *AHEAD),
            serving_draft([target.address], folder, *AHEAD),
        ):
            await target.until_attached(2)
            running = asyncio.create_task(target.outputs(1.0))
            await _some_bytes(relay.num_bytes)
            await relay.cut()
            assert await running == expected


async def test_one_draft_on_two_targets_one_of_them_stopped(folder: Path) -> None:
    async with AsyncExitStack() as leaves, serving_target(folder) as staying:
        expected = await staying.outputs(1.0)
        leaving = await leaves.enter_async_context(serving_target(folder))
        relay = await leaves.enter_async_context(relayed(leaving.address, DELAY_S))
        async with serving_draft([staying.address, relay.address], folder, *AHEAD):
            await _both_attached(staying, leaving)
            both = await asyncio.gather(*(each.outputs(1.0) for each in (staying, leaving)))
            assert both == [expected, expected]
            running = asyncio.create_task(staying.outputs(1.0))
            lost = asyncio.create_task(leaving.outputs(1.0))
            await _some_bytes(relay.num_bytes)
            await leaves.aclose()
            assert await running == expected
            await asyncio.gather(lost, return_exceptions=True)
            assert await staying.outputs(1.0) == expected


async def _both_attached(*targets: Target) -> None:
    for target in targets:
        await target.until_attached(1)


async def _some_bytes(num_bytes: list[int]) -> None:
    """Waits until candidates are on the wire."""
    start = num_bytes[0]
    async with asyncio.timeout(100):
        while num_bytes[0] < start + 500:
            await asyncio.sleep(0.001)
