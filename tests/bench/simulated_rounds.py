"""Rounds of random weights, whose acceptance is simulated after all the work of real decisions."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton
from shared.models.decoder import DecoderOutput
from shared.runtime.round_batches import RoundTree
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import NewLane, RoundSampling, RoundState
from shared.runtime.round_verification import CommittedRound, RoundVerification, VerifiedTrees
from shared.runtime.tree_model import fastest
from shared.speculation.tree import TreeRows
from shared.tokens import SamplingParams

NUM_ROUNDS = 16
"""Rounds of a timed run, and of a cycle of simulated acceptance."""
_TOKENS = 1000


class SimulatedAcceptance:
    """How many nodes of each slot's tree are accepted: first children, down to a given depth. The
    token behind them is a random one, so that sequences stay different and no path goes on.

    Args:
        counts: `[R][S]`, accepted nodes in a cycle of R rounds.

    Attributes:
        trees: the trees of the last round; None before the first.
    """

    trees: TreeRows | None

    def __init__(
        self, counts: Sequence[Sequence[int]], vocab_size: int, device: torch.device
    ) -> None:
        self.counts, self.trees = counts, None
        rows = torch.tensor(counts, dtype=torch.int32)
        draw = torch.Generator().manual_seed(5)
        # Of each even token and the next one.
        bonus = torch.randint(vocab_size // 2 * 2, rows.shape, generator=draw)
        rounds = zip(rows.to(device).unbind(), bonus.to(device).unbind(), strict=True)
        self._rounds = itertools.cycle(rounds)

    def accept(self, drawn: Tensor, trees: TreeRows) -> None:
        """Overwrites what the target drew, `[S, T]`, for the next round of the cycle."""
        self.trees, (counts, bonus) = trees, next(self._rounds)
        size = len(drawn)
        force_path(drawn, trees.token_ids, trees.parents, counts[:size], bonus[:size])


def level_rate(num_accepted: float, depth: int) -> float:
    """Returns the rate at which each level of a chain is accepted after the level before, if
    `num_accepted` nodes of `depth` are accepted on average."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = 0.5 * (low + high)
        is_low = sum(rate**level for level in range(1, depth + 1)) < num_accepted
        low, high = (rate, high) if is_low else (low, rate)
    return low


def spread_counts(num_accepted: float, depth: int, num_slots: int) -> list[list[int]]:
    """Returns accepted nodes of chains, `[NUM_ROUNDS][num_slots]`, `num_accepted` of `depth` on
    average. The slots' rounds are those of one distribution, each in an order of its own."""
    rate, rng = level_rate(num_accepted, depth), random.Random(5)
    shares = [(place + 0.5) / NUM_ROUNDS for place in range(NUM_ROUNDS)]
    counts = [sum(share >= 1.0 - rate**level for level in range(1, depth + 1)) for share in shares]
    slots = [rng.sample(counts, NUM_ROUNDS) for _ in range(num_slots)]
    return [list(each) for each in zip(*slots, strict=True)]


def force_path(
    drawn: Tensor, token_ids: Tensor, parents: Tensor, counts: Tensor, bonus: Tensor
) -> None:
    """Overwrites `drawn` `[S, T]` so that the first `counts` `[S]` first children are accepted, and
    then `bonus` `[S]` is drawn, or the token beside it where a child has that."""
    if runs_triton(drawn):
        # Triton is not installed where there is no CUDA.
        from tests.bench.force_jit import force_path_fused

        force_path_fused(drawn, token_ids, parents, counts, bonus)
    else:
        force_path_plain(drawn, token_ids, parents, counts, bonus)


def force_path_plain(
    drawn: Tensor, token_ids: Tensor, parents: Tensor, counts: Tensor, bonus: Tensor
) -> None:
    """See `force_path`; on the CPU."""
    rows, every = torch.arange(drawn.shape[1]), torch.arange(len(drawn))
    row = torch.zeros_like(every)
    for depth in range(int(counts.max())):
        is_child = (parents == row.unsqueeze(1)) & (rows > 0)
        child = is_child.int().argmax(dim=1)
        slots = torch.nonzero(is_child.any(dim=1) & (depth < counts)).squeeze(1)
        drawn[slots, row[slots]] = token_ids[slots, child[slots]]
        row[slots] = child[slots]
    is_child = (parents == row.unsqueeze(1)) & (rows > 0)
    clashes = (is_child & (token_ids == bonus.unsqueeze(1))).any(dim=1)
    drawn[every, row] = torch.where(clashes, bonus ^ 1, bonus)


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedVerification(RoundVerification):
    """Computes and draws as `real` does, then has a simulated path accepted."""

    real: RoundVerification
    acceptance: SimulatedAcceptance

    @classmethod
    def over(
        cls, acceptance: SimulatedAcceptance, code: Callable[..., RoundVerification] | None = None
    ) -> Callable[..., SimulatedVerification]:
        """Returns what makes a verification; `code` makes the real one, None takes the fastest."""

        def make(decoder: Any, pool: Any, shape: Any, *others: Any) -> SimulatedVerification:
            parts = (decoder, pool, shape, *others)
            real = (code or fastest(RoundVerification, shape, pool.device))(*parts)
            return cls(*parts, real, acceptance)

        return make

    def forward(self, tree: RoundTree) -> VerifiedTrees:
        return self.real.forward(tree)

    def draw(
        self, logits: Tensor, state: RoundState, tree: TreeRows, sampling: RoundSampling
    ) -> Tensor:
        drawn = self.real.draw(logits, state, tree, sampling).contiguous()
        self.acceptance.accept(drawn, tree)
        return drawn

    def finish(
        self, state: RoundState, tree: RoundTree, output: DecoderOutput, drawn: Tensor
    ) -> CommittedRound:
        return self.real.finish(state, tree, output, drawn)


def place_all(
    runner: RoundRunner, batch: int, sampling: SamplingParams, *, context: int, num_pages: int
) -> None:
    """Puts `batch` sequences of `context` tokens into a runner, instead of those it has. Each has
    the same `num_pages` every time."""
    runner.remove(runner.sequence_ids)
    size, lanes = min(_TOKENS, runner.target_vocab_size), []
    for number in range(batch):
        pages = range(1 + number * num_pages, 1 + (number + 1) * num_pages)
        tokens = [(7 * place + number) % size for place in range(context)]
        lanes.append(NewLane(number, tokens, sampling, pages, pages, context - 2))
    runner.place(lanes)


def round_ms(
    runner: RoundRunner, place: Callable[[], object] | None = None, num_runs: int = 5
) -> tuple[float, float]:
    """Returns the wall time of a round whose result is read one round late, median of some runs,
    and the tokens that a round committed to all sequences together.

    Args:
        place: places the sequences anew before each run; None lets them grow.
    """
    times_ms: list[float] = []
    num_tokens = 0
    for _ in range(num_runs):
        if place is not None:
            place()
        num_tokens = 0
        runner.launch()
        _wait()
        start_s = time.perf_counter()
        for _ in range(NUM_ROUNDS):
            runner.launch()
            num_tokens += sum(len(each.token_ids) for each in runner.result())
        _wait()
        times_ms.append((time.perf_counter() - start_s) * 1e3 / NUM_ROUNDS)
        runner.result()
    return statistics.median(times_ms), num_tokens / NUM_ROUNDS


def _wait() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
