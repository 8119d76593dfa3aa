"""`make bench-tp-draft`: trees of a language model that drafts, on one GPU and on several.

Writes a widened model to --scratch, because every process reads its own part. Conversations of 512
tokens go on by three tokens a round, whatever the trees say, so that all sizes grow trees of the
same texts: in bfloat16 a few of them differ, because sums are rounded at other places. Times are
those of the draft itself, from the committed tokens to the trees on the host. Floors are the matrix
bytes of one GPU's part over the copy bandwidth, once a level.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from services.draft.drafters.model_factory import BuiltModel, build_model, start_followers
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.sequence import DraftSequence, SequenceKey
from services.draft.settings import DraftSettings
from shared.kv.leases import KvLeases
from shared.layers.linear import linears
from shared.model_options import Dtype
from shared.tokens import Outcome, SamplingParams, TokenTree, TreeShape, Verdict
from tests.bench.device_clock import copy_bandwidth
from tests.bench.wide import CHAIN, CUDA, TREE
from tests.bench.wide_model import SPARE_TOKEN, WideModel
from tests.bench.wide_pair import DRAFT, PAIR_8B, TARGET, chat_prompts
from tests.load.figures import table

MODELS = {"1b": (DRAFT, PAIR_8B.draft), "8b": (TARGET, PAIR_8B.target)}
TOKENS_A_ROUND = 3
NUM_WARM_UP = 4
"""Rounds that capture graphs."""
HEADER = ("GPUs × shape", "batch", "tree ms", "a level", "floor ms", "of floor", "same trees")


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What to measure, and how large."""

    batches: tuple[int, ...] = (1, 8)
    shapes: tuple[TreeShape, ...] = (CHAIN, TREE)
    prompt_tokens: int = 512
    num_rounds: int = 32
    device: torch.device = CUDA
    dtype: Dtype = Dtype.BFLOAT16

    @property
    def num_tokens(self) -> int:
        """Of a conversation at its end."""
        return self.prompt_tokens + self.num_rounds * TOKENS_A_ROUND


@dataclass(frozen=True, slots=True)
class Grown:
    """The trees of all rounds, and the median time of a round's."""

    trees: tuple[TokenTree, ...]
    tree_ms: float


class DraftBench:
    """Grows the same trees by drafts of several sizes."""

    def __init__(self, plan: DraftPlan, folder: Path) -> None:
        """`folder` has the model."""
        self._plan, self._folder = plan, folder
        self._texts = chat_prompts(max(plan.batches), plan.num_tokens)
        self._bandwidth = copy_bandwidth() if plan.device.type == "cuda" else 0.0
        self._first: dict[tuple[int, TreeShape], Grown] = {}

    def rows(self, sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
        """Yields the rows of the table; trees are compared with those of the first size."""
        for size in sizes:
            settings = self._settings(size)
            followers = start_followers(settings) if size > 1 else None
            try:
                if followers is None:
                    built = build_model(settings)
                else:
                    built = build_model(settings, followers.group, followers.leader)
                for shape in self._plan.shapes:
                    for batch in self._plan.batches:
                        yield self._row(size, shape, batch, built)
                del built
            finally:
                if followers is not None:
                    followers.stop()

    def _settings(self, size: int) -> DraftSettings:
        plan = self._plan
        num_tokens = (1 + max(plan.batches)) * (plan.num_tokens + 64)
        return DraftSettings(
            speculative_draft_model_path=self._folder,
            device=plan.device.type,
            dtype=plan.dtype,
            tp_size=size,
            max_running_requests=max(plan.batches),
            max_total_tokens=num_tokens,
            context_length=plan.num_tokens + 64,
        )

    def _row(self, size: int, shape: TreeShape, batch: int, built: BuiltModel) -> tuple[str, ...]:
        grown = self._grown(shape, self._texts[:batch], built)
        first = self._first.setdefault((batch, shape), grown)
        pairs = zip(grown.trees, first.trees, strict=True)
        same = [_nodes(tree) == _nodes(other) for tree, other in pairs]
        weight_bytes = sum(layer.dense().nbytes for layer in linears(built.runner.decoder))
        floor_ms = shape.num_steps * weight_bytes / self._bandwidth if self._bandwidth else 0.0
        name = f"{size} × {shape.num_steps},{shape.topk},{shape.num_draft_tokens}"
        return (
            name, str(batch), f"{grown.tree_ms:.2f}", f"{grown.tree_ms / shape.num_steps:.2f}",
            f"{floor_ms:.2f}", f"{floor_ms / grown.tree_ms:.0%}", f"{sum(same)}/{len(same)}",
        )  # fmt: skip

    def _grown(self, shape: TreeShape, texts: Sequence[list[int]], built: BuiltModel) -> Grown:
        plan, runner = self._plan, built.runner
        drafter = StandaloneDrafter(
            runner,
            KvLeases(runner.pool.num_pages, runner.page_size, prefix_cache=False),
            built.grower,
            max_context_tokens=built.max_context_tokens,
        )
        batch = [self._sequence(number, text, built) for number, text in enumerate(texts)]
        for sequence in batch:
            drafter.open(sequence)
        while any(drafter.backlog(each) > 1 for each in batch):
            assert all(drafter.reserve(each, shape) for each in batch), "no pages are left"
            drafter.catch_up(batch, 2048)
        trees: list[TokenTree] = []
        times_ms = []
        for _ in range(plan.num_rounds):
            assert all(drafter.reserve(each, shape) for each in batch), "no pages are left"
            start_s = time.perf_counter()
            proposals = drafter.propose(batch, shape)
            times_ms.append((time.perf_counter() - start_s) * 1e3)
            trees += [each.tree for each in proposals]
            for sequence, text in zip(batch, texts, strict=True):
                _go_on(drafter, sequence, text)
        for sequence in batch:
            drafter.close(sequence)
        return Grown(tuple(trees), statistics.median(times_ms[NUM_WARM_UP:]))

    def _sequence(self, number: int, text: list[int], built: BuiltModel) -> DraftSequence:
        return DraftSequence(
            key=SequenceKey(1, number),
            token_ids=text[: self._plan.prompt_tokens],
            num_prompt_tokens=self._plan.prompt_tokens,
            sampling=SamplingParams(temperature=0.0),
            round=0,
            mirrors_noise=True,
            vocab_size=built.runner.decoder.config.vocab_size,
            max_nodes=256,
        )


def _go_on(drafter: StandaloneDrafter, sequence: DraftSequence, text: Sequence[int]) -> None:
    """Commits the next tokens of a text."""
    start = sequence.num_tokens
    tokens = tuple(text[start : start + TOKENS_A_ROUND])
    sequence.token_ids.extend(tokens)
    verdict = Verdict(1, 0, Outcome.MISSED, (), tokens, sequence.num_tokens)
    drafter.commit(sequence, verdict, None)


def _nodes(tree: TokenTree) -> tuple[Sequence[object], Sequence[object]]:
    return tree.token_ids, tree.parent_indices


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-tp-draft", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", choices=list(MODELS), default="1b", help="sizes to widen to")
    parser.add_argument("--batches", type=int, nargs="+", default=list(DraftPlan().batches))
    parser.add_argument("--rounds", type=int, default=DraftPlan().num_rounds)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--scratch", type=Path, help="folder for 3 or 17 GB, twice in float32")
    flags = parser.parse_args()
    if sum(size > 1 for size in flags.sizes) > 1:
        # See `open_peer_slots`.
        parser.error(f"--sizes is {flags.sizes}; a process can lead one group, so one size above 1")
    if flags.rounds <= NUM_WARM_UP:
        parser.error(f"--rounds is {flags.rounds}; the first {NUM_WARM_UP} are not measured")
    plan = DraftPlan(
        batches=tuple(flags.batches), num_rounds=flags.rounds, dtype=Dtype(flags.dtype)
    )
    print(f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, {torch.__version__}")
    source, shape = MODELS[flags.model]
    with tempfile.TemporaryDirectory(dir=flags.scratch) as scratch:
        folder, dtype = Path(scratch) / "draft", getattr(torch, flags.dtype)
        model = WideModel(source, shape, spare_token=SPARE_TOKEN, device=CUDA)
        model.write(folder, dtype=dtype, shard_size_bytes=2 * 10**9)
        del model
        rows = []
        for row in DraftBench(plan, folder).rows(flags.sizes):
            print(" | ".join(row), flush=True)
            rows.append(row)
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
