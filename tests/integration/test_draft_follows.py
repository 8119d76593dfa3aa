"""Drafts in processes of their own, whose target takes other weights: what they borrow follows."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.drafters.table_service import BorrowedTables
from services.draft.process import DraftProcess
from services.draft.settings import DraftSettings
from services.target.drafts.draft_exchange import DraftExchange
from shared.errors import InvalidArgument
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.draft.v1 import draft_service_pb2 as draft_pb
from shared.pb.outrider.draft.v1 import draft_service_pb2_grpc as draft_grpc
from shared.pb.outrider.speculation.v1 import speculation_service_pb2 as pb
from shared.pb.outrider.speculation.v1 import speculation_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2, tensor_pb2
from shared.rpc.channel import open_channel
from shared.rpc.status import error_from_rpc
from shared.runtime.tensor_codec import tensor_message
from shared.settings import load_settings
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.served import Target, running_draft, serving_target

VOCAB_SIZE = 300
SHAPE = TinyShape(vocab_size=VOCAB_SIZE, num_layers=2, max_position_embeddings=512)
WAIT_S = 60.0


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def folders(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    shape = replace(SHAPE, tie_word_embeddings=request.param)
    made = []
    for name, seed in (("old", 3), ("new", 4)):
        write_checkpoint(tmp_path / name, "llama", shape, seed=seed)
        made.append(write_byte_tokenizer(tmp_path / name))
    return made[0], made[1]


@pytest.fixture
def head(tmp_path: Path) -> Path:
    hidden = SHAPE.hidden_size
    made = TinyHead(
        kind="EAGLE",
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden,
        target_hidden_size=hidden,
        has_embedding=False,
    )
    write_head(tmp_path / "head", made, seed=7)
    return tmp_path / "head"


def _settings(target: Path, head: Path, *flags: str) -> DraftSettings:
    arguments = [
        *("--device", "cpu", "--max-total-tokens", "2048", "--port", "0", *flags),
        *("--target-model-path", str(target), "--speculative-algorithm", "EAGLE"),
        *("--speculative-draft-model-path", str(head)),
    ]
    return load_settings(DraftSettings, service="draft", arguments=arguments, env={})


async def _tree(draft: DraftProcess) -> list[int]:
    """Returns the tree behind a text whose features are given."""
    draw = torch.Generator().manual_seed(1)
    features = tensor_message(torch.randn(8, SHAPE.hidden_size, generator=draw))
    request = draft_pb.ProposeTreeRequest(
        token_ids=range(5, 14),
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        features=features,
    )
    async with open_channel(f"127.0.0.1:{draft.port}") as channel:
        response = await draft_grpc.DraftServiceStub(channel).ProposeTree(request)
    return list(response.tree.token_ids)


async def _update(target: Target, folder: Path) -> None:
    disk = admin_pb.UpdateWeightsRequest.Disk(model_path=str(folder))
    await target.admin.UpdateWeights(admin_pb.UpdateWeightsRequest(disk=disk))


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Gets the number of updates each time that a draft has followed one."""
    done: asyncio.Queue[int] = asyncio.Queue()
    reload = BorrowedTables.reload

    async def noted(tables: BorrowedTables, channel: object, num_updates: int) -> None:
        await reload(tables, channel, num_updates)  # type: ignore[arg-type]
        done.put_nowait(tables.num_updates)

    monkeypatch.setattr(BorrowedTables, "reload", noted)
    return done


@pytest.mark.parametrize(
    ("folders", "is_late"),
    [(False, True), (True, False)],
    indirect=["folders"],
    ids=["untied, late", "tied"],
)
async def test_a_draft_elsewhere_drafts_as_one_of_the_new_weights(
    is_late: bool, folders: tuple[Path, Path], head: Path, followed: asyncio.Queue[int]
) -> None:
    """Also where it attaches when the update is over."""
    old, new = folders
    async with running_draft(_settings(new, head)) as draft:
        of_new = await _tree(draft)
    async with serving_target(old) as target:
        if is_late:
            await _update(target, new)
        async with running_draft(_settings(old, head, "--target", target.address)) as draft:
            of_old = await _tree(draft)
            await target.until_attached(1)
            plain = await target.outputs(0.8)
            if not is_late:
                assert of_old != of_new
                await _update(target, new)
            assert await asyncio.wait_for(followed.get(), WAIT_S) == 1
            assert await _tree(draft) == of_new
            assert (await target.outputs(0.8) == plain) == is_late
            await _update(target, old)
            assert await asyncio.wait_for(followed.get(), WAIT_S) == 2
            assert await _tree(draft) != of_new


@pytest.mark.parametrize("folders", [True], indirect=True)
async def test_a_draft_that_is_not_told_is_found_out(
    folders: tuple[Path, Path], head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DraftExchange, "weights_updated", lambda self: None)
    old, new = folders
    async with running_draft(_settings(new, head)) as draft:
        of_new = await _tree(draft)
    async with serving_target(new) as target:
        right = await target.outputs(0.8)
    async with serving_target(old) as target:
        async with running_draft(_settings(old, head, "--target", target.address)) as draft:
            await target.until_attached(1)
            await _update(target, new)
            assert await target.outputs(0.8) == right, "tokens are the target's all the same"
            assert await _tree(draft) != of_new


@pytest.mark.parametrize("folders", [False], indirect=True)
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.ReadTableRequest(data_type=tensor_pb2.DATA_TYPE_FLOAT32), "TABLE_UNKNOWN"),
        (
            pb.ReadTableRequest(
                table=pb.TABLE_LM_HEAD, data_type=tensor_pb2.DATA_TYPE_FLOAT32, update_count=3
            ),
            "WEIGHTS_CHANGED",
        ),
        (pb.ReadTableRequest(table=pb.TABLE_EMBEDDING), "TENSOR_MALFORMED"),
    ],
)
async def test_tables_that_cannot_be_read(
    request_: pb.ReadTableRequest, reason: str, folders: tuple[Path, Path]
) -> None:
    from grpc import aio

    async with serving_target(folders[0]) as target:
        async with open_channel(target.address) as channel:
            with pytest.raises(aio.AioRpcError) as refused:
                [_ async for _ in pb_grpc.SpeculationServiceStub(channel).ReadTable(request_)]
    error = error_from_rpc(refused.value)
    assert error.reason == reason
    assert isinstance(error, InvalidArgument) == (reason != "WEIGHTS_CHANGED")
