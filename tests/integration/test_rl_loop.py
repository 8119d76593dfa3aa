"""GRPO with rollouts from a served target, in slime's order of calls: the reward rises, no draft
changes a rollout, and engine and trainer agree on the distribution that they were drawn from."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor
from transformers import PreTrainedModel

from shared.kv.leases import KvLeases
from tests.helpers.checkpoints import (
    BYTE_VOCAB_SIZE,
    TinyShape,
    build_model,
    write_byte_tokenizer,
    write_checkpoint,
)
from tests.helpers.draft_heads import TinyHead, write_head
from tests.helpers.rollout_server import Server, rollout_server

SHAPE = TinyShape(num_layers=6)
TEMPERATURE = 0.7
PROMPT = [(7 * place) % 256 for place in range(40)]  # whole pages, which the cache keeps
NUM_NEW, GROUP, NUM_STEPS = 8, 8, 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("target")
    write_checkpoint(made, "llama", SHAPE, seed=3)
    return write_byte_tokenizer(made)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Of an embedded head that drafts."""
    head, hidden = tmp_path_factory.mktemp("head"), SHAPE.hidden_size
    made = TinyHead(
        kind="EAGLE3", vocab_size=BYTE_VOCAB_SIZE, hidden_size=hidden, target_hidden_size=hidden
    )
    write_head(head, made, seed=7)
    return (
        *("--draft", "embedded", "--speculative-algorithm", "EAGLE3", "--device-rounds", "on"),
        *("--speculative-draft-model-path", str(head), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6"),
    )


async def rollouts(server: Server, seeds: range, *, has_draft: bool = True) -> list[Any]:
    body = {
        "input_ids": [PROMPT] * len(seeds), "return_logprob": True,
        "speculation": {"disable": not has_draft},
    }  # fmt: skip
    params = {"temperature": TEMPERATURE, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    bodies = [
        {**body, "input_ids": PROMPT, "sampling_params": {**params, "sampling_seed": seed}}
        for seed in seeds
    ]
    return await asyncio.gather(*(server.post("/generate", each) for each in bodies))


def log_probs(model: PreTrainedModel, answers: list[Any]) -> Tensor:
    """Returns `[G, N]`, the trainer's log probabilities of what was drawn."""
    drawn = torch.tensor([each["output_ids"] for each in answers])
    ids = torch.cat((torch.tensor(PROMPT).expand(len(drawn), -1), drawn), dim=1)
    logits = model(ids).logits[:, len(PROMPT) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(2, drawn.unsqueeze(2)).squeeze(2)


def _difference(model: PreTrainedModel, answers: list[Any]) -> float:
    """Returns the largest difference of engine and trainer."""
    told = [[entry[0] for entry in each["meta_info"]["output_token_logprobs"]] for each in answers]
    with torch.no_grad():
        return float((log_probs(model, answers) - torch.tensor(told)).abs().max())


def rewards(answers: list[Any]) -> Tensor:
    """The rule: tokens below 64."""
    drawn = torch.tensor([each["output_ids"] for each in answers])
    return (drawn < 64).float().mean(1)


def advantages(given: Tensor) -> Tensor:
    """`[G]` rewards to `[G, 1]`, against those of the group."""
    return ((given - given.mean()) / (given.std() + 1e-4)).unsqueeze(1)


async def send(server: Server, model: PreTrainedModel, version: str) -> None:
    """A weight update as slime makes it, in buckets."""
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    names = sorted(weights)
    await server.post("/pause_generation", {"mode": "retract"})
    await server.get("/flush_cache")
    await server.post("/begin_weight_update", {"selector": "all"})
    for part in (names[::2], names[1::2]):
        content = base64.b64encode(save({name: weights[name].contiguous() for name in part}))
        bucket = {"serialized_named_tensors": [content.decode()], "load_format": "safetensors"}
        await server.post("/update_weights_from_tensor", {**bucket, "weight_version": version})
    await server.post("/end_weight_update", {"selector": "all"})
    await server.post("/continue_generation", {})


async def test_reward_rises_and_drafts_change_no_rollout(
    folder: Path, flags: tuple[str, ...]
) -> None:
    model = build_model("llama", SHAPE, seed=3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    means: list[float] = []
    num_drafted = 0
    async with rollout_server(folder, flags=flags) as server:
        for step in range(NUM_STEPS):
            answers = await rollouts(server, range(step * GROUP, (step + 1) * GROUP))
            plain = await rollouts(server, range(step * GROUP, step * GROUP + 2), has_draft=False)
            for with_draft, without in zip(answers, plain, strict=False):
                assert with_draft["output_ids"] == without["output_ids"]
            version = "default" if step == 0 else str(step)
            assert {each["meta_info"]["weight_version"] for each in answers} == {version}
            assert _difference(model, answers) <= 1e-4
            num_drafted += sum(each["meta_info"].get("spec_draft_token_num", 0) for each in answers)
            means.append(float(rewards(answers).mean()))
            loss = -(advantages(rewards(answers)) * log_probs(model, answers)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            await send(server, model, str(step + 1))
        assert num_drafted > 0
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.1, means


async def test_a_cache_that_is_not_flushed_is_found_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: prefixes of the old weights in an answer of the new ones."""
    other = build_model("llama", SHAPE, seed=4)
    async with rollout_server(folder) as server:
        await rollouts(server, range(1))
        await send(server, other, "1")
        assert _difference(other, await rollouts(server, range(2))) <= 1e-4
        monkeypatch.setattr(KvLeases, "retire", lambda self: 0)
        monkeypatch.setattr(KvLeases, "flush", lambda self: 0)
        mine = build_model("llama", SHAPE, seed=3)
        await send(server, mine, "2")
        assert _difference(mine, await rollouts(server, range(2))) > 1e-3
