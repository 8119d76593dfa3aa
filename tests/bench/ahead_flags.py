"""Flags of `make bench-async`, and what they start."""

from __future__ import annotations

import argparse
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.draft.settings_problems import default_model_folder
from services.target.settings import DEMO_MODEL
from shared.errors import OutriderError
from shared.tokens import TreeShape
from tests.bench.pair import PairSettings
from tests.bench.passes import CHOSEN, PLAIN, Case, Mode
from tests.bench.wide_sizes import SIZES, wide_models

SHAPES = (TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(4, 4, 12))
BUDGETS = (4, 8)


def parse(arguments: list[str], description: str | None) -> argparse.Namespace:
    """Reads the flags; a bad one ends the program."""
    parser = argparse.ArgumentParser(
        prog="bench-async",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_models(parser)
    _add_load(parser)
    _add_sections(parser)
    flags = parser.parse_args(arguments)
    if flags.widen and flags.model != DEMO_MODEL:
        parser.error("--widen makes the demo's models wide; leave --model out")
    for name in ("concurrency", "num_prompts", "num_tokens", "repeats"):
        values = getattr(flags, name)
        lowest = min(values) if isinstance(values, list) else values
        if lowest < 1:
            parser.error(f"--{name.replace('_', '-')} is {lowest}; it must be at least 1")
    for each in flags.delay_ms:
        if not 0.0 < each <= 1000.0:
            parser.error(f"--delay-ms is {each:g}; it must be in (0, 1000]")
    if flags.adaptive and (flags.turnaround or flags.check_simulator):
        parser.error(
            "--turnaround and --check-simulator are about fixed modes, --adaptive has none"
        )
    if flags.scenario is not None and not flags.check_simulator:
        parser.error("--scenario keeps what --check-simulator takes: give both")
    return flags


def _add_models(parser: argparse.ArgumentParser) -> None:
    models = parser.add_argument_group("models")
    models.add_argument("--model", type=Path, default=DEMO_MODEL)
    models.add_argument("--draft-model", type=Path, help="default: the demo's, of the algorithm")
    models.add_argument(
        "--algorithm",
        default=Algorithm.STANDALONE.value,
        choices=[each.value for each in Algorithm if each is not Algorithm.NEXTN],
    )
    models.add_argument("--widen", choices=SIZES, help="size of the target; `trial` fits a CPU")
    models.add_argument("--target-device", help="default: cuda:0, else cpu")
    models.add_argument("--draft-device", help="default: the last GPU, else cpu")
    models.add_argument("--target-flags", default="", help="further flags of the target")
    models.add_argument("--draft-flags", default="", help="further flags of the draft")


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("what is compared")
    load.add_argument("--shapes", type=_shape, nargs="+", default=list(SHAPES))
    load.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    load.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    load.add_argument("--concurrency", type=int, nargs="+", default=[1], help="requests at a time")
    load.add_argument("--num-prompts", type=int, default=6, help="more where more are at a time")
    load.add_argument("--num-tokens", type=int, default=128, help="of an answer")
    load.add_argument("--repeats", type=int, default=3)
    load.add_argument(
        "--adaptive",
        action="store_true",
        help="plain decoding and what the target chooses by itself, in place of fixed modes",
    )


def _add_sections(parser: argparse.ArgumentParser) -> None:
    sections = parser.add_argument_group("further sections")
    sections.add_argument(
        "--delay-ms",
        type=float,
        nargs="+",
        default=[],
        help="a draft as on another host, over a wire so long, each way",
    )
    sections.add_argument(
        "--hurt",
        action="store_true",
        help="a draft that is killed or frozen; slow, in disorder or at half the bandwidth",
    )
    sections.add_argument(
        "--timeline", type=Path, metavar="SVG", help="pictures of some rounds, one a case"
    )
    sections.add_argument(
        "--turnaround",
        action="store_true",
        help="what lies between a verdict and its tree in the best synchronous mode, part by part",
    )
    sections.add_argument(
        "--check-simulator",
        action="store_true",
        help="what `tests.bench.simulate` makes of the times of this run",
    )
    sections.add_argument(
        "--scenario",
        type=Path,
        metavar="JSON",
        help="file for these times, as `python -m tests.bench.simulate --check JSON` reads them",
    )


def _shape(text: str) -> TreeShape:
    try:
        return TreeShape(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError, OutriderError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not STEPS,TOPK,TOKENS: {error}") from None


def modes_of(flags: argparse.Namespace) -> list[Mode]:
    """Returns plain decoding, every shape synchronously, and ahead with every budget; or plain
    decoding and what the target chooses."""
    if flags.adaptive:
        return [PLAIN, CHOSEN]
    return [
        PLAIN,
        *(Mode(shape) for shape in flags.shapes),
        *(Mode(shape, budget) for shape in flags.shapes for budget in flags.budgets),
    ]


def cases_of(flags: argparse.Namespace) -> list[Case]:
    """Returns every temperature at every concurrency."""
    return [
        Case(temperature, concurrency)
        for temperature in flags.temperatures
        for concurrency in flags.concurrency
    ]


def settings_of(flags: argparse.Namespace, folder: Path) -> PairSettings:
    """Returns the two processes; folders of wide models go to `folder`.

    Raises:
        CannotWiden: the models do not fit into the sizes.
        CheckpointError: a model's folder cannot be read.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    on_target = flags.target_device or ("cuda:0" if num_gpus else "cpu")
    on_draft = flags.draft_device or (f"cuda:{num_gpus - 1}" if num_gpus else "cpu")
    algorithm = Algorithm(flags.algorithm)
    model, draft = _folders(flags, folder)
    folders: list[str] = []
    if algorithm.has_model:
        folders += ["--speculative-draft-model-path", str(draft)]
    if algorithm.reads_features:
        folders += ["--target-model-path", str(model)]
    budget = ("--speculative-outcome-budget", str(max(flags.budgets)))
    choice: tuple[str, ...] = ("--speculative-adaptive=true",)
    if not flags.adaptive:  # no plain steps in place of trees
        choice = ("--candidate-wait-sequences", str(max(flags.concurrency)))
    return PairSettings(
        model=model,
        target_flags=(
            *("--device", on_target, *choice),
            *flags.target_flags.split(),
        ),
        draft_flags=(
            *("--speculative-algorithm", flags.algorithm, "--device", on_draft),
            *folders,
            *(() if flags.adaptive else budget),
            *flags.draft_flags.split(),
        ),
        folder=folder,
        distant_flags=("--distant", *budget),
        logs_rounds=flags.timeline is not None or flags.turnaround,
    )


def _folders(flags: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    algorithm = Algorithm(flags.algorithm)
    draft = flags.draft_model or default_model_folder(algorithm, DEMO_MODEL)
    if flags.widen is None:
        return flags.model, draft
    return wide_models(folder, SIZES[flags.widen], algorithm, DEMO_MODEL, draft)
