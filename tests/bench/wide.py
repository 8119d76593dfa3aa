"""`make bench` on a GPU: the engine with a real target's sizes and a trained pair's acceptance.

The demo's target and drafts, widened to the sizes of Llama-3.1-8B, Llama-3.2-1B and an EAGLE-3 head
with 32,000 tokens, see `widening`. Conversations of 512 tokens, greedy. First the wide target in
float32 must write what the small one writes. Each figure stands beside its floor of the same run,
see `wide_floors`; where shapes are chosen, that is the mean floor of the steps that were.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.model_options import ModelOptions, Quantisation
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel, HeadModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import TreeShape
from tests.bench.aims import figure
from tests.bench.figure import add_figures_flag
from tests.bench.mode_row import CHOSEN, HEADER, ON_DEVICE, ModeRow, has_aim
from tests.bench.wide_engine import MAX_SEQUENCES, Drafting, Run, serve, warm_up
from tests.bench.wide_floors import WideFloors, mean_floor_ms
from tests.bench.wide_pair import PAIR_8B, TARGET, PairShapes, WidePair, chat_prompts
from tests.load.figures import table

CUDA = torch.device("cuda")
PAGE_SIZE = 16
MAX_CONTEXT = 2048
PROMPT_TOKENS = 512
FEW_PROMPTS, MANY_PROMPTS = 8, 20
CHAIN, TREE = TreeShape(5, 1, 6), TreeShape(5, 8, 32)
STANDALONE_SHAPE = TreeShape(3, 1, 4)
NARROW = ModelOptions(quantisation=Quantisation.FP8)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how large.

    Attributes:
        num_checked: tokens of each prompt that the wide model must write as the small one does.
        has_host_rounds: whether rounds that the host leads are measured, too.
        aims_only: leaves out what has no row in the table of aims: 8 bits, and rounds of one shape
            at batches that nothing is aimed at.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = PROMPT_TOKENS
    output_tokens: int = 128
    num_checked: int = 48
    shapes: PairShapes = PAIR_8B
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA
    has_host_rounds: bool = False
    aims_only: bool = False

    def drafted_batches(self, mode: str, shape: TreeShape) -> tuple[int, ...]:
        """Returns the batches at which a mode is measured."""
        return tuple(
            batch for batch in self.batches if not self.aims_only or has_aim(mode, shape, batch)
        )


def runner_over(decoder: Decoder, plan: Plan, kv_dtype: torch.dtype | None = None) -> ModelRunner:
    """Returns a runner whose pool holds the largest batch, with graphs where there is CUDA."""
    layout = decoder.kv_layout(PAGE_SIZE, kv_dtype)
    scales = kv_scales(decoder) if layout.is_e4m3 else None
    tokens = plan.prompt_tokens + plan.output_tokens * (CHAIN.num_steps + 1) + 64
    num_pages = 2 + max(plan.batches) * (2 + tokens // PAGE_SIZE)
    pool = KvPool(layout, num_pages, decoder.device, scales)
    if decoder.device.type != "cuda":
        return ModelRunner(decoder, pool)
    limits = GraphLimits.of(
        max_sequences=MAX_SEQUENCES, max_tree_nodes=64, max_context_tokens=MAX_CONTEXT
    )
    return ModelRunner(decoder, pool, ForwardGraphs(decoder, pool, limits))


def check_equality(pair: WidePair, plan: Plan, prompts: Sequence[Sequence[int]]) -> int:
    """Returns for how many prompts both float32 models write the same tokens, greedily."""
    small = load_decoder(TARGET, dtype=torch.float32, device=plan.device)
    wide = pair.target.decoder(dtype=torch.float32)
    few, many = (
        serve(runner_over(decoder, plan), prompts, plan.num_checked).answers
        for decoder in (small, wide)
    )
    return sum(left == right for left, right in zip(few, many, strict=True))


class WideBench:
    """Runs every mode over one wide pair and yields the rows of the table."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan = plan
        self.pair = WidePair(plan.shapes, plan.device)
        self.prompts = chat_prompts(max(plan.batches), plan.prompt_tokens)
        self._scratch = scratch
        context_tokens = plan.prompt_tokens + plan.output_tokens // 2
        self.floors = WideFloors(plan.device, plan.dtype, context_tokens)
        has_graphs = plan.device.type == "cuda"
        self._passes = PassLimits(MAX_SEQUENCES, MAX_CONTEXT, has_graphs=has_graphs)
        self._plain: dict[int, Run] = {}

    def rows(self) -> Iterator[ModeRow]:
        """Yields the rows, in the order in which they are measured."""
        plan = self.plan
        runner = runner_over(self.pair.target.decoder(dtype=plan.dtype), plan)
        for batch in plan.batches:
            run = serve(runner, self.prompts[:batch], plan.output_tokens)
            self._plain[batch] = run
            yield self._row("plain", None, run, self.floors.step_ms(runner, batch, None))
        head = self.pair.eagle3(self._scratch, plan.dtype)
        for shape in (CHAIN, TREE):
            drafting = replace(self.eagle3(head, shape), is_on_device=True)
            yield from self._drafted(runner, ON_DEVICE, drafting)
        drafting = replace(self.eagle3(head, TREE), is_on_device=True, is_chosen=True)
        yield from self._drafted(runner, CHOSEN, drafting)
        if plan.has_host_rounds:
            yield from self._host_rounds(runner, head)
        del runner, drafting
        gc.collect()
        if not plan.aims_only:
            yield from self._narrow()

    def _host_rounds(self, runner: ModelRunner, head: DraftHead) -> Iterator[ModeRow]:
        """Rounds that the host leads."""
        for shape in (CHAIN, TREE):
            drafting = self.eagle3(head, shape)
            yield from self._drafted(runner, "EAGLE3, trees on the host", drafting)
        small = runner_over(self.pair.draft.decoder(dtype=self.plan.dtype), self.plan)
        yield from self._drafted(runner, "STANDALONE 1B", self._standalone(small))

    def _drafted(self, runner: ModelRunner, mode: str, drafting: Drafting) -> Iterator[ModeRow]:
        for batch in self.plan.drafted_batches(mode, drafting.shape):
            if not drafting.warms_itself:
                warm_up(runner, self.prompts[:batch], drafting)
            run = serve(runner, self.prompts[:batch], self.plan.output_tokens, drafting)
            floor_ms = functools.partial(self._floor_ms, runner, batch, drafting=drafting)
            ran = run.num_steps if drafting.is_chosen else {drafting.shape: 1}
            yield self._row(mode, drafting.shape, run, mean_floor_ms(ran, floor_ms))

    def _narrow(self) -> Iterator[ModeRow]:
        """Plain decoding in 8 bits; its answers are compared with the full target's."""
        decoder = self.pair.target.decoder(dtype=self.plan.dtype, options=NARROW)
        for kv_dtype, name in ((None, "fp8"), (torch.float8_e4m3fn, "fp8 and fp8 KV")):
            runner = runner_over(decoder, self.plan, kv_dtype)
            for batch in self.plan.batches:
                run = serve(runner, self.prompts[:batch], self.plan.output_tokens)
                floor_ms = self.floors.step_ms(runner, batch, None)
                yield self._row(f"plain, {name}", None, run, floor_ms)

    def _standalone(self, runner: ModelRunner) -> Drafting:
        """Returns how the smaller model drafts; see `eagle3`."""
        decoder = runner.decoder
        grower = TreeGrower(DecoderModel(decoder, runner.pool), self._passes)

        def build() -> Drafter:
            leases = KvLeases(runner.pool.num_pages, PAGE_SIZE, prefix_cache=False)
            return StandaloneDrafter(runner, leases, grower, max_context_tokens=MAX_CONTEXT)

        return Drafting(
            "STANDALONE",
            STANDALONE_SHAPE,
            build,
            functools.partial(self.floors.draft_ms, decoder),
        )

    def eagle3(self, head: DraftHead, shape: TreeShape) -> Drafting:
        """Returns how the head drafts apart from its target, as a draft in another process does."""
        num_pages = 2 + max(self.plan.batches) * (MAX_CONTEXT // PAGE_SIZE)
        pool = KvPool(head.kv_layout(PAGE_SIZE), num_pages, self.plan.device)
        model = HeadModel(head, pool)
        # One for all runs: each captures its graphs once.
        grower = TreeGrower(model, self._passes)

        def build() -> Drafter:
            leases = KvLeases(num_pages, PAGE_SIZE, prefix_cache=False)
            return EagleDrafter(
                model,
                leases,
                max_context_tokens=MAX_CONTEXT,
                keeps_features=False,
                grower=grower,
            )

        return Drafting("EAGLE3", shape, build, functools.partial(self.floors.draft_ms, head))

    def _floor_ms(
        self, runner: ModelRunner, batch: int, shape: TreeShape | None, drafting: Drafting
    ) -> float:
        """Returns the floor of a step: a round of this shape, or a plain one."""
        draft_ms = 0.0 if shape is None else drafting.floor_ms(batch, shape)
        return self.floors.step_ms(runner, batch, shape) + draft_ms

    def _row(self, mode: str, shape: TreeShape | None, run: Run, floor_ms: float) -> ModeRow:
        plain = self._plain[len(run.answers)]
        return ModeRow.of(mode, shape, run, floor_ms, base=plain, plain=plain)


def main() -> int:
    start_s = time.monotonic()

    def say(line: str) -> None:
        """Prints a line as soon as it is known, with the time that has passed."""
        print(f"{time.monotonic() - start_s:4.0f} s | {line}", flush=True)

    flags = _flags()
    plan = Plan(
        batches=tuple(flags.batches),
        output_tokens=flags.output_tokens,
        has_host_rounds=flags.host_rounds,
        aims_only=flags.aims_only,
    )
    with tempfile.TemporaryDirectory(dir=flags.scratch) as scratch:
        bench = WideBench(plan, Path(scratch))
        say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        say(f"copy {bench.floors.bandwidth / 1e9:.2f} TB/s")
        if not flags.skip_check:
            prompts = chat_prompts(FEW_PROMPTS if plan.aims_only else MANY_PROMPTS, PROMPT_TOKENS)
            same = check_equality(bench.pair, plan, prompts)
            say(f"wide in float32 against small: {same}/{len(prompts)} answers are the same")
            share = 100 * same / len(prompts)
            note = f"{len(prompts)} prompts"
            flags.figures.add([figure("same answers, widened and small model", share, note=note)])
            gc.collect()
        rows = []
        for row in bench.rows():
            say(" | ".join(row.cells()))
            rows.append(row.cells())
            flags.figures.add(row.figures())
    print(table(HEADER, rows))
    return 0


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(Plan().batches))
    parser.add_argument("--output-tokens", type=int, default=Plan().output_tokens)
    parser.add_argument("--skip-check", action="store_true", help="trust the widening")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--host-rounds", action="store_true", help="those led by the host, too")
    modes.add_argument(
        "--aims-only",
        action="store_true",
        help="leave out modes and batches that nothing is aimed at",
    )
    parser.add_argument("--scratch", type=Path, help="folder for a head, 1 GB; unset, a new one")
    add_figures_flag(parser)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
