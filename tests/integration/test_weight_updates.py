"""Weights of a target replaced while an embedded head drafts for it: the head follows, and no token
is another one than that of the weights in force."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shared.models.heads.target_tensors import BorrowedTensors, TargetTensors
from shared.pb.outrider.admin.v1 import admin_service_pb2 as admin_pb
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.types.v1 import sampling_pb2
from tests.gateway.driving import eventually
from tests.helpers.checkpoints import TinyShape, write_byte_tokenizer, write_checkpoint
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.served import Target, running_target
from tests.helpers.step_hold import hold_outputs

# Tables of up to 16,384 elements would be the memory of the target: nothing to follow.
VOCAB_SIZE = 520
SHAPE = TinyShape(vocab_size=VOCAB_SIZE, num_layers=2, max_position_embeddings=512)
PROMPTS = (list(range(1, 40)), list(range(1, 30)), [7, 7, 7], [9, 8, 7, 6, 5])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = []
    for seed in (3, 4):
        folder = tmp_path_factory.mktemp("target")
        write_checkpoint(folder, "llama", SHAPE, seed=seed)
        made.append(write_byte_tokenizer(folder))
    return made[0], made[1]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    hidden = SHAPE.hidden_size
    made = TinyHead(
        kind="EAGLE", vocab_size=VOCAB_SIZE, hidden_size=hidden, target_hidden_size=hidden
    )
    write_head(folder, made, seed=7)
    return folder


@asynccontextmanager
async def _serving(target: Path, head: Path | None, *flags: str) -> AsyncIterator[Target]:
    arguments = [
        *("--model-path", str(target), "--port", "0", "--device", "cpu", "--context-length", "512"),
        *("--max-total-tokens", "2048", "--candidate-wait-ms", "10000"),
        "--candidate-wait-sequences=99",
        *flags,
    ]
    if head is not None:
        arguments += [
            *("--draft", "embedded", "--speculative-algorithm", "EAGLE"),
            *("--speculative-draft-model-path", str(head), "--speculative-num-steps", "3"),
            *("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"),
        ]
    async with running_target(arguments) as running:
        yield running


async def _ask(stub: Any, prompt: list[int], count: int = 20) -> tuple[list[int], list[int]]:
    """Returns the tokens, and how many were drawn before each version but the first."""
    request = pb.GenerateRequest(
        prompt_token_ids=prompt,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.8, seed=len(prompt)),
        stop_params=sampling_pb2.StopParams(max_output_token_count=count, ignore_eos=True),
    )
    tokens: list[int] = []
    changes: list[int] = []
    async for response in stub.Generate(request):
        if response.delta.HasField("weight_version") and tokens:
            changes.append(len(tokens))
        tokens += response.delta.token_ids
    return tokens, changes


async def _answers(stub: Any) -> list[list[int]]:
    return [tokens for tokens, _ in await asyncio.gather(*(_ask(stub, each) for each in PROMPTS))]


def _disk(folder: Path) -> admin_pb.UpdateWeightsRequest:
    disk = admin_pb.UpdateWeightsRequest.Disk(model_path=str(folder))
    return admin_pb.UpdateWeightsRequest(disk=disk)


@pytest.mark.parametrize(
    ("rounds", "pause"),
    [
        ("on", None),
        ("off", admin_pb.PAUSE_MODE_RETRACT),
    ],
)
async def test_a_head_follows_and_every_token_is_that_of_its_weights(
    rounds: str,
    pause: admin_pb.PauseMode | None,
    folders: tuple[Path, Path],
    head: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    borrowers = _followed(monkeypatch)
    old, new = folders
    async with _serving(old, None) as target:
        of_old = await _answers(target.stub)
    async with _serving(new, None) as target:
        stub = target.stub
        of_new = await _answers(stub)
        async with _serving(old, head, "--device-rounds", rounds) as updated:
            drafted, admin = updated.stub, updated.admin
            assert await _answers(drafted) == of_old
            hold_outputs(updated.process)
            asking = [asyncio.create_task(_ask(drafted, each, 120)) for each in PROMPTS]
            while not (
                status := await admin.GetWeightStatus(admin_pb.GetWeightStatusRequest())
            ).running_request_count:
                assert status.weight_version == "default"
            if pause is not None:
                await admin.PauseGeneration(admin_pb.PauseGenerationRequest(mode=pause))
            await admin.UpdateWeights(_disk(new))
            if pause is not None:
                await admin.ContinueGeneration(admin_pb.ContinueGenerationRequest())
            answers = await asyncio.gather(*asking)
            assert any(changes for _, changes in answers), "all had ended before the update"
            assert [len(tokens) for tokens, _ in answers] == [120] * len(PROMPTS)
            changed = [
                (prompt, tokens, place)
                for prompt, (tokens, changes) in zip(PROMPTS, answers, strict=True)
                for place in changes
            ]
            rests = await asyncio.gather(
                *(
                    _rest(stub, [*prompt, *tokens[:place]], len(prompt), 120 - place)
                    for prompt, tokens, place in changed
                )
            )
            assert rests == [tokens[place:] for _, tokens, place in changed]
            assert await _answers(drafted) == of_new
            [borrowed] = borrowers
            assert _has_tables_of(new, borrowed)


async def test_many_updates_lose_no_request(folders: tuple[Path, Path], head: Path) -> None:
    """Each runs on with its own seed, on whatever weights are in force."""
    done = asyncio.Event()

    async def asked(stub: Any, prompt: list[int]) -> list[tuple[list[int], list[int]]]:
        answers = [await _ask(stub, prompt, 60)]
        while not done.is_set():
            answers.append(await _ask(stub, prompt, 60))
        return answers

    async with _serving(folders[0], head) as target:
        stub, admin = target.stub, target.admin
        hold = hold_outputs(target.process, times=12)
        asking = [asyncio.create_task(asked(stub, prompt)) for prompt in PROMPTS]
        for number in range(12):
            await eventually(lambda: hold.is_held)  # each comes in the middle of an output
            answer = await admin.UpdateWeights(_disk(folders[(number + 1) % 2]))
            assert answer.update.weight_version == str(number + 1)
        done.set()
        answers = await asyncio.gather(*asking)
        assert all(len(tokens) == 60 for each in answers for tokens, _ in each)
        assert sum(len(changes) for each in answers for _, changes in each) >= 6
        for prompt, each in zip(PROMPTS, answers, strict=True):
            tokens, changes = each[-1]
            start = changes[-1] if changes else 0
            rest = await _rest(stub, [*prompt, *tokens[:start]], len(prompt), 60 - start)
            assert tokens[start:] == rest


def _followed(monkeypatch: pytest.MonkeyPatch) -> list[BorrowedTensors]:
    """Returns whoever follows an update from now on, once for each time that it did."""
    borrowers: list[BorrowedTensors] = []
    follow = BorrowedTensors.follow

    def noted(borrowed: BorrowedTensors, target: TargetTensors) -> None:
        follow(borrowed, target)
        borrowers.append(borrowed)

    monkeypatch.setattr(BorrowedTensors, "follow", noted)
    return borrowers


def _has_tables_of(folder: Path, borrowed: BorrowedTensors) -> bool:
    assert borrowed._head is not None
    weights = load_file(folder / "model.safetensors")
    key = "model.embed_tokens.weight" if borrowed.config.tie_word_embeddings else "lm_head.weight"
    return torch.equal(borrowed._head.dense(), weights[key])


async def _rest(stub: Any, prompt: list[int], seed: int, count: int) -> list[int]:
    request = pb.GenerateRequest(
        prompt_token_ids=prompt,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.8, seed=seed),
        stop_params=sampling_pb2.StopParams(max_output_token_count=count, ignore_eos=True),
    )
    return [token async for each in stub.Generate(request) for token in each.delta.token_ids]


async def test_without_its_copies_a_head_is_found_out(
    folders: tuple[Path, Path], head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is not told: its tokens stay right, and what it borrowed is seen to be old."""
    told: list[BorrowedTensors] = []
    monkeypatch.setattr(BorrowedTensors, "follow", lambda self, _: told.append(self))
    old, new = folders
    async with _serving(new, None) as target:
        of_new = await _answers(target.stub)
    async with _serving(old, head) as drafted:
        await drafted.admin.UpdateWeights(_disk(new))
        assert await _answers(drafted.stub) == of_new
        [borrowed] = told
        assert not _has_tables_of(new, borrowed)
