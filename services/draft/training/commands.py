"""The command line of the trainer, and its commands."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]

from services.draft.training.acceptance import measure_acceptance
from services.draft.training.documents import (
    Documents,
    Source,
    TextReader,
    Windows,
    frequent_tokens,
    write_token_map,
)
from services.draft.training.frozen_target import (
    FrozenTarget,
    answered_documents,
    end_token_ids,
    write_answers,
)
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import (
    BlockHead,
    Head,
    build_head,
    init_from_target,
    load_head,
    save_head,
)
from services.draft.training.objectives import (
    BlockObjective,
    LossTerms,
    Objective,
    RecurrentObjective,
)
from services.draft.training.trainer import (
    LOG_FILE,
    OptimiserKind,
    Optimisers,
    Ranks,
    Trainer,
    TrainingPlan,
    draw_curves,
    join_ranks,
    read_log,
)
from shared.errors import CheckpointError
from shared.models.heads.loader import read_token_map


def parser(description: str) -> argparse.ArgumentParser:
    """Returns the parser of all commands; `run` is the function of the chosen one."""
    root = argparse.ArgumentParser(
        prog="python -m services.draft.training",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True)
    for name, (summary, add_flags, run) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        if name not in ("average", "curves"):
            command.add_argument("--target", type=Path, required=True, help="folder of the target")
        add_flags(command)
        command.set_defaults(run=run)
    return root


def data_source(text: str) -> tuple[Path, float]:
    """Parses `PATH` or `PATH=SHARE`."""
    path, _, share = text.partition("=")
    return Path(path), positive(share) if share else 1.0


def count(text: str) -> int:
    """Parses an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; it must be at least 1")
    return value


def positive(text: str) -> float:
    """Parses a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}; it must be positive and finite")
    return value


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
    for name in ("intermediate-size", "num-heads", "num-kv-heads", "head-dim", "num-layers"):
        group.add_argument(f"--{name}", type=count)
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


_SIZES = (
    *("intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers"),
    *("block_size", "mask_token_id"),
)
UNROLL = {Algorithm.EAGLE: 1, Algorithm.EAGLE3: 5, Algorithm.MTP: 3}


def tokenize(arguments: argparse.Namespace) -> None:
    """Writes an archive of the texts."""
    reader = TextReader(arguments.target)
    rows = [row for path in arguments.texts for row in reader.documents(path)]
    _save(Documents.of(rows), arguments.out)


def generate(arguments: argparse.Namespace) -> None:
    """Writes an archive of prompts with the target's answers."""
    reader = TextReader(arguments.target)
    prompts = [row for path in arguments.prompts for row in reader.prompts(path)]
    with tqdm(total=len(prompts), disable=None, unit="prompt") as bar:
        documents = answered_documents(
            _target(arguments, arguments.device),
            prompts,
            max_new_tokens=arguments.max_new_tokens,
            temperatures=arguments.temperatures,
            batch_size=arguments.batch_size,
            seed=arguments.seed,
            progress=bar.update,
        )
    _save(documents, arguments.out)


def make_token_map(arguments: argparse.Namespace) -> None:
    """Writes the most frequent tokens of the data, and those that end an answer."""
    target = FrozenTarget.load(arguments.target, device=torch.device("cpu"), dtype=torch.bfloat16)
    sources = [Documents.load(path) for path, _ in arguments.data]
    token_ids, covered = frequent_tokens(
        sources,
        size=arguments.size,
        vocab_size=len(target.embedding),
        always=end_token_ids(target),
    )
    write_token_map(token_ids, arguments.out)
    print(f"{len(token_ids)} tokens cover {covered:.2%} of the text")


def train(arguments: argparse.Namespace) -> None:
    """Trains a head and draws its curves."""
    with join_ranks(arguments.device) as ranks:
        target = _target(arguments, ranks.device)
        objective = _objective(arguments, target, _head(arguments, target))
        plan = TrainingPlan(
            out=arguments.out,
            num_steps=arguments.steps,
            seconds=arguments.seconds,
            batch_size=arguments.batch_size,
            log_every=arguments.log_every,
            save_every=arguments.save_every,
            seed=arguments.seed,
        )
        sources = [Source(Documents.load(path), share) for path, share in arguments.data]
        trainer = Trainer(
            plan,
            objective,
            target,
            Windows(sources, window=arguments.window, seed=arguments.seed),
            Optimisers(
                objective.head,
                arguments.optimiser,
                rate=arguments.rate,
                decay=arguments.weight_decay,
            ),
            ranks,
        )
        if arguments.resume:
            trainer.resume()
        trainer.run()
        if ranks.is_first:
            _report(arguments.algorithm, plan, ranks)


def average(arguments: argparse.Namespace) -> None:
    folders, shares = zip(*arguments.head, strict=True)
    save_head(averaged([load_head(folder) for folder in folders], shares), arguments.out)


def averaged(heads: Sequence[Head], shares: Sequence[float]) -> Head:
    """Returns the first of `heads`, with the weighted mean of all their weights.

    A head that was trained further, on other data or for more steps of its own drafts, is better
    there and a little worse elsewhere. A mean of it and its initial head often keeps both gains.

    Source: Wortsman et al., Robust fine-tuning of zero-shot models, arXiv 2109.01903, section 3.

    Args:
        shares: weight of each head in the mean, positive; they need not add up to 1.

    Raises:
        CheckpointError: heads differ in shape or in the tokens that they can draft.
    """
    first = heads[0]
    for number, head in enumerate(heads, 1):
        if head.shape != first.shape:
            raise CheckpointError(f"head {number} has another shape than the first")
    states = [head.state_dict() for head in heads]
    for name, tensor in states[0].items():
        tensors = [state[name] for state in states]
        if tensor.is_floating_point():
            pairs = zip(tensors, shares, strict=True)
            total = sum((share * part.double() for part, share in pairs), torch.zeros(()))
            tensor.copy_(total / sum(shares))
        elif not all(torch.equal(other, tensor) for other in tensors):
            raise CheckpointError(f"heads differ in {name}: they can draft other tokens")
    return first


def evaluate(arguments: argparse.Namespace) -> None:
    """Prints the accepted length of every head on the same answers, and writes it to `--out`."""
    target = _target(arguments, arguments.device)
    prompts = TextReader(arguments.target).prompts(arguments.prompts)[: arguments.limit]
    answers: list[list[int]] = []
    for begin in range(0, len(prompts), arguments.batch_size):
        answers += write_answers(
            target,
            prompts[begin : begin + arguments.batch_size],
            max_new_tokens=arguments.max_new_tokens,
            temperature=0.0,
        )
    report = {}
    for folder in arguments.head:
        head = load_head(folder).to(target.device)
        acceptance = measure_acceptance(head, target, prompts, answers, num_steps=arguments.steps)
        report[str(folder)] = {
            "algorithm": head.shape.algorithm.value,
            "accepted_length_with_bonus": round(acceptance.mean_length, 4),
            **dataclasses.asdict(acceptance),
        }
        print(json.dumps({str(folder): report[str(folder)]}))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def draw(arguments: argparse.Namespace) -> None:
    for path in draw_curves(read_log(arguments.log), arguments.out, arguments.title):
        print(path)


def _target(arguments: argparse.Namespace, device: torch.device) -> FrozenTarget:
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    return FrozenTarget.load(arguments.target, device=device, dtype=dtype)


def _head(arguments: argparse.Namespace, target: FrozenTarget) -> Head:
    algorithm: Algorithm = arguments.algorithm
    if arguments.init:
        head = load_head(arguments.init).train()
        if head.shape.algorithm is not algorithm:
            raise CheckpointError(
                f"{arguments.init} holds a head of {head.shape.algorithm.value}; "
                f"--algorithm is {algorithm.value}"
            )
        return head.to(target.device)
    token_ids = None
    if algorithm is Algorithm.EAGLE3 and arguments.token_map:
        vocab_size = target.model.config.vocab_size
        token_ids = read_token_map(arguments.token_map, vocab_size).tolist()
    sizes = {name: getattr(arguments, name) for name in _SIZES}
    sizes["feature_layers"] = arguments.feature_layers and tuple(arguments.feature_layers)
    sizes["draft_vocab_size"] = None if token_ids is None else len(token_ids)
    torch.manual_seed(arguments.seed)
    head = build_head(target.head_shape(algorithm, **sizes), token_ids)
    init_from_target(head, target)
    return head.to(target.device)


def _objective(arguments: argparse.Namespace, target: FrozenTarget, head: Head) -> Objective[Any]:
    is_eagle = arguments.algorithm is Algorithm.EAGLE
    terms = LossTerms(
        hard=arguments.hard,
        regression=_or_default(arguments.regression, 1.0 if is_eagle else 0.0),
        noise=_or_default(arguments.noise, 0.1 if is_eagle else 0.0),
        decay=arguments.decay,
    )
    if isinstance(head, BlockHead):
        if arguments.window < head.shape.block_size:
            raise CheckpointError(
                f"a window of {arguments.window} tokens is shorter than a block of "
                f"{head.shape.block_size}"
            )
        return BlockObjective(
            head, target, terms, num_anchors=arguments.anchors, is_compiled=arguments.compile
        )
    num_steps = _or_default(arguments.unroll, UNROLL[arguments.algorithm])
    return RecurrentObjective(
        head, target, terms, num_steps=num_steps, is_compiled=arguments.compile
    )


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value


def _report(algorithm: Algorithm, plan: TrainingPlan, ranks: Ranks) -> None:
    rows = read_log(plan.folder / LOG_FILE)
    if not rows:
        return
    last = rows[-1]
    print(
        f"{algorithm.value}: {last.step} steps on {ranks.size} processes, {last.tokens:,} tokens "
        f"in {last.seconds:.0f} s; loss {last.loss:.3f}, accepted {last.accepted_length:.2f}"
    )
    try:
        draw_curves(rows, plan.folder, algorithm.value)
    except ImportError:
        print("no pictures: matplotlib is not installed")


def _save(documents: Documents, path: Path) -> None:
    documents.save(path)
    print(f"{path}: {len(documents)} documents, {len(documents.tokens):,} tokens")


_COMMANDS: dict[str, tuple[str, Callable[[Any], None], Callable[[argparse.Namespace], None]]] = {
    "tokenize": ("encode texts and chats", _tokenize, tokenize),
    "generate": ("let the target answer prompts", _generate, generate),
    "token-map": ("list the most frequent tokens", _token_map, make_token_map),
    "train": ("train a head", _train, train),
    "average": ("mix the weights of heads of one shape", _average, average),
    "evaluate": ("measure the accepted length", _evaluate, evaluate),
    "curves": ("draw a training log", _curves, draw),
}
"""What each command does, its flags and its function."""
