"""Prompts of a pair of processes: questions through the model's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gateway.model_text import ModelText
from tests.load.prompts import PROMPTS


def questions(count: int) -> list[str]:
    """Returns that many different questions; beyond the twenty there are, two at a time."""
    found = list(PROMPTS[:count])
    for distance in range(1, len(PROMPTS)):
        if len(found) >= count:
            break
        others = (*PROMPTS[distance:], *PROMPTS[:distance])
        found += [f"{first} {second}" for first, second in zip(PROMPTS, others, strict=True)]
    assert count <= len(found), f"{count} questions are asked for; there are {len(found)}"
    return found[:count]


async def chat_prompts(folder: Path, texts: Sequence[str]) -> list[list[int]]:
    """Returns each text as a user's message, through the model's own chat template.

    Raises:
        CheckpointError: the folder has no tokenizer.
    """
    text = ModelText.read(folder)
    rendered = list(texts)
    if text.template is not None:
        rendered = [text.template.render([{"role": "user", "content": each}]) for each in texts]
    is_bare = text.template is None
    return [await text.tokenizer.encode(each, add_special_tokens=is_bare) for each in rendered]
