"""Rounds with one head: the most sequences for each tree shape, and the measured costs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from services.target.throughput import CostTable
from shared.kv.batch import empty_decode_batch
from shared.runtime.graphs import round_graph_bytes, step_memory_bytes
from shared.runtime.kernel_compiler import compile_kernels
from shared.runtime.memory import Shortage, free_memory_bytes, in_words
from shared.runtime.outcome_chains import MAX_LANES_AHEAD
from shared.runtime.round_graphs import ROUND_SIZES
from shared.runtime.round_head import HeadPlace
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import RoundSampling
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape

logger = logging.getLogger(__name__)

MAX_ROWS = 2048
"""Most rows that a round verifies: 256 trees of 8."""


@dataclass(frozen=True, slots=True, eq=False)
class RoundSource:
    """A draft's head for rounds on the device, with its pages and the shapes of its trees.

    Attributes:
        pages: the head's KV pages that only rounds use.
        trees: shapes to choose from, with the most sequences of a round for each; the draft's own
            shape first.
        max_context_tokens: longest context of the head.
        is_pinned: an operator fixed the shape, so that the only choice is whether trees grow ahead.
        place: number of the head among those that the target has rounds for.
    """

    head: HeadPlace
    pages: Sequence[int]
    trees: Mapping[TreeShape, int]
    max_context_tokens: int
    is_pinned: bool = False
    place: int = 0


def capacities(shapes: Iterable[TreeShape], max_sequences: int) -> dict[TreeShape, int]:
    """Returns, for each shape, the most sequences of a round with such trees."""
    return {
        shape: min(max_sequences, max(MAX_ROWS // shape.num_draft_tokens, 1)) for shape in shapes
    }


_NUM_TIMED = 3
_NUM_ROUNDS_AHEAD = 4
"""Rounds timed back to back where trees grow ahead, because the draft works on behind each."""
# On a CPU there are no graphs, one a size, to measure, and a few sizes are enough.
_TIMED_SIZES = (1, 4, 16)


@dataclass(frozen=True, slots=True)
class StepTimer:
    """Measures step times at start-up. For the engine thread."""

    runner: ModelRunner

    def sizes(self, max_sequences: int) -> list[int]:
        """Returns the numbers of sequences for which steps are measured."""
        sizes = ROUND_SIZES if self._is_cuda else _TIMED_SIZES
        return sorted({min(size, max_sequences) for size in sizes}) if max_sequences else []

    def plain(self, max_sequences: int) -> dict[int, float]:
        """Returns the seconds of a plain step by number of sequences."""
        return {count: self.plain_s(count) for count in self.sizes(max_sequences)}

    def plain_s(self, count: int) -> float:
        """Returns the seconds of a plain step of different sequences."""
        runner = self.runner
        batch = empty_decode_batch(count, runner.page_size, runner.device)
        empty_s = self.seconds(lambda: runner.run(batch).logits.argmax(dim=-1))
        return empty_s + self._routing.extra_s(count, 1)

    def round_s(self, rounds: RoundRunner, shape: TreeShape, count: int) -> float:
        """Returns the seconds of a round of different sequences.

        Args:
            rounds: without sequences, turned to `shape`.
        """
        num_rounds = _NUM_ROUNDS_AHEAD if shape.is_ahead else 1

        def run() -> None:
            for _ in range(num_rounds):
                rounds.run_empty(count, RoundSampling.DRAWN, is_ahead=shape.is_ahead)

        empty_s = self.seconds(run) / num_rounds
        return empty_s + self._routing.extra_s(count, shape.num_draft_tokens)

    def seconds(self, step: Callable[[], object]) -> float:
        """Returns the shortest time of a few runs of a step on the device, after a first one that
        is not timed."""
        shortest_s = math.inf
        step()
        for _ in range(_NUM_TIMED):
            self._wait()
            began_s = time.perf_counter()
            step()
            self._wait()
            shortest_s = min(shortest_s, time.perf_counter() - began_s)
        return shortest_s

    @property
    def _routing(self) -> RoutingCosts:
        return RoutingCosts(self.runner, self.seconds)

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self.runner.device)

    @property
    def _is_cuda(self) -> bool:
        return self.runner.device.type == "cuda"


# A prime, by which consecutive numbers are spread over a vocabulary.
_SPREAD = 7919


@dataclass(frozen=True, slots=True)
class RoutingCosts:
    """Measures what routing adds to steps of a mixture-of-experts model. Owned by the engine
    thread.

    Steps are measured at start-up with empty sequences. These are all alike and hit the experts of
    a single sequence. The sequences of requests differ, hit more experts, and read more weights.

    Attributes:
        timed: returns the seconds of a step.
    """

    runner: ModelRunner
    timed: Callable[[Callable[[], object]], float]

    def extra_s(self, num_sequences: int, rows_each: int) -> float:
        """Returns the seconds by which a step of different sequences takes longer than one of
        equal sequences; 0 for a dense model.

        Args:
            rows_each: rows of a sequence. Their tokens differ in both measurements.
        """
        if self.runner.decoder.config.experts is None or num_sequences == 1:
            return 0.0
        num_rows = num_sequences * rows_each
        rows = torch.arange(num_rows, device=self.runner.device)
        different_s, alike_s = (self._step_s(tokens) for tokens in (rows, rows % rows_each))
        return max(0.0, different_s - alike_s)

    def _step_s(self, numbers: torch.Tensor) -> float:
        """Returns the seconds of a plain step with tokens derived from numbers; equal numbers give
        equal tokens."""
        runner = self.runner
        batch = empty_decode_batch(len(numbers), runner.page_size, runner.device)
        tokens = numbers * _SPREAD % runner.decoder.config.vocab_size
        varied = replace(batch, token_ids=tokens)
        return self.timed(lambda: runner.run(varied))


CAPTURED_KINDS = (RoundSampling.GREEDY, RoundSampling.DRAWN)
"""Kinds of sampling for which rounds are prepared at start-up."""


def round_sizes(max_sequences: int) -> list[int]:
    """Returns the numbers of sequences for which rounds are prepared, ascending."""
    return sorted({min(size, max_sequences) for size in ROUND_SIZES})


class RoundShapes:
    """The tree shapes of rounds with one head: graphs, capacities and costs of each. Owned by the
    engine thread.

    Args:
        feature_rows: `[num_slots, W]`, a row for each slot of the target's pool; None for a draft
            that reads no features.

    Attributes:
        head: the draft's head.
        is_pinned: an operator fixed the shape.
        runner: the runner of the rounds.
        shape: the requested shape of the trees now.
    """

    def __init__(
        self, source: RoundSource, runner: ModelRunner, feature_rows: torch.Tensor | None
    ) -> None:
        self._target, self._device, self._cache = runner, runner.device, runner.cache
        self.head, self.is_pinned = source.head, source.is_pinned
        self._is_here = not source.place  # the head is in this process
        self._costs: CostTable | None = None
        self._capacities = dict(source.trees)
        self.runner = RoundRunner(
            decoder=runner.decoder,
            pool=runner.pool,
            head=source.head,
            feature_rows=feature_rows,
            shapes=self._capacities,
            max_context_tokens=source.max_context_tokens,
            leader=runner.leader,
            place=source.place,
        )
        self.shape = next(iter(source.trees))
        self._capture_all()
        # The same graphs serve trees that grow ahead.
        for shape in tuple(self._capacities):
            if self.runner.shape_of(shape).num_outcomes:
                ahead = replace(shape, is_ahead=True)
                self._capacities[ahead] = min(self._capacities[shape], MAX_LANES_AHEAD)

    @property
    def max_sequences(self) -> int:
        """Most sequences of a round of any shape."""
        return max(self._capacities.values())

    @property
    def capacity(self) -> int:
        """Most sequences of a round of the current shape."""
        return self._capacities[self.shape]

    @property
    def max_tree_rows(self) -> int:
        """Most rows of a tree of any shape, the root included."""
        return max(1 + shape.max_node_count for shape in self._capacities)

    @property
    def shapes(self) -> tuple[TreeShape, ...]:
        """All shapes, the draft's own first."""
        return tuple(self._capacities)

    def shapes_for(self, num_sequences: int) -> tuple[TreeShape, ...]:
        """Returns the shapes with room for so many sequences, the draft's own first."""
        return tuple(
            shape for shape, capacity in self._capacities.items() if capacity >= num_sequences
        )

    def turn_to(self, shape: TreeShape) -> None:
        """Sets the shape of the next rounds. Requires `keeps_lanes` if sequences have lanes."""
        self.shape, self.runner.is_ahead = shape, shape.is_ahead
        self.runner.turn_to(replace(shape, is_ahead=False))

    def keeps_lanes(self, shape: TreeShape) -> bool:
        """Whether all sequences keep their slots when rounds turn to a shape."""
        is_within = self.runner.num_slots <= self._capacities[shape]
        return is_within and self.runner.takes(replace(shape, is_ahead=False))

    def limit(self, num_sequences: int, shortage: Shortage) -> None:
        """Lowers the capacity of the current shape to fewer than `num_sequences`, for which there
        is no memory."""
        self._capacities[self.shape] = num_sequences - 1
        logger.warning(
            "no memory for rounds of %d sequences with trees of %s; from now on such rounds have "
            "%d at most: %s",
            *(num_sequences, _name(self.shape), num_sequences - 1, self._cache.advice(shortage)),
        )

    def costs(self) -> CostTable:
        """Returns the measured times on this device of empty rounds, by shape and size, and of the
        target's plain steps."""
        if self._costs is None:
            self._costs = self._measure()
            if self.runner.is_late:  # for example, because a kernel was compiled
                self.head.forgive()
                self._costs = self._measure()
        return self._costs

    def forget_costs(self) -> None:
        """Has the times measured anew, because the head's model is another one."""
        self._costs = None

    def _measure(self) -> CostTable:
        timer = StepTimer(self._target)
        table = CostTable(timer.plain(self.max_sequences))
        for shape in self._turning():
            table.rounds[shape] = {
                count: timer.round_s(self.runner, shape, count)
                for count in timer.sizes(self._capacities[shape])
            }
        return table

    def _turning(self) -> Iterator[TreeShape]:
        """Turns to one shape after the other, and then back to the current one."""
        current = self.shape
        for shape in tuple(self._capacities):
            self.turn_to(shape)
            yield shape
        self.turn_to(current)

    def _capture_all(self) -> None:
        """Captures all graphs that rounds may need, so that none is captured under traffic. The
        largest graphs of all shapes come first, because the others share their memory.

        Raises:
            RuntimeError: there is no memory for rounds of any shape and size.
        """
        current, free_bytes = self.shape, self._free_bytes()
        sizes = [
            (shape, count)
            for shape, most in self._capacities.items()
            for count in round_sizes(most)
        ]
        sizes.sort(key=self._graph_bytes, reverse=True)
        # The followers of a leader would have to capture at the same time.
        if self._is_here and self._target.leader is None:
            compile_kernels(self._launches(sizes), self._device)
        shortages: dict[TreeShape, RuntimeError] = {}
        is_largest = True
        for shape, count in sizes:
            self.turn_to(shape)
            shortage = self._capture(shape, count, is_largest=is_largest)
            if shortage is None:
                is_largest = False
            else:
                shortages[shape] = shortage
        self.turn_to(current)
        for shape, shortage in shortages.items():
            logger.warning(
                "no memory for rounds of more than %d sequences with trees of %s and for planned "
                "steps beside them: %s",
                *(self._capacities[shape], _name(shape)),
                self._cache.advice(Shortage.of(shortage)),
            )
        if shortages and not self.max_sequences:
            raise shortages[current]
        self.runner.capture_prompts()
        if self._is_cuda:
            taken_bytes = free_bytes - self._free_bytes()
            logger.info("CUDA graphs of rounds take %s", in_words(taken_bytes))

    def _launches(self, sizes: Sequence[tuple[TreeShape, int]]) -> Iterator[Callable[[], object]]:
        """Yields a function for each shape and size that launches the kernels of such a round."""
        for shape, count in sizes:
            self.turn_to(shape)
            for kind in CAPTURED_KINDS:
                yield self.runner.empty_round(count, kind)

    def _capture(
        self, shape: TreeShape, num_sequences: int, *, is_largest: bool
    ) -> RuntimeError | None:
        """Captures the graphs of one size of the current shape. Where these do not fit the memory,
        lowers the shape's capacity to the next smaller size, and returns the error.

        Args:
            is_largest: no graphs are captured yet whose memory these could share.
        """
        try:
            if is_largest:
                self._check_room(shape, num_sequences)
            for kind in CAPTURED_KINDS:
                self.runner.capture(num_sequences, kind)
        except RuntimeError as error:
            shortage = Shortage.of(error)
            if self.runner.is_waited_for:
                logger.critical(
                    "no memory for rounds of the group: %s", self._cache.advice(shortage)
                )
                raise
            sizes = round_sizes(self._capacities[shape])
            self._capacities[shape] = max((s for s in sizes if s < num_sequences), default=0)
            torch.cuda.empty_cache()
            return error.with_traceback(None)
        return None

    def _check_room(self, shape: TreeShape, num_sequences: int) -> None:
        """Checks that a planned step has enough memory beside the graphs of one size.

        Raises:
            OutOfMemoryError: it has not.
        """
        if not self._is_cuda:
            return
        free_bytes, graph_bytes = self._free_bytes(), self._graph_bytes((shape, num_sequences))
        required_bytes = graph_bytes + step_memory_bytes(self._target.decoder)
        if free_bytes < required_bytes:
            message = (
                f"Tried to allocate {required_bytes} bytes. of which {free_bytes} bytes is free"
            )
            raise torch.OutOfMemoryError(message)

    def _graph_bytes(self, size: tuple[TreeShape, int]) -> int:
        """Estimates the memory of the graphs of a shape and a number of sequences."""
        shape, num_sequences = size
        sizes, decoder = self.runner.shape_of(shape), self._target.decoder
        num_rows = num_sequences * sizes.num_tree_rows
        return round_graph_bytes(decoder, num_rows, num_sequences, sizes.max_kv_length)

    def _free_bytes(self) -> int:
        return free_memory_bytes(self._device) if self._is_cuda else 0

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"


def _name(shape: TreeShape) -> str:
    return f"{shape.num_steps} steps, {shape.topk} wide, {shape.num_draft_tokens} rows"
