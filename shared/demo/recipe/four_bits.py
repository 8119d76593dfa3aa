"""Brings a checkpoint's matrices to int4, in the layout of compressed-tensors (`pack-quantized`).

``python -m shared.demo.recipe.four_bits FOLDER --out FOLDER [--target FOLDER --prompts FILE]``

A matrix ``[N, K]`` becomes words of eight columns and a bfloat16 scale for every 32. With a target
and prompts, FOLDER holds a draft: it reads the target's answers, and GPTQ (Frantar et al., arXiv
2210.17323) rounds each column so that later ones make up for it. Without, each number goes to its
nearest.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from shared.demo.recipe import checkpoint
from shared.demo.recipe.eight_bits import convert, quantization
from shared.demo.recipe.evaluate import answer_ids, prompt_ids
from shared.demo.recipe.model import Llama

GROUP_SIZE = 32
LOWEST, HIGHEST = -8, 7
DAMPING = 0.01
_NEW_TOKENS = 128
_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def scales_of(group: Tensor, importance: Tensor) -> Tensor:
    """``[N, 1]``, of the tried scales of ``[N, G]`` the one with the least error, by column
    weighted with ``importance`` ``[G]``. A negative one has the wider half for positive numbers."""
    peak = group.abs().amax(1, keepdim=True).clamp(min=1e-8) / -(LOWEST + 0.5)
    tried = torch.stack([sign * peak * shrink for shrink in _SHRINKS for sign in (1, -1)])
    tried = tried.to(torch.bfloat16).float()
    errors = ((group / tried).round().clamp(LOWEST, HIGHEST) * tried - group) ** 2 * importance
    best = errors.sum(-1, keepdim=True).argmin(0, keepdim=True)
    return tried.gather(0, best)[0]


def to_four_bits(weight: Tensor, moments: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``[N, K]`` as int8 in [-8, 7], and bfloat16 scales ``[N, K / 32]``.

    ``moments`` ``[K, K]``: sum of the products of a row's inputs, by which errors count.
    """
    left, width = weight.double(), weight.shape[1]
    moments = torch.eye(width) if moments is None else moments
    damped = moments.double() + DAMPING * moments.diagonal().mean() * torch.eye(width)
    spread = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    numbers, scales = torch.empty_like(left), []
    for start in range(0, width, GROUP_SIZE):
        end = start + GROUP_SIZE
        own = scales_of(left[:, start:end].float(), damped.diagonal()[start:end].float())
        scales.append(own)
        for column in range(start, end):
            was = left[:, column : column + 1]
            number = (was / own).round().clamp(LOWEST, HIGHEST)
            numbers[:, column : column + 1] = number
            error = (was - number * own) / spread[column, column]
            left = left - error * spread[column]
    return numbers.to(torch.int8), torch.cat(scales, 1).to(torch.bfloat16)


def packed(numbers: Tensor) -> Tensor:
    """int8 ``[N, K]`` as int32 ``[N, K / 8]``, the first column in the lowest bits."""
    fields = (numbers.to(torch.int64) - LOWEST).view(len(numbers), -1, 8)
    words = (fields << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@torch.inference_mode()
def input_moments(model: Llama, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """``[K, K]`` of every linear layer of the model, by the key of its weight."""
    found: dict[str, Tensor] = {}

    def hook(key: str) -> object:
        def add(_: nn.Module, inputs: tuple[Tensor, ...], __: Tensor) -> None:
            rows = inputs[0].flatten(0, -2)
            found[key] = found.get(key, 0) + rows.T @ rows

        return add

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(hook(f"{name}.weight"))  # type: ignore[arg-type]
    for text in texts:
        model(torch.tensor([text]))
    return found


def answers(target: Path, prompts: Path) -> list[list[int]]:
    """The target's greedy answers to a file of questions, one a line, behind each."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    model = checkpoint.load(target, "cpu", torch.float32)
    lines = prompts.read_text(encoding="utf-8").splitlines()
    asked = [prompt_ids(tokenizer, line) for line in lines if line.strip()]
    return [[*ids, *answer_ids(model, [ids], _NEW_TOKENS)[0]] for ids in asked]


def to_words(folder: Path, out: Path, moments: Mapping[str, Tensor]) -> None:
    """Writes the folder's weights in 4 bits, those with moments by GPTQ."""

    def stored(key: str, weight: Tensor) -> dict[str, Tensor]:
        numbers, scales = to_four_bits(weight, moments.get(key))
        return {
            f"{key}_packed": packed(numbers),
            f"{key}_shape": torch.tensor(weight.shape),
            f"{key}_scale": scales,
        }

    weights = {"num_bits": 4, "strategy": "group", "group_size": GROUP_SIZE}
    convert(folder, out, stored, quantization("pack-quantized", weights))


def main() -> None:
    parser = argparse.ArgumentParser(description="Bring a checkpoint's matrices to 4 bits.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="may be the folder itself")
    parser.add_argument("--target", type=Path, help="whose answers the draft is rounded for")
    parser.add_argument("--prompts", type=Path, help="questions to the target, one a line")
    args = parser.parse_args()
    moments: dict[str, Tensor] = {}
    if args.target is not None and args.prompts is not None:
        model = checkpoint.load(args.folder, "cpu", torch.float32)
        moments = input_moments(model, answers(args.target, args.prompts))
    to_words(args.folder, args.out, moments)


if __name__ == "__main__":
    main()
