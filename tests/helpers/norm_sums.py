"""Sums over GPUs with the residual and norm after them: in one kernel, and through NCCL."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from shared.kernels.pointwise import add_rms_norm
from shared.layers.tensor_group import TensorGroup
from shared.runtime.graphs import capturing

EPS = 1e-5
WIDTHS = ((torch.bfloat16, 4096), (torch.float16, 768), (torch.float32, 100))
NUM_SUMS = 10_000
_FEW_ROWS, _MANY_ROWS = (1, 2, 7, 64), (*range(1, 65), 100, 133, 300, 512)
# Odd and even numbers of sums, so that graphs leave their rows at either slot.
_CHAINS = ((1, 3), (5, 1), (64, 5), (33, 2), (300, 3), (2, 4))
_NUM_REPLAYS = 60
Way = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class NormSums:
    """Rows of one width and dtype on this rank's GPU."""

    group: TensorGroup
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    columns: int = 4096

    def drawn(self, seed: int, rows: int) -> Tensor:
        """Returns `[rows, columns]` random numbers of very different magnitudes."""
        generator = torch.Generator().manual_seed(seed)
        shape = (rows, self.columns)
        sizes = torch.exp2(torch.randint(-6, 4, shape, generator=generator).float())
        return (torch.randn(shape, generator=generator) * sizes).to(self.device, self.dtype)

    def part(self, seed: int, rows: int) -> Tensor:
        """Returns this rank's partial sums, which differ from those of other ranks."""
        return self.drawn(1000 * (1 + self.group.rank) + seed, rows)

    def ways(self) -> tuple[Way, Way]:
        """Returns two functions that compute sum and norm: in one kernel, and through NCCL."""
        weight = self.drawn(0, 1)[0]

        def one(part: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            return self.group.add_norm(part, hidden, weight, EPS)

        def two(part: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
            total = self.group.sum(part)
            pair = (total, None) if hidden is None else (hidden, total)
            return add_rms_norm(*pair, weight, EPS)

        return one, two

    def wrong_rows(self, counts: Iterable[int]) -> Iterator[str]:
        """Yields the row counts for which the two results differ in a bit."""
        one, two = self.ways()
        for count in counts:
            part, hidden = self.part(count, count), self.drawn(count, count)
            for residual in (hidden, None):
                if not _equal(one(part, residual), two(part, residual)):
                    yield f"{count} rows of {self.columns} {self.dtype}"

    def wrong_replays(self) -> Iterator[str]:
        """Yields chains whose result differs when replayed as graphs, in any order and with
        changing inputs."""
        one, two = self.ways()
        graphs = [_Chain(self, one, rows, length) for rows, length in _CHAINS]
        expected = {
            (place, seed): chained(two, self.part(seed, rows), self.drawn(seed, rows), length)
            for place, (rows, length) in enumerate(_CHAINS)
            for seed in range(3)
        }
        order = random.Random(5)
        for replay in range(_NUM_REPLAYS):
            place, seed = order.choice(list(expected))
            graphs[place].fill(seed)
            if not _equal(graphs[place].replay(), expected[place, seed]):
                yield f"chain {_CHAINS[place]} with inputs {seed}, replay {replay}"

    def wrong_after_many(self, rows: int, length: int = 64) -> Iterator[str]:
        """Yields how many elements differ in the course of `NUM_SUMS` sums."""
        one, two = self.ways()
        expected = chained(two, self.part(0, rows), self.drawn(0, rows), length)
        chain = _Chain(self, one, rows, length)
        wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        for _ in range(-(-NUM_SUMS // length)):
            for actual, right in zip(chain.replay(), expected, strict=True):
                wrong += (actual != right).sum()
        if count := int(wrong):
            yield f"{count} elements in {NUM_SUMS} sums of {rows} rows"


class _Chain:
    """A graph of sums, each of which adds the norm of the previous sum; its inputs have seed 0."""

    def __init__(self, sums: NormSums, way: Way, rows: int, length: int) -> None:
        self._sums = sums
        self._part, self._hidden = sums.part(0, rows), sums.drawn(0, rows)
        self._graph, self._result = captured(
            lambda: chained(way, self._part, self._hidden, length), sums.group
        )

    def fill(self, seed: int) -> None:
        rows = len(self._part)
        self._part.copy_(self._sums.part(seed, rows))
        self._hidden.copy_(self._sums.drawn(seed, rows))

    def replay(self) -> tuple[Tensor, Tensor]:
        self._graph.replay()
        return self._result


def chained(way: Way, part: Tensor, hidden: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Returns sum and norm after `length` sums; the part of each sum is the previous norm."""
    for _ in range(length):
        hidden, part = way(part, hidden)
    return hidden, part


def captured(work: Callable[[], Result], group: TensorGroup) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Captures `work` as a graph and registers it in `group`; returns the graph and its result."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    group.graphs.append(graph)
    with capturing(graph, torch.cuda.graph_pool_handle()):
        result = work()
    return graph, result


def wrong_norms(group: TensorGroup, device: torch.device) -> Iterator[str]:
    """Yields all differences between the one kernel and NCCL."""
    for dtype, columns in WIDTHS:
        sums = NormSums(group, device, dtype, columns)
        counts = _MANY_ROWS if columns == WIDTHS[0][1] else _FEW_ROWS
        yield from sums.wrong_rows(counts)
    rows = NormSums(group, device)
    yield from itertools.chain(
        rows.wrong_replays(), rows.wrong_after_many(1), rows.wrong_after_many(64)
    )


def _equal(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
