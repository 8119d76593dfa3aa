"""How long a head takes from a verdict to the trees for the verdicts after it.

    python -m tests.bench.head_ahead [--budget 8] [--batches 1 8]

The demo's EAGLE-3 head, widened to that of an 8B model with 32,000 tokens; contexts of 512 tokens,
greedy, features of noise. Each round commits what the likeliest verdict would. Times are medians of
the drafter alone, in ms: of a tree drafted after a verdict; of the first step behind a verdict that
was prepared for, which reads its features and its tree and chooses the verdicts on that;
and of this and all steps after it, until the trees for these verdicts are on the host.
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

from services.draft.drafters.drafter import VerifiedTree
from services.draft.drafters.eagle import EagleDrafter
from services.draft.events import FeatureRows
from services.draft.sequence import DraftSequence, SequenceKey
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.tree_grower import TreeGrower
from shared.runtime.tree_model import HeadModel
from shared.runtime.tree_pass import PassLimits
from shared.tokens import SamplingParams, TokenTree, TreeShape
from tests.bench.wide import CUDA, PAGE_SIZE
from tests.bench.wide_pair import PAIR_8B, PairShapes, WidePair, chat_prompts
from tests.helpers.drafting import committed, foreseen_tokens
from tests.load.figures import table

NUM_WARM_UP = 4
"""Rounds that capture graphs."""
HEADER = ("shape", "batch", "tree after a verdict", "verdicts chosen", "trees ahead")


@dataclass(frozen=True, slots=True)
class HeadPlan:
    """What to measure, and how large."""

    batches: tuple[int, ...] = (1, 8)
    shapes: tuple[TreeShape, ...] = (TreeShape(3, 1, 4), TreeShape(5, 1, 6), TreeShape(4, 4, 12))
    budget: int = 8
    prompt_tokens: int = 512
    num_rounds: int = 32
    max_context_tokens: int = 2048
    pair: PairShapes = PAIR_8B
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = CUDA


class HeadBench:
    """Drafts ahead with one head in rounds of several shapes."""

    def __init__(self, plan: HeadPlan, scratch: Path) -> None:
        self._plan = plan
        self._head = WidePair(plan.pair, plan.device).eagle3(scratch, plan.dtype)

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yields the rows of the table."""
        plan = self._plan
        for shape in plan.shapes:
            for batch in plan.batches:
                rounds = _Rounds(self._drafter(), shape, plan.budget)
                rounds.run(self._sequences(batch), plan.num_rounds)
                name = f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}"
                yield (name, str(batch), *rounds.medians_ms())

    def _drafter(self) -> EagleDrafter:
        plan, head = self._plan, self._head
        num_pages = 2 + 2 * max(plan.batches) * (plan.max_context_tokens // PAGE_SIZE)
        pool = KvPool(head.kv_layout(PAGE_SIZE), num_pages, plan.device)
        has_graphs, most = plan.device.type == "cuda", max(plan.batches) * plan.budget
        limits = PassLimits(most, plan.max_context_tokens, has_graphs)
        drafter = EagleDrafter(
            HeadModel(head, pool),
            KvLeases(num_pages, PAGE_SIZE, prefix_cache=False),
            max_context_tokens=plan.max_context_tokens,
            keeps_features=False,
            grower=TreeGrower(HeadModel(head, pool), limits),
        )
        drafter.lookahead.budget = plan.budget
        return drafter

    def _sequences(self, count: int) -> list[DraftSequence]:
        greedy, length = SamplingParams(temperature=0.0), self._plan.prompt_tokens
        vocab_size = self._head.config.vocab_size
        return [
            DraftSequence(SequenceKey(1, number), text, length, greedy, 0, True, vocab_size, 256)
            for number, text in enumerate(chat_prompts(count, length))
        ]


class _Rounds:
    """Rounds of one drafter; of two verdicts the first has its features here, of the second's tree
    there are only tokens. Times in seconds, one a pair of rounds."""

    def __init__(self, drafter: EagleDrafter, shape: TreeShape, outcome_budget: int) -> None:
        self._drafter, self._shape, self._outcome_budget = drafter, shape, outcome_budget
        self._noise = torch.Generator().manual_seed(1)
        self._after_s: list[float] = []
        self._chosen_s: list[float] = []
        self._ahead_s: list[float] = []

    def medians_ms(self) -> list[str]:
        """Returns how long each part takes."""
        kept = (each[NUM_WARM_UP:] for each in (self._after_s, self._chosen_s, self._ahead_s))
        return [f"{statistics.median(each) * 1e3:.2f}" for each in kept]

    def run(self, batch: Sequence[DraftSequence], num_rounds: int) -> None:
        """Opens the sequences, and commits tokens to them."""
        drafter = self._drafter
        for sequence in batch:
            drafter.open(sequence)
            drafter.add_features(sequence, self._features(0, sequence.num_tokens - 1))
            assert drafter.reserve(sequence, self._shape), "no pages are left"
        while any(drafter.backlog(each) > 1 for each in batch):
            drafter.catch_up(batch, 2048)
        for _ in range(num_rounds):
            trees = self._propose(batch)
            for times in ((), (self._chosen_s, self._ahead_s)):
                prepared = self._prepare(batch, trees, *times)
                self._commit([(each, foreseen) for each, foreseen, _ in prepared])
                trees = [tree for _, _, tree in prepared]
        for sequence in batch:
            drafter.close(sequence)

    def _propose(self, batch: Sequence[DraftSequence]) -> list[TokenTree]:
        assert all(self._drafter.reserve(each, self._shape) for each in batch), "no pages are left"
        start_s = time.perf_counter()
        proposals = self._drafter.propose(batch, self._shape)
        self._after_s.append(time.perf_counter() - start_s)
        return [each.tree for each in proposals]

    def _prepare(
        self, batch: Sequence[DraftSequence], trees: Sequence[TokenTree], *times: list[float]
    ) -> list[tuple[DraftSequence, tuple[int, ...], TokenTree]]:
        """Returns what the likeliest verdict on each tree commits, and the tree for it.

        Args:
            times: of the first step of preparing, and of all of them.
        """
        lookahead, start_s, found_s = self._drafter.lookahead, time.perf_counter(), []
        for sequence, tree in zip(batch, trees, strict=True):
            lookahead.begin(VerifiedTree(sequence, tree, self._shape, self._outcome_budget))
        proposals = []
        while lookahead.has_work:
            proposals += lookahead.advance()
            found_s.append(time.perf_counter() - start_s)
        for kept, found in zip(times, (found_s[0], found_s[-1]), strict=False):
            kept.append(found)
        likeliest = [next(each for each in proposals if each.sequence is own) for own in batch]
        return [
            (each.sequence, foreseen_tokens(tree, each), each.tree)
            for tree, each in zip(trees, likeliest, strict=True)
        ]

    def _commit(self, verdicts: Sequence[tuple[DraftSequence, tuple[int, ...]]]) -> None:
        for sequence, tokens in verdicts:
            start = sequence.num_tokens - 1
            verdict = committed(sequence, tokens)
            rows = self._features(start, sequence.num_tokens - 1)
            self._drafter.commit(sequence, verdict, rows)

    def _features(self, start: int, end: int) -> FeatureRows:
        """As they come off the wire."""
        width = self._drafter.limits.feature_spec
        assert width is not None
        rows = torch.randn((end - start, width.width), generator=self._noise)
        return FeatureRows(start, rows.to(torch.bfloat16))


def main() -> int:
    parser = argparse.ArgumentParser(prog="head_ahead", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=list(HeadPlan().batches))
    parser.add_argument("--budget", type=int, default=HeadPlan().budget)
    flags = parser.parse_args()
    plan = HeadPlan(batches=tuple(flags.batches), budget=flags.budget)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        rows = []
        for row in HeadBench(plan, Path(scratch)).rows():
            print(" | ".join(row), flush=True)
            rows.append(row)
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
