"""Batched generation with a target model, to make text for distillation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.demo.recipe.checkpoint import END_OF_TEXT_ID, TURN_END_ID
from shared.demo.recipe.model import Llama


def pad_left(prompts: list[list[int]], device: str) -> tuple[Tensor, Tensor]:
    """Ids [batch, longest] padded on the left, and the number of pads of each row [batch]."""
    longest = max(map(len, prompts))
    rows = [[END_OF_TEXT_ID] * (longest - len(p)) + p for p in prompts]
    pads = [longest - len(p) for p in prompts]
    return torch.tensor(rows, device=device), torch.tensor(pads, device=device)


def choose(logits: Tensor, temperature: float) -> Tensor:
    """Next ids [batch] of logits [batch, vocabulary]: the best, or a sample (Gumbel trick)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    noise = -torch.log(-torch.log(torch.rand_like(logits, dtype=torch.float32) + 1e-10) + 1e-10)
    return (logits.float() / temperature + noise).argmax(-1)


@torch.inference_mode()
def generate(
    model: Llama, prompts: list[list[int]], new: int, temperature: float
) -> NDArray[np.uint16]:
    """[batch, new] ids after each prompt; after the end of a turn a row holds separators."""
    weight = model.model.embed_tokens.weight
    ids, pads = pad_left(prompts, str(weight.device))
    batch, n = ids.shape
    cache = model.cache(batch, n + new, weight)
    columns = torch.arange(n + new, device=ids.device)
    hidden = columns[None] < pads[:, None]
    far = torch.finfo(torch.float32).min
    mask = torch.where(columns[None, None, :n] > columns[None, :n, None], far, 0.0)
    mask = torch.where(hidden[:, None, :n], far, mask)[:, None]
    positions = (columns[None, :n] - pads[:, None]).clamp(min=0)
    logits = model.step(ids, positions, cache, 0, mask)
    row_mask = torch.where(hidden, far, 0.0)[:, None, None]
    done = torch.zeros(batch, dtype=torch.bool, device=ids.device)
    out = ids.new_full((batch, new), END_OF_TEXT_ID)
    for i in range(new):
        token = torch.where(done, END_OF_TEXT_ID, choose(logits, temperature))
        out[:, i] = token
        done |= (token == TURN_END_ID) | (token == END_OF_TEXT_ID)
        if i + 1 == new or (i % 32 == 31 and bool(done.all())):
            break
        at = n + i
        position = (at - pads)[:, None]
        logits = model.step(token[:, None], position, cache, at, row_mask[..., : at + 1])
    return out.cpu().numpy().astype(np.uint16)


def trimmed(prompt: list[int], answer: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Prompt and answer without the separators after the answer's end, one kept if it ended."""
    ends = np.flatnonzero((answer == TURN_END_ID) | (answer == END_OF_TEXT_ID))
    body = answer if len(ends) == 0 else answer[: ends[0] + 1]
    tail = [] if len(ends) == 0 else [END_OF_TEXT_ID]
    return np.concatenate([np.array(prompt, np.uint16), body, np.array(tail, np.uint16)])
