"""What the host puts between two verifications whose trees the device selects:
`python -m tests.bench.selection_gap`, on one GPU.

A target with the shapes of Llama-3.1-8B and random weights verifies trees that are prepared for
every length that the round before may leave, so that one of them always fits. Three orders are
measured: the next round is launched before the last one is read; the host asks the device whether
anything fits, and launches then; the host reads the last round, prepares and launches the next, as
it does where trees come late. The gap is the time of a round beyond that of rounds whose graphs
are handed to the device back to back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.prepared_trees import PreparedTree
from shared.runtime.round_runner import RoundLimits
from shared.runtime.round_sequences import Newcomer
from shared.runtime.selection_runner import SelectionRunner
from shared.runtime.selection_shapes import covering_shape
from shared.tokens import SamplingParams, TokenTree

PAGE_SIZE = 16
CONTEXT = 512
NUM_ROUNDS = 32
MAX_CONTEXT = 4096
CHAIN_3, CHAIN_5 = TokenTree.chain([5, 6, 7]), TokenTree.chain([5, 6, 7, 8, 9])
TREE_11 = TokenTree(tuple(range(5, 16)), (None, None, None, 0, 0, 1, 3, 3, 4, 6, 6))
TREES = {"chain of 3": CHAIN_3, "chain of 5": CHAIN_5, "tree of 11": TREE_11}


class Rounds:
    """Sequences whose rounds always go on.

    Args:
        tree: that each of them has in each round.
    """

    def __init__(self, decoder: Decoder, pool: KvPool, batch: int, tree: TokenTree) -> None:
        shape = covering_shape([tree])
        assert shape is not None
        self._tree, self._shape = tree, shape
        limits = RoundLimits(batch, MAX_CONTEXT)
        self.runner = SelectionRunner(decoder=decoder, pool=pool, limits=limits)
        self._num_pages = (pool.num_pages - 1) // batch
        self._lengths: dict[int, int] = {}
        self.place()

    def place(self) -> None:
        """Puts sequences of the first context into the slots, in place of those that are there."""
        self.runner.remove(self.runner.sequence_ids)
        tokens = [7 * place % 20 for place in range(CONTEXT)]
        for number in range(self.runner.limits.max_sequences):
            start = 1 + number * self._num_pages
            pages = range(start, start + min(self._num_pages, MAX_CONTEXT // PAGE_SIZE))
            sampling = SamplingParams(temperature=0.0)
            self.runner.place([Newcomer(number, tokens, sampling, pages, (), 0)])
            self._lengths[number] = CONTEXT

    def begin(self) -> None:
        """Launches a round behind rounds that have been read."""
        self._prepare(range(1))

    def launch_early(self) -> None:
        """The next round is launched, then the last one read."""
        self._prepare_ahead()
        self.runner.launch()
        self.read()

    def launch_asked(self) -> None:
        """The next round is launched once it is known that a tree fits."""
        self._prepare_ahead()
        assert self.runner.has_chosen()
        self.runner.launch()
        self.read()

    def launch_late(self) -> None:
        """The last round is read, then the next one prepared and launched."""
        self.read()
        self.begin()
        self.runner.launch()

    def read(self) -> None:
        for each in self.runner.result():
            self._lengths[each.sequence_id] += len(each.token_ids)

    def replay(self) -> None:
        """Hands the device one round and nothing else."""
        captured = self.runner.captured(self._shape)
        captured.draft.replay()
        captured.verification.replay()

    def _prepare_ahead(self) -> None:
        self._prepare(range(1, self._shape.num_steps + 2))

    def _prepare(self, more: range) -> None:
        """Prepares a tree for each number of tokens that the round under way may commit."""
        prepared = {
            number: [PreparedTree(length + count, self._tree) for count in more]
            for number, length in self._lengths.items()
        }
        self.runner.prepare(prepared, self._shape)


def round_ms(rounds: Rounds, launch: Callable[[], None], num_rounds: int, repeats: int) -> float:
    """Returns the median wall time of a round."""
    times_ms = []
    for _ in range(repeats):
        rounds.place()
        rounds.begin()
        rounds.runner.launch()
        launch()
        _wait()
        start_s = time.perf_counter()
        for _ in range(num_rounds):
            launch()
        _wait()
        times_ms.append((time.perf_counter() - start_s) * 1e3 / num_rounds)
        rounds.read()
    return statistics.median(times_ms)


def replayed_ms(rounds: Rounds, num_rounds: int, repeats: int) -> float:
    """Returns the median time of a round of graphs that follow each other."""
    times_ms = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(num_rounds):
            rounds.replay()
        end.record()
        _wait()
        times_ms.append(start.elapsed_time(end) / num_rounds)
    return statistics.median(times_ms)


def line(decoder: Decoder, pool: KvPool, name: str, batch: int, tree: TokenTree) -> str:
    """Measures rounds of one size; returns their row of the table."""
    rounds = Rounds(decoder, pool, batch, tree)
    launches = (rounds.launch_early, rounds.launch_asked, rounds.launch_late)
    times_ms = [round_ms(rounds, launch, NUM_ROUNDS, 5) for launch in launches]
    # The last trees that were prepared fit no more, so slots sit out what is replayed.
    floor_ms = replayed_ms(rounds, NUM_ROUNDS, 5)
    gaps = " | ".join(f"{1e3 * (each - floor_ms):.0f}" for each in times_ms)
    return f"| {name}, batch {batch} | {times_ms[0]:.2f} | {floor_ms:.2f} | {gaps} |"


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    # Triton is not installed where there is no CUDA.
    from tests.bench.gpu import LLAMA_8B
    from tests.bench.random_weights import random_decoder

    device = torch.device("cuda")
    decoder = random_decoder(LLAMA_8B, device)
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), 1 + 8 * MAX_CONTEXT // PAGE_SIZE, device)
    for cache in (*pool.keys, *pool.values):
        cache.normal_()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| rounds | ms, launched early | replayed alone | gap us, early | asked | late |")
    print("|---|---|---|---|---|---|", flush=True)
    for batch in (1, 8):
        for name, tree in TREES.items():
            print(line(decoder, pool, name, batch, tree), flush=True)


if __name__ == "__main__":
    main()
