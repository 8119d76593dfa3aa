"""Trains the demo mixture of experts with its next-token layer, and writes it in 8 bits.

``python -m shared.demo.recipe.train_mixture --out shared/demo/demo-moe --seconds 240``

It needs no data: the text is conversations that ``facts`` makes, about what the demo target knows.
On a GPU it also learns the target's distribution. The next-token layer learns two steps: from the
model's states, and from its own.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from shared.demo.recipe import checkpoint, eight_bits, mixture
from shared.demo.recipe.corpus import Packed, chat_text, encode
from shared.demo.recipe.facts import conversations
from shared.demo.recipe.mixture import Mixture, MixtureShape
from shared.demo.recipe.model import Llama, parameter_count
from shared.demo.recipe.optimise import Clock, Log, Optimisers, autocast, schedule

TARGET = Path(__file__).parents[1] / "target"
_BALANCE_RATE = 4e-3
_NEXT_WEIGHT, _LATER_WEIGHT = 0.5, 0.25
_TARGET_WEIGHT = 0.5


def made_text(count: int, seed: int) -> Packed:
    """Conversations of ``facts``, tokenized."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [chat_text(messages) for messages in conversations(count, seed)]
    return Packed(*encode(tokenizer, texts), seed)


def batches(packed: Packed, window: int, tokens: int, device: str) -> Iterator[Tensor]:
    """Endless batches [count, window + 1] of ids."""
    count = max(1, tokens // window)
    while True:
        windows = torch.from_numpy(packed.epoch(window).astype("int32"))
        if len(windows) < count:
            raise ValueError(f"{len(windows)} windows of text; a batch needs {count}")
        for start in range(0, len(windows) - count + 1, count):
            yield windows[start : start + count].to(device, non_blocking=True).long()


def losses(model: Mixture, ids: Tensor, wanted: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Losses of the model, of the next-token layer, and of the whole.

    Args:
        ids: [batch, n + 1].
        wanted: the target's logits of the first n, if it teaches.
    """
    states = model.states(ids[:, :-1])
    logits = model.logits(states)
    own = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    whole = own
    if wanted is not None:
        taught = F.kl_div(
            logits.flatten(0, 1).float().log_softmax(-1),
            wanted.flatten(0, 1).float().log_softmax(-1),
            log_target=True, reduction="batchmean",
        )  # fmt: skip
        whole = (1.0 - _TARGET_WEIGHT) * own + _TARGET_WEIGHT * taught
    # What was said is what the layer is held to: the model it drafts for changes all the time.
    states = model.next_states(ids[:, 1:-1], states[:, :-1])
    first = _loss(model, states, ids[:, 2:])
    later = _loss(model, model.next_states(ids[:, 2:-1], states[:, :-1]), ids[:, 3:])
    return own, first, whole + _NEXT_WEIGHT * first + _LATER_WEIGHT * later


def _loss(model: Mixture, states: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(states).flatten(0, 1).float(), ids.flatten())


def train(args: argparse.Namespace) -> Mixture:
    """Runs until ``--seconds`` or ``--steps`` are over and returns the trained model."""
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    is_fast = args.device == "cuda"
    shape = replace(MixtureShape(), hidden=args.hidden, layers=args.layers)
    model = Mixture(shape).to(args.device)
    print(f"{parameter_count(model):,} parameters", flush=True)
    step_losses = torch.compile(losses, dynamic=False) if is_fast else losses
    teacher: Llama | None = None
    if args.taught:
        teacher = checkpoint.load(TARGET, args.device, torch.bfloat16 if is_fast else torch.float32)
    source = batches(made_text(args.conversations, args.seed), args.window, args.batch, args.device)
    optimisers = Optimisers(model, args.rate, args.decay, fused=is_fast)
    clock, log, step = Clock(args.seconds, args.steps), Log(args.log), 0
    while (progress := clock.progress(step)) < 1.0:
        ids, wanted = next(source), None
        with autocast(args.device):
            if teacher is not None:
                with torch.no_grad():
                    wanted = teacher(ids[:, :-1])
            own, following, loss = step_losses(model, ids, wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimisers.step(schedule(progress))
        rate = _BALANCE_RATE * schedule(progress)
        busiest = max(each.balance(rate) for each in model.mixtures())
        step += 1
        if step == 1:
            clock.restart()  # the forward is compiled now
        if step % 20 == 0:
            log.write(model="mixture", step=step, seconds=clock.elapsed, loss=own.item(),
                      next_token_loss=following.item(), busiest_expert=busiest)  # fmt: skip
    log.file.close()
    return model


def save(model: Mixture, folder: Path) -> None:
    """Writes the model in 8 bits, with the target's tokenizer as a link."""
    with tempfile.TemporaryDirectory() as scratch:
        mixture.save(model, Path(scratch))
        eight_bits.convert(Path(scratch), folder)
    shutil.copy(TARGET / "tokenizer_config.json", folder)
    link = folder / "tokenizer.json"
    link.unlink(missing_ok=True)
    if folder.resolve().parent == TARGET.parent:
        link.symlink_to("../target/tokenizer.json")
    else:
        shutil.copy(TARGET / "tokenizer.json", link)
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {size:,} bytes", flush=True)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the flags."""
    is_fast = torch.cuda.is_available()
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--out", type=Path, required=True)
    flags.add_argument("--log", type=Path, default=Path(".run/mixture.jsonl"))
    flags.add_argument("--seconds", type=float, default=240 if is_fast else 1800)
    flags.add_argument("--steps", type=int, default=1_000_000)
    flags.add_argument("--conversations", type=int, default=160_000 if is_fast else 40_000)
    flags.add_argument("--batch", type=int, default=32_768 if is_fast else 4096, help="tokens")
    flags.add_argument("--window", type=int, default=512 if is_fast else 256)
    flags.add_argument("--rate", type=float, default=3e-3)
    flags.add_argument("--decay", type=float, default=0.1)
    flags.add_argument("--hidden", type=int, default=MixtureShape.hidden)
    flags.add_argument("--layers", type=int, default=MixtureShape.layers)
    flags.add_argument("--seed", type=int, default=1)
    flags.add_argument("--device", default="cuda" if is_fast else "cpu")
    flags.add_argument(
        "--taught", action=argparse.BooleanOptionalAction, default=is_fast,
        help="learn the demo target's distribution as well",
    )  # fmt: skip
    return flags


def main() -> None:
    args = parser().parse_args()
    save(train(args), args.out)


if __name__ == "__main__":
    main()
