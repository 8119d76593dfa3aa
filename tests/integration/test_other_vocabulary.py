"""A draft of another family beside its target, in one process and in two: the same output, and as
many accepted tokens as with the target's ids."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from services.target.settings import DeviceRoundsChoice
from services.target.step_report import StepReport
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.channel import open_channel
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.other_vocabularies import renumbered
from tests.helpers.served import (
    MAX_TOKENS,
    PROMPTS,
    Target,
    draft_settings,
    running_draft,
    running_target,
    serving_target,
)

SIZE = 258
CHAIN = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "4"),
)
PLAIN = pb.SpeculationParams(disabled=True)
# The end of an answer cuts its last tree, so answers are long enough for that not to count.
NUM_TOKENS = 96


def _shuffled(num_kept: int = SIZE) -> list[int]:
    order = [*range(num_kept - 2), SIZE - 2, SIZE - 1]
    random.Random(3).shuffle(order)
    return order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(num_layers=2, vocab_size=SIZE)
    folder = tmp_path_factory.mktemp("target")
    return write_checkpoint(folder, "llama", shape, seed=3, with_tokenizer=True)


@pytest.fixture(scope="module")
def other(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own model with other ids: always right once it is in the target's."""
    return renumbered(folder, tmp_path_factory.mktemp("other"), _shuffled())


def _embedded(folder: Path, draft: Path, *flags: str) -> list[str]:
    return [
        *("--model-path", str(folder), "--port", "0", "--device", "cpu"),
        *("--max-total-tokens", "2048", "--context-length", "256", "--draft", "embedded"),
        *("--candidate-wait-sequences=99", "--candidate-wait-ms", "10000"),
        # Whether speculation pays for a tiny model depends on what else the machine does.
        *("--speculative-adaptive=false", "--speculative-draft-model-path", str(draft)),
        *CHAIN,
        *flags,
    ]


async def _accepted(target: Target, temperature: float) -> float:
    """Returns the share of drafted tokens that is accepted; outputs are those of plain decoding."""

    async def answered(
        params: pb.SpeculationParams | None,
    ) -> list[tuple[list[int], pb.SpeculationStats]]:
        asked = (target.generate(each, temperature, params, NUM_TOKENS) for each in PROMPTS)
        return await asyncio.gather(*asked)

    plain, answers = await answered(PLAIN), await answered(None)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in plain]
    drafted = sum(stats.drafted_token_count for _, stats in answers)
    accepted = sum(stats.accepted_token_count for _, stats in answers)
    assert drafted > 0
    return accepted / drafted


@pytest.mark.parametrize("rounds", ["off", "on"])
async def test_in_the_targets_process(folder: Path, other: Path, rounds: str) -> None:
    flags = ("--device-rounds", rounds)
    async with running_target(_embedded(folder, other, *flags)) as target:
        assert await _accepted(target, 0.0) > 0.9
        assert await _accepted(target, 1.0) > 0.9


@pytest.mark.parametrize(("num_ids", "temperature"), [(SIZE + 40, 0.0), (SIZE - 20, 1.0)])
async def test_the_number_of_ids_may_differ_where_the_tokenizer_does_not(
    folder: Path, tmp_path: Path, num_ids: int, temperature: float
) -> None:
    """Models of one family fill their tables up to different sizes."""
    shape = TinyShape(num_layers=2, vocab_size=num_ids)
    draft = tmp_path / "draft"
    write_checkpoint(draft, "llama", shape, seed=3, with_tokenizer=True)
    async with running_target(_embedded(folder, draft, "--device-rounds", "on")) as target:
        await _accepted(target, temperature)


async def test_a_remote_draft_has_the_ids_of_the_target_that_is_named(
    folder: Path, tmp_path: Path
) -> None:
    shape, draft = TinyShape(num_layers=2, vocab_size=SIZE - 20), tmp_path / "draft"
    write_checkpoint(draft, "llama", shape, seed=3, with_tokenizer=True)
    flags = ("--tokenizer", str(folder))
    async with serving_target(folder, device_rounds=DeviceRoundsChoice.ON) as target:
        settings = draft_settings("STANDALONE", draft, *CHAIN, "--target", target.address, *flags)
        async with running_draft(settings):
            await target.until_attached(1)
            await _accepted(target, 1.0)
            assert await target.num_attached() == 1


async def test_rejection_takes_chains_of_such_a_draft(folder: Path, other: Path) -> None:
    flag = "--speculative-use-rejection-sampling"
    async with running_target(_embedded(folder, other, flag)) as target:
        assert await _accepted(target, 0.0) > 0.9
        tokens, stats = await target.generate(PROMPTS[0], 1.0)
        assert len(tokens) == MAX_TOKENS
        assert stats.accepted_token_count > 0.9 * stats.drafted_token_count


async def test_fewer_tokens_are_right_less_often(folder: Path, tmp_path: Path) -> None:
    """A draft that cannot propose every token, with trees that are prepared ahead."""
    draft = renumbered(folder, tmp_path / "draft", _shuffled(238))
    flags = ("--speculative-outcome-budget", "3")
    async with running_target(_embedded(folder, draft, *flags)) as target:
        for temperature in (0.0, 1.0):
            assert 0.1 < await _accepted(target, temperature) < 0.9


@pytest.mark.parametrize("rounds", ["off", "on"])
async def test_in_a_process_of_its_own(folder: Path, other: Path, rounds: str) -> None:
    reports: list[StepReport] = []
    async with serving_target(
        folder, reports.append, device_rounds=DeviceRoundsChoice(rounds)
    ) as target:
        address = ("--target", target.address)
        named = ("--tokenizer", str(folder))
        async with running_draft(draft_settings("STANDALONE", other, *CHAIN, *address, *named)):
            await target.until_attached(1)
            async with asyncio.timeout(60):  # the draft says when it is ready for rounds
                while rounds == "on" and all(each.round_shape is None for each in reports):
                    await target.generate(PROMPTS[0], 0.0)
            assert await _accepted(target, 0.0) > 0.9
            assert await _accepted(target, 1.0) > 0.9


async def test_ids_that_are_taken_for_the_targets_are_wrong(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    """The control: without a tokenizer of its own a draft is believed to have the target's."""
    bare = renumbered(folder, tmp_path / "bare", _shuffled())
    (bare / "tokenizer.json").unlink()
    async with serving_target(folder) as target:
        flags = ("--target", target.address, "--tokenizer", str(folder))
        async with running_draft(draft_settings("STANDALONE", bare, *CHAIN, *flags)):
            await target.until_attached(1)
            assert await _accepted(target, 0.0) < 0.3


async def test_weights_that_are_swapped_in_are_mapped_again(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    worse = write_checkpoint(
        tmp_path / "worse",
        "llama",
        TinyShape(num_layers=2, vocab_size=SIZE),
        seed=9,
        with_tokenizer=True,
    )
    first = renumbered(worse, tmp_path / "first", _shuffled())
    async with serving_target(folder) as target:
        flags = ("--target", target.address, "--tokenizer", str(folder))
        settings = draft_settings("STANDALONE", first, *CHAIN, *flags)
        async with (
            running_draft(settings) as draft,
            open_channel(f"127.0.0.1:{draft.admin_port}") as channel,
        ):
            await target.until_attached(1)
            assert await _accepted(target, 0.0) < 0.5
            admin = admin_grpc.AdminServiceStub(channel)
            running = asyncio.create_task(target.outputs(0.0))
            request = admin_pb.UpdateDraftWeightsRequest(model_path=str(other), weight_version="2")
            await admin.UpdateDraftWeights(request)
            await running
            assert await _accepted(target, 0.0) > 0.9


async def test_a_draft_that_is_not_told_is_refused_with_the_remedy(
    folder: Path, other: Path
) -> None:
    async with serving_target(folder) as target:
        settings = draft_settings("STANDALONE", other, "--target", target.address)
        async with running_draft(settings) as draft:
            [client] = draft._clients
            async with asyncio.timeout(60):
                while not client.status.is_refused:
                    await asyncio.sleep(0.02)  # to leave the core to the draft
            assert client.status.last_error is not None
            assert "TOKENIZER_MISMATCH" in client.status.last_error
            assert "--tokenizer" in client.status.last_error
