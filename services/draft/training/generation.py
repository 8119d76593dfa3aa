"""Generates training text with the target, which is what a head sees in service."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.draft.training.documents import Documents
from services.draft.training.frozen_target import FrozenTarget


@torch.inference_mode()
def write_answers(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
) -> list[list[int]]:
    """Returns the ids behind each prompt, up to and with the end token.

    Args:
        temperature: 0 for the best token each time; nothing is truncated above 0.
    """
    device, longest = target.device, max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: answers begin in one column
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    output = target.model.generate(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        **sampling,
    )
    ends = end_token_ids(target)
    return [_through_end(row, ends) for row in output[:, longest:].tolist()]


def own_documents(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float],
    batch_size: int,
    seed: int,
    progress: Callable[[int], object],
) -> Documents:
    """Returns prompts with their answers, in random order.

    Args:
        temperatures: of successive batches, over and over.
        progress: told the number of prompts that are done.
    """
    torch.manual_seed(seed)
    by_length = sorted(prompts, key=len)  # little padding within a batch
    rows: list[list[int]] = []
    for number, begin in enumerate(range(0, len(by_length), batch_size)):
        part = by_length[begin : begin + batch_size]
        temperature = temperatures[number % len(temperatures)]
        answers = write_answers(
            target, part, max_new_tokens=max_new_tokens, temperature=temperature
        )
        rows += [[*prompt, *answer] for prompt, answer in zip(part, answers, strict=True)]
        progress(len(part))
    order = np.random.default_rng(seed).permutation(len(rows))
    return Documents.of([rows[index] for index in order])


def end_token_ids(target: FrozenTarget) -> frozenset[int]:
    """Returns the tokens that end an answer; none if the target does not say."""
    ends = target.model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset([ends] if isinstance(ends, int) else ends)


def _through_end(row: list[int], ends: frozenset[int]) -> list[int]:
    for index, token in enumerate(row):
        if token in ends:
            return row[: index + 1]
    return row
