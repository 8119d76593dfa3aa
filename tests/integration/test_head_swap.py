"""Weights of a head swapped while requests run: no token changes, and no request waits longer than
for a round."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file

from services.draft.drafter_factory import build_drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.head_weights import HeadWeights
from services.draft.settings import DraftSettings
from shared.models import weights as weights_module
from shared.models.weights import SERVING_PACE, CopyPace, WeightCopy
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.admin.v1 import admin_service_pb2_grpc as admin_grpc
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from shared.runtime.round_runner import RoundRunner
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer, write_checkpoint
from tests.helpers.draft_heads import TinyHead, head_tensors, save_head, write_head
from tests.helpers.served import draft_settings, running_draft, running_target

VOCAB_SIZE = 300
PROMPTS = (list(range(1, 40)), list(range(1, 30)), [7, 7, 7])
_SHAPE = (
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "2"),
    *("--speculative-num-draft-tokens", "6"),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, "llama", TinyShape(vocab_size=VOCAB_SIZE, num_layers=4), seed=3)
    return write_byte_tokenizer(folder)


def _write(folder: Path, kind: str, seed: int) -> Path:
    """Heads of one kind with one `fc` but other weights for every seed."""
    hidden = TinyShape().hidden_size
    head = TinyHead(kind=kind, vocab_size=VOCAB_SIZE, hidden_size=hidden, target_hidden_size=hidden)
    write_head(folder, head, seed=seed)
    tensors = head_tensors(head, seed=seed)
    if kind == "EAGLE3":
        tensors["fc.weight"] = head_tensors(head)["fc.weight"]
    save_head(folder, tensors)
    return folder


PLACED = [("EAGLE", "remote"), ("EAGLE3", "embedded")]
FEWEST_SWAPS = 5


@pytest.fixture(params=["EAGLE", "EAGLE3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def heads(tmp_path: Path, kind: str) -> tuple[Path, Path]:
    return _write(tmp_path / "first", kind, 7), _write(tmp_path / "second", kind, 8)


def _flags(kind: str, head: Path) -> list[str]:
    own = ("--speculative-algorithm", kind, "--speculative-draft-model-path", str(head))
    return [*own, *_SHAPE]


def _draft_settings(kind: str, head: Path, target: Path, *flags: str) -> DraftSettings:
    shape = ("--target-model-path", str(target), *_SHAPE, *flags)
    return draft_settings(kind, head, *shape)


@asynccontextmanager
async def _serving(
    kind: str, head: Path, target: Path, placement: str
) -> AsyncIterator[tuple[pb_grpc.TargetServiceStub, admin_grpc.AdminServiceStub]]:
    """Yields the target, and who takes the draft's weights."""
    arguments = [
        *("--model-path", str(target), "--port", "0", "--device", "cpu", "--context-length", "256"),
        *("--max-total-tokens", "2048", "--candidate-wait-ms", "10000"),
        "--candidate-wait-sequences=99",
        *("--draft", placement),
    ]
    if placement == "embedded":
        arguments += [*_flags(kind, head), "--device-rounds", "on"]
    async with running_target(arguments) as running:
        if placement == "embedded":
            yield running.stub, running.admin
            return
        remote = _draft_settings(kind, head, target, "--target", running.address)
        async with (
            running_draft(remote) as draft,
            open_channel(f"127.0.0.1:{draft.admin_port}") as admin,
        ):
            yield running.stub, admin_grpc.AdminServiceStub(admin)


async def _outputs(
    stub: pb_grpc.TargetServiceStub, *, disabled: bool = False
) -> tuple[list[list[int]], int]:
    """Returns each prompt's output, and how many trees were verified in all."""

    async def one(prompt: list[int]) -> tuple[list[int], int]:
        request = pb.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=sampling_pb2.SamplingParams(temperature=1.0, seed=3),
            stop_params=sampling_pb2.StopParams(max_output_token_count=60, ignore_eos=True),
            speculation_params=pb.SpeculationParams(disabled=disabled),
        )
        responses = [response async for response in stub.Generate(request)]
        tokens = [token for each in responses for token in each.delta.token_ids]
        return tokens, responses[-1].finished.speculation.verified_round_count

    results = await asyncio.gather(*map(one, PROMPTS))
    return [tokens for tokens, _ in results], sum(count for _, count in results)


@pytest.mark.parametrize(("kind", "placement"), PLACED, indirect=["kind"])
async def test_swaps_under_load_lose_no_token(
    target: Path, heads: tuple[Path, Path], kind: str, placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    launch, launched_s, pauses_s = RoundRunner.launch, list[float](), list[float]()

    def noted(runner: RoundRunner, masked: Iterable[int]) -> None:
        launched_s.append(time.perf_counter())
        launch(runner, masked)

    monkeypatch.setattr(RoundRunner, "launch", noted)
    async with _serving(kind, heads[0], target, placement) as (stub, admin):
        expected, _ = await _outputs(stub, disabled=True)

        async def ask() -> int:
            num_verified = 0
            while len(pauses_s) < FEWEST_SWAPS:
                found, count = await _outputs(stub)
                assert found == expected
                num_verified += count
            return num_verified

        asking = asyncio.create_task(ask())
        while not asking.done():
            number = len(pauses_s) + 1
            request = admin_pb.UpdateDraftWeightsRequest(
                model_path=str(heads[number % 2]), weight_version=str(number)
            )
            response = await admin.UpdateDraftWeights(request)
            pauses_s.append(response.pause_duration.ToNanoseconds() / 1e9)
        assert await asking > 0
        if placement == "embedded":
            model = await stub.GetModel(pb.GetModelRequest())
            assert [(each.algorithm, each.weight_version) for each in model.weight_changes] == [
                (kind, str(number + 1)) for number in range(len(pauses_s))
            ][-64:]
    assert min(pauses_s) > 0.0
    assert launched_s
    if placement == "embedded":
        rounds_s = [later - earlier for earlier, later in itertools.pairwise(launched_s)]
        # Of the shortest and a usual one: a busy machine may hold any up.
        assert min(pauses_s) <= statistics.median(rounds_s)


@pytest.mark.parametrize(("kind", "placement"), PLACED, indirect=["kind"])
async def test_requests_run_while_weights_are_read(
    target: Path, heads: tuple[Path, Path], kind: str, placement: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    read, may_read, reads = HeadWeights._read, threading.Event(), threading.Event()

    def slow(weights: HeadWeights, folder: Path) -> object:
        reads.set()
        assert may_read.wait(60.0)
        return read(weights, folder)

    monkeypatch.setattr(HeadWeights, "_read", slow)
    async with _serving(kind, heads[0], target, placement) as (stub, admin):
        request = admin_pb.UpdateDraftWeightsRequest(model_path=str(heads[1]))
        update = asyncio.ensure_future(admin.UpdateDraftWeights(request))
        assert await asyncio.to_thread(reads.wait, 60.0)
        _, num_verified = await _outputs(stub)
        assert num_verified > 0
        assert not update.done()
        may_read.set()
        await update


def _running(settings: DraftSettings) -> tuple[EagleDrafter, HeadWeights]:
    drafter = build_drafter(settings)
    assert isinstance(drafter, EagleDrafter)
    return drafter, HeadWeights(settings, drafter, _Idle())  # type: ignore[arg-type]


class _Idle:
    """An engine that has nothing else to do."""

    def between_rounds(self, function: Callable[[], float]) -> Future[float]:
        future: Future[float] = Future()
        future.set_result(function())
        return future


@pytest.mark.parametrize("quantisation", ["unquant", "int8"])
def test_weights_lie_where_they_lay(
    target: Path,
    heads: tuple[Path, Path],
    kind: str,
    quantisation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = ("--speculative-draft-model-quantization", quantisation)
    first, weights = _running(_draft_settings(kind, heads[0], target, *flags))
    second, _ = _running(_draft_settings(kind, heads[1], target, *flags))
    copy, paces = weights_module.copy_weights, list[CopyPace]()

    def noted(copies: Iterable[WeightCopy], device: torch.device, pace: CopyPace) -> Iterator[int]:
        paces.append(pace)
        return copy(copies, device, pace)

    monkeypatch.setattr(weights_module, "copy_weights", noted)
    norm = first.head.layers[0].mlp_norm.weight  # type: ignore[attr-defined]
    address = norm.data_ptr()
    assert not torch.equal(norm, second.head.layers[0].mlp_norm.weight)  # type: ignore[attr-defined]
    assert weights.take(heads[1], "1") > 0.0
    assert norm.data_ptr() == address
    own, other = first.head.vocabulary.lm_head.dense(), second.head.vocabulary.lm_head.dense()
    assert torch.equal(own, other)
    for name in ("qkv", "output"):
        own = getattr(first.head.layers[0].attention, name).dense()
        assert torch.equal(own, getattr(second.head.layers[0].attention, name).dense())
    assert torch.equal(norm, second.head.layers[0].mlp_norm.weight)  # type: ignore[attr-defined]
    assert (weights.version, weights.num_swaps) == ("1", 1)
    assert paces == [SERVING_PACE], "no step waits for the copies"


BAD_WEIGHTS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor] | None, str], ...] = (
    ("post_attention_layernorm.weight", lambda each: each * float("nan"), "mlp_norm.weight"),
    ("post_attention_layernorm.weight", lambda each: each[:-1], "post_attention_layernorm"),
    ("self_attn.o_proj.weight", None, "o_proj.weight"),
)
"""A tensor, the change to it (None leaves it out), and the name in the refusal."""


async def test_bad_weights_are_refused_by_name(
    target: Path, heads: tuple[Path, Path], kind: str
) -> None:
    good = load_file(heads[1] / "model.safetensors")
    async with _serving(kind, heads[0], target, "remote") as (stub, admin):
        expected, _ = await _outputs(stub, disabled=True)
        for key, change, named in BAD_WEIGHTS:
            [whole] = [each for each in good if each.endswith(key)]
            tensors = {name: tensor for name, tensor in good.items() if name != whole}
            if change is not None:
                tensors[whole] = change(good[whole]).contiguous()
            save_head(heads[1], tensors)
            with pytest.raises(grpc.aio.AioRpcError, match=named) as refused:
                await admin.UpdateDraftWeights(
                    admin_pb.UpdateDraftWeightsRequest(model_path=str(heads[1]))
                )
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        found, num_verified = await _outputs(stub)
    assert found == expected
    assert num_verified > 0


async def test_what_the_target_applies_stays(target: Path, tmp_path: Path) -> None:
    first, second = _write(tmp_path / "a", "EAGLE3", 7), _write(tmp_path / "b", "EAGLE3", 8)
    tensors = load_file(second / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"] + 1.0
    save_head(second, tensors)
    async with _serving("EAGLE3", first, target, "embedded") as (_, admin):
        with pytest.raises(grpc.aio.AioRpcError, match="projection differs"):
            await admin.UpdateDraftWeights(
                admin_pb.UpdateDraftWeightsRequest(model_path=str(second))
            )
