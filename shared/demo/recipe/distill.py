"""Trains the draft to agree with the target.

First on corpus windows, then mostly on text that the target itself wrote for many prompts, greedily
and sampled. The loss is KL(target || draft) plus a small cross-entropy to the target's best token,
since greedy acceptance asks only whether the two agree on that one.

``python -m shared.demo.recipe.distill --tokens tokens.npz --tokenizer tokenizer.json
--target DIR --out DIR --log distill.jsonl``
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from shared.demo.recipe import checkpoint
from shared.demo.recipe.corpus import Packed, load
from shared.demo.recipe.generate import generate, trimmed
from shared.demo.recipe.model import DRAFT, Llama, parameter_count
from shared.demo.recipe.optimise import Clock, Log, Optimisers, autocast, schedule
from shared.demo.recipe.prompts import prompts
from shared.demo.recipe.train import batches

TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Of successive generation batches: half of the text is greedy, as in the measurement."""
OWN_FROM, OWN_SHARE = 0.25, 0.75
"""From this progress on, this share of the batches is the target's own text."""


def own_text(target: Llama, packed: Packed, args: argparse.Namespace) -> Packed:
    """Text written by the target for ``--prompts`` prompts."""
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    asked = prompts(packed, tokenizer, args.prompts, args.seed)
    asked.sort(key=len)  # little padding in a batch of prompts of about one length
    docs = []
    for i in range(0, len(asked), args.rows):
        part = asked[i : i + args.rows]
        temperature = TEMPERATURES[(i // args.rows) % len(TEMPERATURES)]
        answers = generate(target, part, args.new, temperature)
        docs += [trimmed(p, a) for p, a in zip(part, answers, strict=True)]
    starts = np.concatenate([[0], np.cumsum([len(d) for d in docs])]).astype(np.int64)
    return Packed(np.concatenate(docs), starts, args.seed)


def loss_of(target: Llama, draft: Llama, ids: Tensor, hard: float) -> tuple[Tensor, Tensor]:
    """The loss, and the share of positions where both models prefer the same token."""
    with torch.no_grad():
        aim = target(ids).float().flatten(0, 1)
        best = aim.argmax(-1)
        wanted = aim.softmax(-1)
        entropy = -(wanted * aim.log_softmax(-1)).sum(-1).mean()
    logits = draft(ids).float().flatten(0, 1)
    soft = F.cross_entropy(logits, wanted) - entropy
    agreement = (logits.argmax(-1) == best).float().mean()
    return soft + hard * F.cross_entropy(logits, best), agreement


def mixed(corpus: Iterator[Tensor], own: Iterator[Tensor], clock: Clock, seed: int) -> Iterator[
    tuple[int, Tensor]
]:  # fmt: skip
    """Batches of the corpus at first, later mostly of the target's own text."""
    rng = np.random.default_rng(seed)
    step = 0
    while (progress := clock.progress(step)) < 1.0:
        pick_own = progress > OWN_FROM and rng.random() < OWN_SHARE
        yield step, next(own if pick_own else corpus)
        step += 1


def distill(args: argparse.Namespace) -> Llama:
    """Runs until ``--seconds`` or ``--steps`` are over and returns the trained draft."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    target = checkpoint.load(args.target, args.device, dtype).requires_grad_(False)
    draft = Llama(DRAFT).to(args.device)
    packed = load(args.tokens, seed=args.seed)
    own = own_text(target, packed, args)
    print(f"{parameter_count(draft)} parameters, {len(own.tokens)} tokens of the target's own")
    step_loss = torch.compile(loss_of, dynamic=False) if args.device == "cuda" else loss_of
    optimisers = Optimisers(draft, args.rate, args.decay, fused=args.device == "cuda")
    clock, log = Clock(args.seconds, args.steps), Log(args.log)
    corpus = batches(packed, args.batch, args.device)
    for step, ids in mixed(corpus, batches(own, args.batch, args.device), clock, args.seed):
        with autocast(args.device):
            loss, agreement = step_loss(target, draft, ids[:, :-1], args.hard)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimisers.step(schedule(clock.progress(step)))
        if step == 6:
            clock.restart()  # both window lengths are compiled now
        if step % 20 == 0:
            log.write(
                model="draft",
                step=step,
                tokens=(step + 1) * args.batch,
                seconds=clock.elapsed,
                loss=loss.item(),
                agreement=agreement.item(),
            )
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description="Distill the demo draft model.")
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=240, help="without compilation")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=131072, help="tokens a step")
    parser.add_argument("--prompts", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=4096, help="prompts generated at once")
    parser.add_argument("--new", type=int, default=160, help="tokens generated for a prompt")
    parser.add_argument("--hard", type=float, default=0.2, help="weight of the best token's loss")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    checkpoint.save(distill(args), args.out)


if __name__ == "__main__":
    main()
