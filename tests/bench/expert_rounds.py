"""Speculative rounds of a mixture of experts with its own next-token layer, beside plain steps.

All weights are random, so acceptance is simulated: each level of a chain is accepted at the rate
with which chains of 3 commit 2.5 tokens a round. Sequences differ in their tokens, so that their
rows hit experts as those of requests do.
"""

from __future__ import annotations

import itertools
import random
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.rounds.policy import LanePolicy
from services.target.rounds.round_shapes import StepTimer, capacities
from services.target.throughput import CostTable
from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models.heads.head import DraftHead
from shared.runtime.round_head import OwnHead
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import RoundSampling
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_model import HeadModel
from shared.tokens import SamplingParams, ShapeOrPlain, TreeShape
from tests.bench.aims import shape_name
from tests.bench.expert_floors import StepFloor, expected_hits, level_bytes, tensors_of
from tests.bench.expert_shapes import ExpertShape
from tests.bench.simulated_rounds import (
    NUM_ROUNDS,
    SimulatedAcceptance,
    SimulatedVerification,
    place_all,
    round_ms,
    spread_counts,
)

CHAIN = TreeShape(3, 1, 4)
BATCHES = (1, 8, 32, 64)
TOKENS_A_ROUND = 2.5
ROOM_TOKENS = (NUM_ROUNDS + 4) * CHAIN.num_draft_tokens
"""Tokens of a sequence behind its context: those of a timed run, and of rounds under way."""
POLICY_S = 20.0
"""Time for which the policy chooses steps."""
NUM_RUNS = 3
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """What the target's policy makes of measured times.

    Attributes:
        shares: of the time that each choice takes; None are plain steps.
    """

    tokens_per_s: float
    shares: Mapping[ShapeOrPlain, float]

    @property
    def most(self) -> ShapeOrPlain:
        """The choice that takes most of the time."""
        return max(self.shares, key=lambda choice: self.shares[choice])

    def __str__(self) -> str:
        shown = sorted(self.shares.items(), key=lambda each: -each[1])
        return ", ".join(f"{_name(choice)} {share:.0%}" for choice, share in shown)


def _name(choice: ShapeOrPlain) -> str:
    return "plain" if choice is None else shape_name(choice)


def run_policy(
    costs: CostTable,
    seconds: Mapping[ShapeOrPlain, float],
    counts: Sequence[Sequence[int]],
    batch: int,
) -> PolicyRun:
    """Returns what the policy chooses for greedy lanes, with its probes.

    Args:
        costs: measured at start-up.
        seconds: what each choice takes in fact.
        counts: `[R][S]`, nodes accepted of chains of any depth, round after round.
    """
    shapes = tuple(choice for choice in seconds if choice is not None)
    policy, times = LanePolicy(shapes, costs), defaultdict[ShapeOrPlain, float](float)
    now_s, num_tokens = 0.0, 0
    before: ShapeOrPlain = shapes[0]
    for accepted in itertools.cycle(counts):
        if now_s >= POLICY_S:
            break
        choice = policy.choose(batch, 0, shapes, now_s)
        took_s = seconds[choice]
        policy.observe_time(choice, batch, took_s)
        num_tokens += batch
        if choice is not None:
            own = [min(count, choice.num_steps) for count in accepted[:batch]]
            policy.observe(choice, is_greedy=True, accepted=own)
            num_tokens += sum(own)
            # All sequences have to be given lanes first.
            took_s += took_s if before is None else 0.0
        now_s += took_s
        times[choice] += took_s
        before = choice
    return PolicyRun(num_tokens / now_s, {choice: own / now_s for choice, own in times.items()})


@dataclass(frozen=True, slots=True)
class RoundsLine:
    """Rounds of one batch beside its plain steps; times are in ms.

    Attributes:
        forward_ms: the target's forward over the trees, part of `round_ms`.
        draft_floor_ms: of all passes of the next-token layer.
        num_tokens: that a round commits, of all sequences together.
        head_ms: the lm_head's floor, part of each forward of the target.
        depth: how many times as many layers the published model has.
    """

    batch: int
    plain_ms: float
    plain: StepFloor
    round_ms: float
    forward_ms: float
    forward: StepFloor
    draft_floor_ms: float
    num_tokens: float
    head_ms: float
    depth: float
    policy_run: PolicyRun

    @property
    def plain_rate(self) -> float:
        """Tokens/s."""
        return 1e3 * self.batch / self.plain_ms

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return 1e3 * self.num_tokens / self.round_ms

    @property
    def over_plain(self) -> float:
        return self.rate / self.plain_rate

    @property
    def at_full_depth(self) -> float:
        """`over_plain` with all layers of the published model, as each takes the same time."""
        plain_ms, forward_ms = map(self._full_ms, (self.plain_ms, self.forward_ms))
        full_ms = self.round_ms - self.forward_ms + forward_ms
        return self.num_tokens / full_ms * plain_ms / self.batch

    @property
    def at_the_floor(self) -> float:
        """`over_plain` if every forward took the time to read its weights and cache."""
        floor_ms = self.forward.ms + self.draft_floor_ms
        return self.num_tokens / floor_ms * self.plain.ms / self.batch

    @property
    def chosen_over_plain(self) -> float:
        return self.policy_run.tokens_per_s / self.plain_rate

    def _full_ms(self, time_ms: float) -> float:
        return self.head_ms + (time_ms - self.head_ms) * self.depth

    def __str__(self) -> str:
        cells = (
            f"{self.batch}",
            f"{self.plain_ms:.2f}",
            f"{self.plain.hits:.1f} of {self.plain.expected_hits:.1f}",
            f"{self.round_ms:.2f}",
            f"{self.forward_ms:.2f}",
            f"{self.forward.hits:.1f} of {self.forward.expected_hits:.1f}",
            f"{self.num_tokens / self.batch:.2f}",
            f"{self.plain_rate:,.0f}",
            f"{self.rate:,.0f}",
            f"{self.over_plain:.2f} ×",
            f"{self.at_full_depth:.2f} ×",
            f"{self.at_the_floor:.2f} ×",
            f"{self.chosen_over_plain:.2f} ×",
            f"{self.policy_run}",
        )
        return f"| {' | '.join(cells)} |"


HEADER = (
    "batch",
    "plain ms",
    "experts hit, of expected",
    "round ms",
    "target's forward ms",
    "experts hit, of expected",
    "tokens a round",
    "plain tokens/s",
    "rounds tokens/s",
    "over plain",
    "with all layers",
    "at the floors",
    "chosen over plain",
    "time by choice",
)


class ExpertRounds:
    """Measures rounds of one target with its own next-token layer.

    Args:
        runner: of the target, with pages for `ROOM_TOKENS` behind each context.
        clock: returns the ms of work, see `device_ms`.
        floor: returns what a step costs at least.
        bandwidth: bytes a ms.
    """

    def __init__(
        self,
        shape: ExpertShape,
        runner: ModelRunner,
        head: DraftHead,
        clock: Callable[..., float],
        floor: Callable[[ForwardBatch, Sequence[SequenceRows]], StepFloor],
        bandwidth: float,
    ) -> None:
        self._shape, self._runner, self._head = shape, runner, head
        self._clock, self._floor, self._bandwidth = clock, floor, bandwidth
        self._counts = spread_counts(TOKENS_A_ROUND - 1.0, CHAIN.num_steps, max(BATCHES))
        pool, device = runner.pool, runner.device
        self._num_pages = pages_each(shape.context, pool.page_size)
        vocab_size = runner.decoder.config.vocab_size
        self._acceptance = SimulatedAcceptance(self._counts, vocab_size, device)
        self._head_pool = KvPool(head.kv_layout(pool.page_size), pool.num_pages, device)
        self._head_pool.storage.normal_()
        size = (pool.num_leased_pages * pool.page_size, head.feature_spec.width)
        shapes = DEFAULT_CONFIG.round_shapes(CHAIN)
        self._rounds = RoundRunner(
            decoder=runner.decoder,
            pool=pool,
            head=OwnHead(
                HeadModel(head, self._head_pool), SimulatedVerification.over(self._acceptance)
            ),
            feature_rows=torch.empty(size, dtype=head.dtype, device=device).normal_(),
            shapes=capacities(shapes, max(BATCHES)),
            # As far as the graphs of plain steps reach.
            max_context_tokens=shape.context + max(ROOM_TOKENS, shape.context - 4 * pool.page_size),
        )
        self._shapes = shapes

    def lines(self) -> Iterator[RoundsLine | str]:
        """Yields the rows of the table; in place of one that fails, why."""
        for batch in BATCHES:
            try:
                yield self._line(batch)
            except Exception:
                yield f"| {batch} | failed: {traceback.format_exc(limit=-3)!r} |"

    def _line(self, batch: int) -> RoundsLine:
        rng, size = random.Random(batch), self._runner.decoder.config.vocab_size
        roots = [[rng.randrange(size)] for _ in range(batch)]
        plain_ms, plain = self._forward(roots)
        times = {shape: self._round_ms(shape, batch) for shape in self._shapes}
        time_ms, num_tokens = times[CHAIN]
        forward_ms, forward = self._verification(batch)
        seconds: dict[ShapeOrPlain, float] = {shape: own[0] / 1e3 for shape, own in times.items()}
        seconds[None] = plain_ms / 1e3
        decoder = self._runner.decoder
        head_bytes = sum(tensor.nbytes for tensor in tensors_of(decoder.lm_head))
        return RoundsLine(
            batch=batch,
            plain_ms=plain_ms,
            plain=plain,
            round_ms=time_ms,
            forward_ms=forward_ms,
            forward=forward,
            draft_floor_ms=self._draft_floor_ms(batch),
            num_tokens=num_tokens,
            head_ms=head_bytes / self._bandwidth,
            depth=self._shape.layers_most / len(decoder.layers),
            policy_run=run_policy(self._costs(batch), seconds, self._counts, batch),
        )

    def _forward(self, tokens: Sequence[Sequence[int]]) -> tuple[float, StepFloor]:
        """Returns the ms and the floor of a step with the given tokens of each sequence."""
        batch, sequences = self._batch(tokens)
        runner = self._runner
        return self._ms(lambda: runner.run(batch).logits.argmax(dim=-1)), self._floor(
            batch, sequences
        )

    def _verification(self, batch: int) -> tuple[float, StepFloor]:
        """Returns the ms and the floor of the target's forward in rounds of `CHAIN`."""
        self._turn_to(CHAIN, batch)
        self._rounds.launch()
        self._rounds.result()
        trees = self._acceptance.trees
        assert trees is not None
        tokens, runner = trees.token_ids[:batch].clamp_min(0).tolist(), self._runner
        rows, sequences = self._batch(tokens)
        work: Callable[[], object] = lambda: runner.run(rows)  # noqa: E731
        if runner.device.type == "cuda":
            # A graph of its own, of exactly these sequences.
            work = self._rounds.captured(batch, RoundSampling.GREEDY).forward.replay
        return self._ms(work), self._floor(rows, sequences)

    def _ms(self, work: Callable[[], object]) -> float:
        return self._clock(work, repeats=7, inner=2)

    def _round_ms(self, shape: TreeShape, batch: int) -> tuple[float, float]:
        """See `round_ms`; contexts are those of the plain steps, and a few tokens longer."""
        self._turn_to(shape, batch)
        self._rounds.capture(batch, RoundSampling.GREEDY)
        return round_ms(self._rounds, lambda: self._place(batch), NUM_RUNS)

    def _turn_to(self, shape: TreeShape, batch: int) -> None:
        self._rounds.remove(self._rounds.sequence_ids)
        self._rounds.turn_to(shape)
        self._place(batch)

    def _place(self, batch: int) -> None:
        context = self._shape.context
        place_all(self._rounds, batch, _GREEDY, context=context, num_pages=self._num_pages)

    def _costs(self, batch: int) -> CostTable:
        """Measures what the target measures at start-up."""
        timer, rounds = StepTimer(self._runner), self._rounds
        rounds.remove(rounds.sequence_ids)
        costs = CostTable({batch: timer.plain_s(batch)})
        for shape in self._shapes:
            rounds.turn_to(shape)
            costs.rounds[shape] = {batch: timer.round_s(rounds, shape, batch)}
        return costs

    def _draft_floor_ms(self, batch: int) -> float:
        """Returns the time to read weights and cache in all passes of the next-token layer."""
        experts = self._runner.decoder.config.experts
        assert experts is not None
        routing, cache = experts.routing, self._head_pool.layout.token_size_bytes
        size = 0.0
        # The first pass reads the tokens of the round before.
        for rows_each in (TOKENS_A_ROUND, *[1.0] * (CHAIN.num_steps - 1)):
            num_rows = batch * rows_each
            hits = expected_hits(routing.num_experts, routing.num_chosen, num_rows)
            size += level_bytes(self._head, hits) + batch * self._shape.context * cache
        return size / self._bandwidth

    def _batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardBatch, list[SequenceRows]]:
        """Returns rows behind the context of each sequence."""
        sequences = [
            SequenceRows.causal(
                own,
                self._shape.context,
                range(1 + number * self._num_pages, 1 + (number + 1) * self._num_pages),
                range(len(own)),
            )
            for number, own in enumerate(tokens)
        ]
        page_size, device = self._runner.page_size, self._runner.device
        return build_batch(sequences, page_size=page_size, device=device), sequences


def pages_each(context: int, page_size: int) -> int:
    """Returns the pages of a sequence in rounds."""
    return -(-(context + ROOM_TOKENS) // page_size)
