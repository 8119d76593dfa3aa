"""A learner on a real target: what it is shown teaches a head, which the running draft takes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.draft.learner.__main__ import read_settings
from services.draft.learner.process import LearnerProcess
from services.draft.learner.student import Measurement, Student
from services.draft.training.documents import Documents
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import build_head, init_from_target, save_head
from shared.errors import CheckpointError, InvalidArgument, SettingsError
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.rpc.channel import open_channel
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.other_vocabularies import renumbered
from tests.helpers.served import Target, draft_settings, running_draft, serving_target

VOCAB_SIZE = 300
WAIT_S = 300.0


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=4)
    write_checkpoint(folder, "llama", shape, seed=3, with_tokenizer=True)
    return folder


@pytest.fixture(params=["EAGLE3", "MTP", "STANDALONE"])
def algorithm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def head_folder(target_folder: Path, algorithm: str, tmp_path: Path) -> Path:
    """Of a head, or of a small language model."""
    if algorithm == "STANDALONE":
        shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=1)
        folder = tmp_path / "draft"
        folder.mkdir()
        return write_checkpoint(folder, "llama", shape, seed=5, with_tokenizer=True)
    target = FrozenTarget.load(target_folder, device=torch.device("cpu"), dtype=torch.float32)
    torch.manual_seed(5)
    head = build_head(target.head_shape(Algorithm(algorithm)))
    init_from_target(head, target)
    save_head(head, tmp_path / "head")
    return tmp_path / "head"


def _learner(algorithm: str, head: Path, target: Path, out: Path, *flags: str) -> LearnerProcess:
    settings = read_settings(
        [
            *("--speculative-algorithm", algorithm, "--device", "cpu"),
            *("--speculative-draft-model-path", str(head), "--target-model-path", str(target)),
            *("--out", str(out), "--lesson-tokens", "100", "--lesson-updates", "2"),
            *("--held-out-share", "0.5", "--window", "32", *flags),
        ]
    )
    return LearnerProcess(settings)


def test_a_draft_of_another_family_is_not_taught(target_folder: Path, tmp_path: Path) -> None:
    draft = renumbered(target_folder, tmp_path / "draft", range(50, 0, -1))
    with pytest.raises(CheckpointError, match="another tokenizer than"):
        _learner("STANDALONE", draft, target_folder, tmp_path / "out", "--target", "127.0.0.1:1")


@asynccontextmanager
async def _running(process: LearnerProcess) -> AsyncIterator[None]:
    stop = asyncio.Event()
    running = asyncio.create_task(process.run(stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(running, WAIT_S)


async def _until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not is_so():
            await asyncio.sleep(0.01)


async def _ask(
    target: Target, count: int, *, never_learnt: bool = False, disabled: bool = True
) -> list[list[int]]:
    speculation = pb.SpeculationParams(never_learnt=never_learnt, disabled=disabled)
    prompts = [[seed % 250 + 3, 7, 9, 11] for seed in range(count)]
    answers = await asyncio.gather(
        *(target.generate(prompt, 0.0, speculation, num_tokens=36) for prompt in prompts)
    )
    return [tokens for tokens, _ in answers]


async def _changes(target: Target) -> list[tuple[str, str]]:
    """Returns which weights replaced others, by what the target says."""
    model = await target.stub.GetModel(pb.GetModelRequest())
    return [(each.algorithm, each.weight_version) for each in model.weight_changes]


async def test_what_is_learnt_reaches_the_running_draft(
    target_folder: Path, head_folder: Path, algorithm: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # Whatever is measured last looks better than what was measured before.
    measured, is_model = itertools.count(1), algorithm == "STANDALONE"
    monkeypatch.setattr(Student, "measure", lambda *_, **__: Measurement(((1, next(measured)),)))
    async with serving_target(target_folder) as target:
        lender = () if is_model else ("--target-model-path", str(target_folder))
        settings = draft_settings(algorithm, head_folder, "--target", target.address, *lender)
        async with running_draft(settings) as draft:
            process = await asyncio.to_thread(
                _learner, algorithm, head_folder, target_folder, tmp_path / "out",
                *("--target", target.address, "--publish-to", f"127.0.0.1:{draft.admin_port}"),
            )  # fmt: skip
            async with _running(process):
                await _until(lambda: process.traffic.num_links == 1)
                plain = await _ask(target, 8)
                async with asyncio.timeout(WAIT_S):
                    while not process.learner.figures.num_swaps:
                        await _ask(target, 8)  # what came while it learnt, it may have missed
                assert await _ask(target, 2, disabled=False) == plain[:2], "no token changes"
            assert process.learner.version > 0
            async with open_channel(f"127.0.0.1:{draft.admin_port}") as channel:
                admin = admin_grpc.AdminServiceStub(channel)
                info = await admin.GetServerInfo(admin_pb.GetServerInfoRequest())
            assert info.gauges["weight_swap_count"] == process.learner.figures.num_swaps + 1
            versions = range(process.learner.figures.num_swaps + 1)
            told = [(algorithm, str(version)) for version in versions]
            async with asyncio.timeout(WAIT_S):
                while await _changes(target) != told:
                    await asyncio.sleep(0.01)
            figures = {each.name: each.samples[0].value for each in process.metrics().collect()}
            assert figures["outrider_learner_version"] == process.learner.version
            after, before = (f"outrider_learner_accepted_{each}" for each in ("after", "before"))
            assert figures[after] > figures[before] > 0.0


@pytest.mark.parametrize("algorithm", ["EAGLE3"], indirect=True)
async def test_what_must_not_be_learnt_never_arrives(
    target_folder: Path, head_folder: Path, algorithm: str, tmp_path: Path
) -> None:
    async with serving_target(target_folder) as target:
        record = tmp_path / "traffic.npz"
        flags = ("--target", target.address, "--lesson-tokens", "1000000", "--record", str(record))
        process = await asyncio.to_thread(
            _learner, algorithm, head_folder, target_folder, tmp_path / "out", *flags
        )
        async with _running(process):
            await _until(lambda: process.traffic.num_links == 1)
            await _ask(target, 5, never_learnt=True)
            [answer] = await _ask(target, 1)
            await _until(lambda: process.traffic.num_examples > 0)
        assert process.traffic.num_examples == 1
        [text] = Documents.load(record).rows()
        assert len(text) == 32, "its window"
        assert text == answer[-32:], "what arrived is recorded, and no more"


@pytest.mark.parametrize("algorithm", ["EAGLE3"], indirect=True)
async def test_a_draft_of_another_head_is_named_at_once(
    target_folder: Path, head_folder: Path, algorithm: str, tmp_path: Path
) -> None:
    async with serving_target(target_folder) as target:
        lender = ("--target-model-path", str(target_folder))
        settings = draft_settings("EAGLE3", head_folder, "--target", target.address, *lender)
        other = tmp_path / "other"
        frozen = FrozenTarget.load(target_folder, device=torch.device("cpu"), dtype=torch.float32)
        save_head(
            build_head(frozen.head_shape(Algorithm(algorithm), intermediate_size=24)),
            other,
        )
        async with running_draft(settings) as draft:
            process = await asyncio.to_thread(
                _learner, algorithm, other, target_folder, tmp_path / "out",
                *("--target", target.address, "--publish-to", f"127.0.0.1:{draft.admin_port}"),
            )  # fmt: skip
            with pytest.raises(InvalidArgument, match="config"):
                await process.run(asyncio.Event())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "name something to learn from"),
        (("--traffic", "x.npz"), "--max-lessons"),
        (("--target", "127.0.0.1:1", "--target-model-path", "/elsewhere"), "name the draft"),
        (("--target", "127.0.0.1:1", "--publish-to", "here"), "--publish-to"),
    ],
)
def test_bad_settings_are_named(flags: tuple[str, ...], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        read_settings(list(flags))


@pytest.mark.parametrize("algorithm", ["EAGLE"], indirect=True)
async def test_other_weights_of_the_target_are_learnt_from_anew(
    target_folder: Path, head_folder: Path, algorithm: str, tmp_path: Path
) -> None:
    other = write_checkpoint(
        tmp_path / "other", "llama", TinyShape(vocab_size=VOCAB_SIZE, num_layers=4), seed=4
    )
    async with serving_target(target_folder) as target:
        flags = ("--target", target.address, "--lesson-tokens", "1000000")
        process = await asyncio.to_thread(
            _learner, algorithm, head_folder, target_folder, tmp_path / "out", *flags
        )
        async with _running(process):
            await _until(lambda: process.traffic.num_links == 1)
            await _ask(target, 3)
            await _until(lambda: process.traffic.num_examples == 3)
            disk = admin_pb.UpdateWeightsRequest.Disk(model_path=str(other))
            await target.admin.UpdateWeights(admin_pb.UpdateWeightsRequest(disk=disk))
            await _until(lambda: process.traffic.num_forgotten == 1)
            assert process.traffic.num_kept_tokens == 0
            weights = load_file(other / "model.safetensors")
            tables = process.learner._student._tables
            await _until(lambda: torch.equal(tables.lm_head, weights["lm_head.weight"]))
            assert torch.equal(tables.embedding, weights["model.embed_tokens.weight"])
