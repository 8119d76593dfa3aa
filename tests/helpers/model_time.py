"""A real small engine whose forward passes and drafts take the time that a cost model gives."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage, DraftTimeout
from services.target.engine import Engine
from services.target.requests.request import Finished, GenerationRequest
from shared.candidate_columns import CandidateColumns
from shared.generation import Failed
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.tokens import NO_REPORT, Candidate, DraftReport, TokenTree, TreeRequest, TreeShape
from tests.helpers.engines import VOCAB_SIZE, Collector, build_engine

IDLE_S = 0.0005
"""How long an engine sleeps that nothing would wake."""
SHORTEST_S = 1e-6
"""The shortest sleep, so that the clock advances."""

StepTime = Callable[[int], float]
DraftTime = Callable[[int, int], float]


@dataclass
class ModelClock:
    """Advances only when time is spent; runs scheduled actions at their times."""

    now_s: float = 0.0
    _due: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def __call__(self) -> float:
        return self.now_s

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedules an action."""
        heapq.heappush(self._due, (time_s, next(self._numbers), action))

    @property
    def next_due_s(self) -> float:
        """Time of the next action; infinite without one."""
        return self._due[0][0] if self._due else math.inf

    def advance(self, duration_s: float) -> None:
        """Spends time."""
        end_s = self.now_s + duration_s
        while self._due and self._due[0][0] <= end_s:
            time_s, _, action = heapq.heappop(self._due)
            self.now_s = max(self.now_s, time_s)
            action()
        self.now_s = end_s

    def idle(self, engine: Engine) -> None:
        """Spends the time that an engine without work sleeps: until the next action, which may
        wake it, or as long as it would by itself; `IDLE_S` if neither ends its sleep."""
        timeout_s = engine._loop.idle_timeout_s()
        until_due_s = max(self.next_due_s - self.now_s, 0.0)
        if timeout_s is not None:
            self.advance(min(until_due_s, max(timeout_s, SHORTEST_S)))
        else:
            self.advance(until_due_s if self._due else IDLE_S)


class TimedRunner(ModelRunner):
    """Spends `step_s` of a forward pass's rows on each pass."""

    def __init__(self, decoder: Decoder, pool: KvPool, clock: ModelClock, step_s: StepTime) -> None:
        super().__init__(decoder, pool)
        self._clock, self._step_s = clock, step_s

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        self._clock.advance(self._step_s(len(batch.token_ids)))
        return super().run(batch, capture_layers=capture_layers)


@dataclass
class TimedDraft:
    """A draft that knows the answers and gets each level right with some probability.

    It follows tree requests and computes one batch after another, each in `draft_s` of its depth
    and number of sequences.

    Attributes:
        right: probability that a level is right, by the committed text.
        report: sent with candidates; its time is filled in.
        shapes, sizes: tree shape and number of sequences of each computed batch.
        sequence_ids: the sequence of each tree.
    """

    engine: Engine
    clock: ModelClock
    answers: Sequence[Sequence[int]]
    right: Callable[[list[int]], float]
    draft_s: DraftTime
    name: str = "timed"
    algorithm: str = "SCRIPTED"
    shape: TreeShape = field(default_factory=lambda: TreeShape(3, 1, 4))
    max_sequences: int = 64
    seed: int = 0
    report: DraftReport = NO_REPORT
    shapes: list[TreeShape] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    is_closed: bool = False
    _random: random.Random = field(init=False)
    _committed: dict[int, list[int]] = field(default_factory=dict)
    _free_s: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def attach(self) -> None:
        identity = DraftIdentity(
            self.name, self.name, "m", self.algorithm, self.max_sequences, 0.0, self.shape
        )
        self.engine.attach(Attachment(identity, self, DraftTimeout(0.5)))

    def send(self, message: DraftMessage) -> bool:
        wanted: list[tuple[int, int, TreeRequest]] = []
        for sequence_id in message.closed:
            del self._committed[sequence_id]
        for opened in message.opened:
            self._committed[opened.sequence_id] = list(opened.token_ids)
            wanted.append((opened.sequence_id, opened.round, opened.tree_request))
        for verdict in message.verdicts:
            if verdict.sequence_id in message.closed:
                continue
            self._committed[verdict.sequence_id].extend(verdict.committed_token_ids)
            wanted.append((verdict.sequence_id, verdict.round + 1, verdict.tree_request))
        by_shape: dict[TreeShape, list[tuple[int, int]]] = {}
        for sequence_id, round_, tree_request in wanted:
            if not tree_request.is_paused:
                shape = tree_request.shape or self.shape
                by_shape.setdefault(shape, []).append((sequence_id, round_))
        for shape, rounds in by_shape.items():
            self._draft(shape, rounds)
        return True

    @property
    def num_batches(self) -> int:
        return len(self.shapes)

    def close(self) -> None:
        self.is_closed = True

    def _draft(self, shape: TreeShape, rounds: Sequence[tuple[int, int]]) -> None:
        duration_s = self.draft_s(shape.num_steps, len(rounds))
        self._free_s = max(self._free_s, self.clock.now_s) + duration_s
        self.shapes.append(shape)
        self.sizes.append(len(rounds))
        self.sequence_ids += [sequence_id for sequence_id, _ in rounds]
        batch = [
            Candidate(number, round_, len(self._committed[number]), self._tree(number, shape))
            for number, round_ in rounds
        ]
        columns, report = CandidateColumns.of(batch), replace(self.report, draft_s=duration_s)
        self.clock.at(self._free_s, lambda: self.engine.offer(self.name, columns, report))

    def _tree(self, sequence_id: int, shape: TreeShape) -> TokenTree:
        tokens = self._committed[sequence_id]
        answer = next((a for a in self.answers if list(a[: len(tokens)]) == tokens), [])
        right = self.right(tokens)
        ids: list[int] = []
        parents: list[int | None] = []
        parent: int | None = None
        for token in answer[len(tokens) : len(tokens) + shape.num_steps]:
            wrong = (token + 1 + self._random.randrange(VOCAB_SIZE - 1)) % VOCAB_SIZE
            ids.append(token if self._random.random() < right else wrong)
            parents.append(parent)
            parent = len(ids) - 1
        return TokenTree(tuple(ids), tuple(parents))


@dataclass
class TimedRun:
    """The outputs of a run, and its duration by the model's clock."""

    collector: Collector
    duration_s: float


def timed_engine(
    decoder: Decoder,
    clock: ModelClock,
    step_s: StepTime,
    adaptive: AdaptiveConfig | None,
    **options: int,
) -> Engine:
    """Returns an engine whose forward passes take `step_s`."""
    return build_engine(
        decoder,
        clock=clock,
        adaptive=adaptive,
        make_runner=lambda decoder, pool: TimedRunner(decoder, pool, clock, step_s),
        **options,  # type: ignore[arg-type]
    )


def run_timed(
    engine: Engine,
    clock: ModelClock,
    requests: Sequence[GenerationRequest],
) -> TimedRun:
    """Runs requests side by side to their end."""
    collector = Collector()
    start_s = clock.now_s
    for key, request in enumerate(requests):
        engine.submit(request, collector, key)
    for step in itertools.count():
        assert step < 50_000, "the engine does not come to an end"
        if not engine.step():
            clock.idle(engine)
        ended = [
            key for key, events in collector.events.items()
            if isinstance(events[-1], Finished | Failed)
        ]  # fmt: skip
        if len(ended) == len(requests):
            break
    engine.check_idle()
    return TimedRun(collector, clock.now_s - start_s)
