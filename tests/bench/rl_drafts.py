"""A frozen and a learning head side by side while GRPO trains their target.

``python -m tests.bench.rl_drafts`` runs the loop of `tests/integration/test_rl_loop.py`. Both heads
learn from the first rollouts; then one stays, and the other learns from each step's after it was
measured on them. Printed are the mean reward and tokens a round of chains of three, as they come.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import HeadStudent
from services.draft.learner.traffic import Example
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import build_head, save_head
from tests.helpers.checkpoints import build_model, write_byte_tokenizer, write_checkpoint
from tests.helpers.rollout_server import rollout_server
from tests.integration.test_rl_loop import (
    GROUP,
    PROMPT,
    SHAPE,
    advantages,
    log_probs,
    rewards,
    rollouts,
    send,
)

_STEPS = 3


@dataclass
class _Ends:
    """Of the version in force."""

    embedding: Tensor
    lm_head: Tensor


def _examples(target: FrozenTarget, answers: list[Any], layers: tuple[int, ...]) -> list[Example]:
    texts = [[*PROMPT, *each["output_ids"]] for each in answers]
    rows = target.read(torch.tensor(texts), layers).features[:, :-1]
    return [Example(tuple(text), own, len(PROMPT)) for text, own in zip(texts, rows, strict=True)]


async def _run(num_steps: int, num_updates: int, folder: Path) -> None:
    model: PreTrainedModel = build_model("llama", SHAPE, seed=3)
    (folder / "target").mkdir()
    write_checkpoint(folder / "target", "llama", SHAPE, seed=3)
    write_byte_tokenizer(folder / "target")
    first = FrozenTarget(copy.deepcopy(model))
    torch.manual_seed(0)
    shape = first.head_shape(Algorithm.EAGLE)
    save_head(build_head(shape), folder / "head", dtype=torch.float32)
    ends = _Ends(first.embedding, first.lm_head)
    settings = LearnerSettings(target=("127.0.0.1:1",), unroll=_STEPS, rate=3e-3, batch_size=8)
    frozen, learning = (HeadStudent(folder / "head", ends, settings) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    async with rollout_server(folder / "target") as server:
        for step in range(num_steps):
            answers = await rollouts(server, range(step * GROUP, (step + 1) * GROUP))
            target = FrozenTarget(copy.deepcopy(model))
            ends.embedding, ends.lm_head = target.embedding, target.lm_head
            examples = _examples(target, answers, shape.feature_layers)
            lengths = []
            for student in (frozen, learning):
                with student.with_weights(student.state()):
                    measured = student.measure(examples, num_steps=_STEPS)
                lengths.append(measured.mean_length)
            mean = float(rewards(answers).mean())
            print(
                f"step {step:2d}: reward {mean:.3f}, tokens a round {lengths[0]:.3f} frozen, "
                f"{lengths[1]:.3f} learning",
                flush=True,
            )
            for student in (frozen, learning) if step == 0 else (learning,):
                for _ in range(num_updates):
                    student.learn(examples, generator)
            loss = -(advantages(rewards(answers)) * log_probs(model, answers)).mean()
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            await send(server, model, str(step + 1))


def main() -> None:
    """Prints a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.HelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--updates", type=int, default=40, help="of the heads, a step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(_run(arguments.steps, arguments.updates, Path(folder)))


if __name__ == "__main__":
    main()
