"""Trains the target on the packed corpus with next-token loss on all tokens.

``python -m shared.demo.recipe.train --tokens tokens.npz --out DIR --log train.jsonl``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from shared.demo.recipe import checkpoint
from shared.demo.recipe.corpus import Packed, load
from shared.demo.recipe.model import TARGET, Llama, parameter_count
from shared.demo.recipe.optimise import Clock, Log, Optimisers, autocast, schedule

WINDOW, LONG_WINDOW, LONG_EVERY = 1024, 2048, 6
"""Every sixth batch has windows of 2048, so that all positions are trained."""


def rows(packed: Packed, window: int, count: int, device: str) -> Iterator[Tensor]:
    """Endless batches [count, window + 1] of ids, a new epoch when one is used up."""
    while True:
        windows = torch.from_numpy(packed.epoch(window).astype("int32"))
        for i in range(0, len(windows) - count + 1, count):
            yield windows[i : i + count].to(device, non_blocking=True).long()


def batches(packed: Packed, tokens: int, device: str) -> Iterator[Tensor]:
    """Batches of about ``tokens`` ids, mostly short windows and now and then long ones."""
    short = rows(packed, WINDOW, tokens // WINDOW, device)
    long = rows(packed, LONG_WINDOW, tokens // LONG_WINDOW, device)
    step = 0
    while True:
        step += 1
        yield next(long if step % LONG_EVERY == 0 else short)


def loss_of(model: Llama, ids: Tensor) -> Tensor:
    """Mean next-token cross-entropy of ids [batch, n + 1]."""
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(args: argparse.Namespace) -> Llama:
    """Runs until ``--seconds`` or ``--steps`` are over and returns the trained model."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    shape = replace(TARGET, layers=args.layers)
    model = Llama(shape).to(args.device)
    step_loss = torch.compile(loss_of, dynamic=False) if args.device == "cuda" else loss_of
    optimisers = Optimisers(model, args.rate, args.decay, fused=args.device == "cuda")
    source = batches(load(args.tokens, seed=args.seed), args.batch, args.device)
    clock, log = Clock(args.seconds, args.steps), Log(args.log)
    print(f"{parameter_count(model)} parameters")
    step = seen = 0
    while (progress := clock.progress(step)) < 1.0:
        ids = next(source)
        with autocast(args.device):
            loss = step_loss(model, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(schedule(progress))
        step, seen = step + 1, seen + ids[:, 1:].numel()
        if step == LONG_EVERY:
            clock.restart()  # both window lengths are compiled now
        if step % 20 == 0:
            log.write(model="target", step=step, tokens=seen, seconds=clock.elapsed,
                      loss=loss.item())  # fmt: skip
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo target model.")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=300, help="without compilation")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=131072, help="tokens a step")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.1)
    parser.add_argument("--layers", type=int, default=TARGET.layers)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    checkpoint.save(train(args), args.out)


if __name__ == "__main__":
    main()
