"""`make bench-async`: plain decoding, the best synchronous split and drafting ahead, in one run.

Target and draft are processes of their own, each on its own GPU where there are two; without CUDA
both run on the CPU, which shows that it works, not what it gains. Every repeat measures every mode
in turn, so that a slow minute hits all of them.

With `--widen DIR` the demo's models are first written there with the matrices of an 8B target and
a 1B draft, or of the head that `--algorithm` names; what they say stays the same (see
`tests.bench.widening`).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.draft.algorithm import Algorithm
from services.draft.model_folders import default_model_folder
from services.target.settings import DEMO_MODEL
from shared.errors import OutriderError
from shared.tokens import TreeShape
from tests.bench.pair import Answer, Pair, PairFailed, PairSettings, chat_prompts, running_pair
from tests.bench.wide_folders import widened, widened_with_head
from tests.load.figures import table
from tests.load.prompts import PROMPTS

SHAPES = (TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(4, 4, 12))
BUDGETS = (4, 8)


@dataclass(frozen=True, slots=True)
class Mode:
    """How tokens are made; no shape is plain decoding, budget 0 drafts after each verdict."""

    shape: TreeShape | None = None
    budget: int = 0

    @property
    def name(self) -> str:
        if self.shape is None:
            return "plain"
        shape = self.shape
        tree = f"{shape.num_steps} steps, top {shape.topk}, {shape.num_draft_tokens} tokens"
        return f"{tree}, {self.budget} ahead" if self.budget else f"{tree}, synchronous"


@dataclass(frozen=True, slots=True)
class Pass:
    """All prompts answered once in one mode."""

    answers: tuple[Answer, ...]
    duration_s: float
    counters: Mapping[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.duration_s

    @property
    def num_rounds(self) -> int:
        return sum(answer.num_rounds for answer in self.answers)

    def per_round(self, counter: str) -> float:
        return self.counters.get(f"outrider_target_{counter}_total", 0.0) / max(self.num_rounds, 1)


async def measure(
    pair: Pair, modes: Sequence[Mode], prompts: Sequence[Sequence[int]], flags: argparse.Namespace
) -> list[list[Pass]]:
    """Returns the passes of each repeat, in the order of the modes."""
    await _answer_all(pair, modes[-1], prompts, flags)  # warms kernels and clocks
    return [
        [await _answer_all(pair, mode, prompts, flags) for mode in modes]
        for _ in range(flags.repeats)
    ]


async def _answer_all(
    pair: Pair, mode: Mode, prompts: Sequence[Sequence[int]], flags: argparse.Namespace
) -> Pass:
    if mode.shape is not None:
        await pair.set_mode(mode.shape, mode.budget)
    places = asyncio.Semaphore(flags.concurrency)

    async def answer(seed: int, prompt: Sequence[int]) -> Answer:
        async with places:
            return await pair.answer(
                prompt,
                num_tokens=flags.num_tokens,
                temperature=flags.temperature,
                seed=seed,
                is_plain=mode.shape is None,
            )

    before, start_s = await pair.counters(), time.perf_counter()
    answers = await asyncio.gather(*(answer(*each) for each in enumerate(prompts)))
    duration_s, after = time.perf_counter() - start_s, await pair.counters()
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return Pass(tuple(answers), duration_s, gained)


def report(modes: Sequence[Mode], repeats: Sequence[Sequence[Pass]]) -> str:
    """Returns the table and the two ratios that matter."""
    speeds = [
        statistics.median(repeat[place].tokens_per_s for repeat in repeats)
        for place in range(len(modes))
    ]
    plain = [answer.token_ids for answer in repeats[0][0].answers]
    rows = [
        _row(mode, [repeat[place] for repeat in repeats], speed / speeds[0], plain)
        for place, (mode, speed) in enumerate(zip(modes, speeds, strict=True))
    ]
    header = (
        *("mode", "tok/s", "vs plain", "tokens a round", "in time", "late", "missed"),
        *("bytes down", "bytes up", "same answers"),
    )
    synchronous = max(
        speed for mode, speed in zip(modes, speeds, strict=True) if mode.shape and not mode.budget
    )
    ahead = max(speed for mode, speed in zip(modes, speeds, strict=True) if mode.budget)
    notes = (
        "in time, late, missed: share of a round's verdicts whose next tree was there, on its way, "
        "or not prepared for; bytes a round, from the target and to it",
        f"best synchronous split: {synchronous / speeds[0]:.2f} times plain; best ahead: "
        f"{ahead / speeds[0]:.2f} times plain, {ahead / synchronous:.2f} times that split",
    )
    return "\n".join([table(header, rows), *notes])


def _row(
    mode: Mode, passes: Sequence[Pass], ratio: float, plain: Sequence[tuple[int, ...]]
) -> tuple[str, ...]:
    first = passes[0]
    same = sum(a.token_ids == b for a, b in zip(first.answers, plain, strict=True))
    late = first.per_round("late_foreseen_verdicts")
    missed = first.per_round("unforeseen_verdicts") + first.per_round("unprepared_verdicts") - late
    shares = (first.per_round("foreseen_verdicts"), late, missed)
    return (
        mode.name,
        f"{statistics.median(each.tokens_per_s for each in passes):.1f}",
        f"{ratio:.2f}",
        f"{first.num_tokens / first.num_rounds:.2f}",
        *(f"{share:.0%}" if mode.budget else "-" for share in shares),
        f"{_bytes(first, 'sent'):.0f}" if mode.shape else "-",
        f"{_bytes(first, 'received'):.0f}" if mode.shape else "-",
        f"{same}/{len(plain)}",
    )


def _bytes(one: Pass, direction: str) -> float:
    name = f'outrider_target_wire_bytes_total{{direction="{direction}"}}'
    return one.counters.get(name, 0.0) / max(one.num_rounds, 1)


def _models(flags: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the folders of target and draft; wide copies are written unless they are there."""
    algorithm, model, folder = Algorithm(flags.algorithm), flags.model, flags.widen
    draft = flags.draft_model or default_model_folder(algorithm, DEMO_MODEL)
    if folder is None:
        return model, draft
    if algorithm.reads_features:
        return widened_with_head(folder / "target-8b", model, algorithm.value, draft)
    return widened(folder / "target-8b", model, "8b"), widened(folder / "draft-1b", draft, "1b")


def _shape(text: str) -> TreeShape:
    try:
        return TreeShape(*(int(part) for part in text.split(",")))
    except (ValueError, TypeError, OutriderError) as error:
        raise argparse.ArgumentTypeError(f"{text} is not STEPS,TOPK,TOKENS: {error}") from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-async", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--draft-model", type=Path, help="default: the demo's, of the algorithm")
    parser.add_argument(
        "--algorithm",
        default=Algorithm.STANDALONE.value,
        choices=[each.value for each in Algorithm if each is not Algorithm.NEXTN],
    )
    parser.add_argument("--widen", type=Path, metavar="DIR", help="folder for wide copies")
    parser.add_argument("--target-device", help="default: cuda:0, else cpu")
    parser.add_argument("--draft-device", help="default: the last GPU, else cpu")
    parser.add_argument("--shapes", type=_shape, nargs="+", default=list(SHAPES))
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--target-flags", default="", help="further flags of the target")
    parser.add_argument("--draft-flags", default="", help="further flags of the draft")
    return parser.parse_args(arguments)


def _settings(flags: argparse.Namespace, folder: Path) -> PairSettings:
    import torch

    num_gpus = torch.cuda.device_count()
    on_target = flags.target_device or ("cuda:0" if num_gpus else "cpu")
    on_draft = flags.draft_device or (f"cuda:{num_gpus - 1}" if num_gpus else "cpu")
    algorithm = Algorithm(flags.algorithm)
    model, draft = _models(flags)
    folders: list[str] = []
    if algorithm.has_model:
        folders += ["--speculative-draft-model-path", str(draft)]
    if algorithm.reads_features:
        folders += ["--target-model-path", str(model)]
    return PairSettings(
        model=model,
        # A target that chooses shapes itself would measure its choice in every mode.
        target_flags=(
            *("--device", on_target, "--speculative-adaptive=false"),
            *flags.target_flags.split(),
        ),
        draft_flags=(
            *("--speculative-algorithm", flags.algorithm, "--device", on_draft),
            *folders,
            *flags.draft_flags.split(),
        ),
        folder=folder,
    )


async def _run(flags: argparse.Namespace, settings: PairSettings) -> str:
    modes = [
        Mode(),
        *(Mode(shape) for shape in flags.shapes),
        *(Mode(shape, budget) for shape in flags.shapes for budget in flags.budgets),
    ]
    prompts = await chat_prompts(settings.model, PROMPTS[: flags.num_prompts])
    async with running_pair(settings) as pair:
        return report(modes, await measure(pair, modes, prompts, flags))


def main() -> int:
    flags = _parse(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="outrider-bench-async-") as name:
        try:
            print(asyncio.run(_run(flags, _settings(flags, Path(name)))))
        except (OutriderError, PairFailed, subprocess.CalledProcessError) as error:
            print(f"bench-async: {error}", file=sys.stderr)
            for log in sorted(Path(name).glob("*.log")):
                print(f"{log.name}:\n{log.read_text()[-2000:]}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
