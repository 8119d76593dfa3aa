"""The command line of the trainer."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from services.draft.training.head_shape import Algorithm
from services.draft.training.optimisers import OptimiserKind


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands; the chosen one is `command`."""
    root = argparse.ArgumentParser(
        prog="python -m services.draft.training",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True)
    _tokenize(_command(commands, "tokenize", "encode texts and chats"))
    _generate(_command(commands, "generate", "let the target answer prompts"))
    _token_map(_command(commands, "token-map", "list the most frequent tokens"))
    _train(_command(commands, "train", "train a head"))
    _average(_command(commands, "average", "mix the weights of heads of one shape"))
    _evaluate(_command(commands, "evaluate", "measure the accepted length"))
    _curves(_command(commands, "curves", "draw a training log"))
    return root


def data_source(text: str) -> tuple[Path, float]:
    """Parses `PATH` or `PATH=SHARE`."""
    path, _, share = text.partition("=")
    return Path(path), positive(share) if share else 1.0


def count(text: str) -> int:
    """Parses a number of things, at least one."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; it must be at least 1")
    return value


def positive(text: str) -> float:
    """Parses a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; it must be positive and finite")
    return value


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    if name not in ("average", "curves"):
        command.add_argument("--target", type=Path, required=True, help="folder of the target")
    return command


def _device(command: argparse.ArgumentParser) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    command.add_argument("--device", type=torch.device, default=torch.device(default))
    command.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16" if default == "cuda" else "float32",
        help="of the target",
    )


def _tokenize(command: argparse.ArgumentParser) -> None:
    command.add_argument("--texts", type=Path, nargs="+", required=True, help=".txt or .jsonl")
    command.add_argument("--out", type=Path, required=True, help="archive, .npz")


def _generate(command: argparse.ArgumentParser) -> None:
    _device(command)
    command.add_argument("--prompts", type=Path, nargs="+", required=True, help=".jsonl or .npz")
    command.add_argument("--out", type=Path, required=True, help="archive, .npz")
    command.add_argument("--max-new-tokens", type=count, default=256)
    command.add_argument("--batch-size", type=count, default=128, help="prompts answered at once")
    command.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 1.0], help="of successive batches"
    )
    command.add_argument("--seed", type=int, default=0)


def _token_map(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data", type=data_source, action="append", required=True)
    command.add_argument("--size", type=count, required=True, help="tokens to keep")
    command.add_argument("--out", type=Path, required=True, help=".json")


def _train(command: argparse.ArgumentParser) -> None:
    _device(command)
    names = {"type": Algorithm, "metavar": "|".join(kind.value for kind in Algorithm)}
    command.add_argument("--algorithm", required=True, **names)  # type: ignore[arg-type]
    command.add_argument(
        "--data", type=data_source, action="append", required=True, help="archive, or archive=share"
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the head")
    command.add_argument("--init", type=Path, help="begin with a trained head, sizes included")
    command.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    _sizes(command.add_argument_group("the head; left out, the target's own sizes"))
    _loss(command.add_argument_group("the loss"))
    _run(command.add_argument_group("the run"))


def _sizes(group: argparse._ArgumentGroup) -> None:
    for flag in ("intermediate-size", "num-heads", "num-kv-heads", "head-dim", "num-layers"):
        group.add_argument(f"--{flag}", type=count)
    group.add_argument("--token-map", type=Path, help="EAGLE3: its own vocabulary")
    group.add_argument("--feature-layers", type=int, nargs="+", help="streams of the target")
    group.add_argument("--block-size", type=count, default=8, help="DFLASH")
    group.add_argument("--mask-token-id", type=int, default=0, help="DFLASH: a token never used")


def _loss(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--unroll", type=count, help="drafted tokens; EAGLE 1, EAGLE3 5, MTP 3")
    group.add_argument("--anchors", type=count, default=64, help="DFLASH: blocks a window")
    group.add_argument("--hard", type=float, default=0.1, help="weight of the best token's loss")
    group.add_argument("--regression", type=float, help="weight of smooth L1; EAGLE 1, others 0")
    group.add_argument("--noise", type=float, help="on features, relative; EAGLE 0.1, others 0")
    group.add_argument("--decay", type=positive, default=0.8, help="of each later token's weight")


def _run(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=count, default=20_000)
    group.add_argument("--seconds", type=positive, help="ends the run earlier")
    group.add_argument("--batch-size", type=count, default=8, help="windows a process")
    group.add_argument("--window", type=count, default=1024, help="tokens")
    group.add_argument("--rate", type=positive, default=1e-3, help="highest learning rate")
    group.add_argument("--weight-decay", type=float, default=0.05)
    group.add_argument("--optimiser", type=OptimiserKind, default=OptimiserKind.ADAMW)
    group.add_argument("--compile", action="store_true", help="fuse the passes over scores")
    group.add_argument("--log-every", type=count, default=20, help="steps")
    group.add_argument("--save-every", type=count, default=1000, help="steps")
    group.add_argument("--seed", type=int, default=0)


def _average(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--head", type=data_source, nargs="+", required=True, metavar="FOLDER[=SHARE]"
    )
    command.add_argument("--out", type=Path, required=True, help="folder of the mean")


def _evaluate(command: argparse.ArgumentParser) -> None:
    _device(command)
    command.add_argument("--head", type=Path, nargs="+", required=True)
    command.add_argument("--prompts", type=Path, required=True, help=".jsonl or .npz")
    command.add_argument("--limit", type=count, help="prompts; all when left out")
    command.add_argument("--max-new-tokens", type=count, default=128)
    command.add_argument("--steps", type=count, default=5, help="drafted tokens a round")
    command.add_argument("--batch-size", type=count, default=16)
    command.add_argument("--out", type=Path, help=".json")


def _curves(command: argparse.ArgumentParser) -> None:
    command.add_argument("--log", type=Path, required=True, help="train.jsonl")
    command.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    command.add_argument("--title", default="")
