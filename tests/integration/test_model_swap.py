"""Weights of a draft model swapped while requests run: from then on it drafts with the new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.rpc.channel import open_channel
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.served import Target, draft_settings, running_draft, serving_target

SHAPE = TinyShape(vocab_size=300)
PROMPTS = (list(range(1, 40)), list(range(1, 30)), [7, 7, 7])


def _write(folder: Path, seed: int) -> Path:
    folder.mkdir()
    return write_checkpoint(folder, "llama", SHAPE, seed=seed, with_tokenizer=True)


@pytest.fixture
def target_folder(tmp_path: Path) -> Path:
    return _write(tmp_path / "target", 3)


@asynccontextmanager
async def _serving(
    target_folder: Path, draft_folder: Path
) -> AsyncIterator[tuple[Target, admin_grpc.AdminServiceStub]]:
    async with serving_target(target_folder) as target:
        settings = draft_settings(
            *("STANDALONE", draft_folder, "--target", target.address),
            # A chain: all of it is accepted where the draft is right.
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4"),
        )
        async with (
            running_draft(settings) as draft,
            open_channel(f"127.0.0.1:{draft.admin_port}") as admin,
        ):
            yield target, admin_grpc.AdminServiceStub(admin)


async def _asked(target: Target) -> tuple[list[list[int]], int, int]:
    """Returns the outputs, and how many draft tokens were verified and accepted."""
    found = await asyncio.gather(*(target.generate(prompt, 0.0) for prompt in PROMPTS))
    return (
        [tokens for tokens, _ in found],
        sum(stats.drafted_token_count for _, stats in found),
        sum(stats.accepted_token_count for _, stats in found),
    )


async def test_a_draft_that_becomes_its_target_is_always_right(
    target_folder: Path, tmp_path: Path
) -> None:
    async with _serving(target_folder, _write(tmp_path / "draft", 9)) as (target, admin):
        plain, drafted, accepted = await _asked(target)
        assert accepted < drafted / 2, "the control: other weights are often wrong"
        running = asyncio.create_task(_asked(target))
        request = admin_pb.UpdateDraftWeightsRequest(
            model_path=str(target_folder), weight_version="as the target"
        )
        response = await admin.UpdateDraftWeights(request)
        assert response.pause_duration.ToNanoseconds() > 0
        assert (await running)[0] == plain
        tokens, drafted, accepted = await _asked(target)
        assert tokens == plain
        assert drafted > 0
        assert accepted > 0.9 * drafted


async def test_bad_weights_are_refused_by_name_and_the_old_ones_go_on(
    target_folder: Path, tmp_path: Path
) -> None:
    draft = _write(tmp_path / "draft", 9)
    good = load_file(draft / "model.safetensors")
    norm = "model.norm.weight"
    bad = (
        ({**good, norm: good[norm] * float("nan")}, "norm.weight"),
        ({**good, norm: good[norm][:-1].contiguous()}, norm),
        ({name: each for name, each in good.items() if name != norm}, norm),
    )
    other = _write(tmp_path / "other", 10)
    async with _serving(target_folder, draft) as (target, admin):
        before = await _asked(target)
        for tensors, named in bad:
            save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
            with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
                await admin.UpdateDraftWeights(
                    admin_pb.UpdateDraftWeightsRequest(model_path=str(other))
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        wide = TinyShape(vocab_size=300, intermediate_size=2 * SHAPE.intermediate_size)
        (tmp_path / "wide").mkdir()
        write_checkpoint(tmp_path / "wide", "llama", wide, seed=9, with_tokenizer=True)
        with pytest.raises(grpc.aio.AioRpcError, match=r"config\.json is not that"):
            await admin.UpdateDraftWeights(
                admin_pb.UpdateDraftWeightsRequest(model_path=str(tmp_path / "wide"))
            )
        assert (await _asked(target))[0] == before[0]
    assert torch.isfinite(good[norm]).all()
