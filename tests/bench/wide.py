"""`make bench` on a GPU: the engine with a real target's sizes and a trained pair's acceptance.

The demo's target and drafts, widened to the sizes of Llama-3.1-8B, Llama-3.2-1B and an EAGLE-3 head
with 32,000 tokens, see `widening`. Conversations of 512 tokens, greedy. First the wide target in
float32 must write what the small one writes. Each figure stands beside its floor of the same run:
the matrix products of a round alone, in one CUDA graph, or the bytes of 8-bit weights over the copy
bandwidth, plus the bytes of keys and values.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.drafters.standalone import StandaloneDrafter
from shared.kernels.quantised import QuantisedWeight
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.layers.memory import linears
from shared.model_options import ModelOptions, Quantisation
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.graphs import ForwardGraphs
from shared.runtime.head_runner import HeadRunner
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import DecoderModel, HeadModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import TreeShape
from tests.bench.aims import figure
from tests.bench.device_clock import copy_bandwidth, device_ms
from tests.bench.figure import add_figures_flag
from tests.bench.mode_row import CHOSEN, HEADER, ON_DEVICE, ModeRow
from tests.bench.wide_engine import MAX_SEQUENCES, Drafting, Run, serve, warm_up
from tests.bench.wide_pair import PAIR_8B, TARGET, PairShapes, WidePair, chat_prompts
from tests.load.figures import table

CUDA = torch.device("cuda")
PAGE_SIZE = 16
MAX_CONTEXT = 2048
CHAIN, TREE = TreeShape(5, 1, 6), TreeShape(5, 8, 32)
STANDALONE_SHAPE = TreeShape(3, 1, 4)
NARROW = ModelOptions(quantisation=Quantisation.FP8)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how large.

    Attributes:
        num_checked: tokens of each prompt that the wide model must write as the small one does.
        has_host_rounds: whether rounds that the host leads are measured, too.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 512
    output_tokens: int = 128
    num_checked: int = 48
    shapes: PairShapes = PAIR_8B
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA
    has_host_rounds: bool = False


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


def products_ms(model: Decoder | DraftHead, num_rows: int, plan: Plan, bandwidth: float) -> float:
    """Returns the time of a forward's matrix products alone."""
    weights = [layer.weight for layer in linears(model)]
    narrow = [each for each in weights if isinstance(each, QuantisedWeight)]
    wide = [each.values for each in weights if not isinstance(each, QuantisedWeight)]
    inputs = {
        width: torch.randn(num_rows, width, device=plan.device).to(plan.dtype)
        for width in {values.shape[1] for values in wide}
    }
    bytes_ms = sum(each.values.nbytes for each in narrow) / bandwidth
    return bytes_ms + _graph_ms(wide, inputs)


def _graph_ms(weights: Sequence[Tensor], inputs: dict[int, Tensor]) -> float:
    def products() -> None:
        for values in weights:
            F.linear(inputs[values.shape[1]], values)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return device_ms(graph.replay, repeats=5)


class WideBench:
    """Runs every mode over one wide pair and yields the rows of the table."""

    def __init__(self, plan: Plan, scratch: Path) -> None:
        self.plan = plan
        self.pair = WidePair(plan.shapes, plan.device)
        self.prompts = chat_prompts(max(plan.batches), plan.prompt_tokens)
        self._scratch = scratch
        is_cuda = plan.device.type == "cuda"
        self.bandwidth = copy_bandwidth() if is_cuda else 0.0
        self._passes = PassLimits(MAX_SEQUENCES, MAX_CONTEXT, has_graphs=is_cuda)
        self._plain: dict[int, Run] = {}

    def rows(self) -> Iterator[ModeRow]:
        """Yields the rows, in the order in which they are measured."""
        plan = self.plan
        runner = runner_over(self.pair.target.decoder(dtype=plan.dtype), plan)
        for batch in plan.batches:
            run = serve(runner, self.prompts[:batch], plan.output_tokens)
            self._plain[batch] = run
            yield self._row("plain", None, run, self._floor_ms(runner, batch, None))
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
        yield from self._narrow()

    def _host_rounds(self, runner: ModelRunner, head: DraftHead) -> Iterator[ModeRow]:
        """Rounds that the host leads: with whole trees of the draft, and level by level."""
        for shape in (CHAIN, TREE):
            drafting = self.eagle3(head, shape)
            yield from self._drafted(runner, "EAGLE3, trees on the host", drafting)
        small = runner_over(self.pair.draft.decoder(dtype=self.plan.dtype), self.plan)
        yield from self._drafted(runner, "STANDALONE 1B", self._standalone(small))
        drafting = self.eagle3(head, CHAIN, grows_whole=False)
        yield from self._drafted(runner, "EAGLE3, levels on the host", drafting)
        drafting = self._standalone(small, grows_whole=False)
        yield from self._drafted(runner, "STANDALONE 1B, levels on the host", drafting)

    def _drafted(self, runner: ModelRunner, mode: str, drafting: Drafting) -> Iterator[ModeRow]:
        for batch in self.plan.batches:
            warm_up(runner, self.prompts[:batch], drafting)
            run = serve(runner, self.prompts[:batch], self.plan.output_tokens, drafting)
            shape = drafting.shape
            floor_ms = self._floor_ms(runner, batch, shape) + drafting.floor_ms(batch)
            yield self._row(mode, shape, run, floor_ms)

    def _narrow(self) -> Iterator[ModeRow]:
        """Plain decoding in 8 bits; its answers are compared with the full target's."""
        decoder = self.pair.target.decoder(dtype=self.plan.dtype, options=NARROW)
        for kv_dtype, name in ((None, "fp8"), (torch.float8_e4m3fn, "fp8 and fp8 KV")):
            runner = runner_over(decoder, self.plan, kv_dtype)
            for batch in self.plan.batches:
                run = serve(runner, self.prompts[:batch], self.plan.output_tokens)
                yield self._row(f"plain, {name}", None, run, self._floor_ms(runner, batch, None))

    def _standalone(self, runner: ModelRunner, *, grows_whole: bool = True) -> Drafting:
        """Returns how the smaller model drafts; see `eagle3`."""
        decoder = runner.decoder
        grower = TreeGrower(DecoderModel(decoder, runner.pool), self._passes)

        def build() -> Drafter:
            leases = KvLeases(runner.pool.num_pages, PAGE_SIZE, prefix_cache=False)
            return StandaloneDrafter(
                runner,
                leases,
                max_context_tokens=MAX_CONTEXT,
                grower=grower if grows_whole else None,
            )

        return Drafting(
            "STANDALONE",
            STANDALONE_SHAPE,
            build,
            lambda batch: self._draft_floor_ms(decoder, batch, STANDALONE_SHAPE),
        )

    def eagle3(self, head: DraftHead, shape: TreeShape, *, grows_whole: bool = True) -> Drafting:
        """Returns how the head drafts apart from its target, as a draft in another process does.

        Args:
            grows_whole: a tree takes one pass of the device; else the host leads it level by level.
        """
        num_pages = 2 + max(self.plan.batches) * (MAX_CONTEXT // PAGE_SIZE)
        pool = KvPool(head.kv_layout(PAGE_SIZE), num_pages, self.plan.device)
        runner = HeadRunner(head, pool)
        # One for all runs: each captures its graphs once.
        grower = TreeGrower(HeadModel(head, pool), self._passes)

        def build() -> Drafter:
            leases = KvLeases(num_pages, PAGE_SIZE, prefix_cache=False)
            return EagleDrafter(
                runner,
                leases,
                max_context_tokens=MAX_CONTEXT,
                keeps_features=False,
                grower=grower if grows_whole else None,
            )

        return Drafting(
            "EAGLE3", shape, build, lambda batch: self._draft_floor_ms(head, batch, shape)
        )

    def _floor_ms(self, runner: ModelRunner, batch: int, shape: TreeShape | None) -> float:
        if self.plan.device.type != "cuda":
            return 0.0
        num_rows = batch * (1 if shape is None else shape.num_draft_tokens)
        context = self.plan.prompt_tokens + self.plan.output_tokens // 2
        kv_bytes = runner.pool.layout.token_size_bytes * context * batch
        products = products_ms(runner.decoder, num_rows, self.plan, self.bandwidth)
        return products + kv_bytes / self.bandwidth

    def _draft_floor_ms(self, model: Decoder | DraftHead, batch: int, shape: TreeShape) -> float:
        if self.plan.device.type != "cuda":
            return 0.0
        one = products_ms(model, batch * shape.topk, self.plan, self.bandwidth)
        return shape.num_steps * one

    def _row(self, mode: str, shape: TreeShape | None, run: Run, floor_ms: float) -> ModeRow:
        plain = self._plain[len(run.answers)]
        return ModeRow.of(mode, shape, run, floor_ms, base=plain, plain=plain)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(Plan().batches))
    parser.add_argument("--output-tokens", type=int, default=Plan().output_tokens)
    parser.add_argument("--skip-check", action="store_true", help="trust the widening")
    parser.add_argument("--host-rounds", action="store_true", help="those led by the host, too")
    add_figures_flag(parser)
    flags = parser.parse_args()
    plan = Plan(
        batches=tuple(flags.batches),
        output_tokens=flags.output_tokens,
        has_host_rounds=flags.host_rounds,
    )
    with tempfile.TemporaryDirectory() as scratch:
        bench = WideBench(plan, Path(scratch))
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"copy {bench.bandwidth / 1e9:.2f} TB/s")
        if not flags.skip_check:
            prompts = chat_prompts(20, plan.prompt_tokens)
            same = check_equality(bench.pair, plan, prompts)
            print(f"wide in float32 against small: {same}/{len(prompts)} answers are the same")
            share = 100 * same / len(prompts)
            note = f"{len(prompts)} prompts"
            flags.figures.add([figure("same answers, widened and small model", share, note=note)])
            gc.collect()
        rows = []
        for row in bench.rows():
            print(" | ".join(row.cells()), flush=True)
            rows.append(row.cells())
            flags.figures.add(row.figures())
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
