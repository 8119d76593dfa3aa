"""A target and its drafts by the clock of a cost model: the real engine without any computation.

Everything that decides is real (step loop, scheduler, verifier, policy). Forward passes and drafts
take the time that a `Split` gives, and every answer is known beforehand. So minutes of serving take
seconds, and results do not depend on the machine.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from services.draft.rounds import Preparation
from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.attachment import Attachment, DraftIdentity, DraftMessage, DraftTimeout
from services.target.drafts.draft_policy import ALWAYS
from services.target.engine import Engine
from services.target.requests.request import Event, Finished, GenerationRequest
from shared.candidate_columns import CandidateColumns
from shared.generation import Delta
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.tokens import (
    Candidate,
    Condition,
    DraftReport,
    SamplingParams,
    StopParams,
    TokenTree,
    TreeRequest,
    TreeShape,
)
from tests.helpers.engines import VOCAB_SIZE, build_engine, request
from tests.helpers.model_time import ModelClock

PROMPT_TOKENS = 40
CHAIN = TreeShape(3, 1, 4)
MOST_BEHIND = 64
"""Committed tokens of a paused sequence that its draft leaves unread before it reads them."""

_NUM_DRAWS = 65_521
_INSTANT_S = 1e-9


def answer(position: int) -> int:
    """Returns the token that every text has at a position."""
    return (7 * position + 3) % VOCAB_SIZE


def _unchanged(now_s: float) -> float:
    return 1.0


def _in_time(now_s: float) -> float:
    return 0.0


def _in_no_time(steps: int, num_outcomes: int) -> float:
    return 0.0


def _alone(now_s: float) -> int:
    return 1


@dataclass(frozen=True)
class Kind:
    """A draft: how fast and how right it is.

    Attributes:
        tree_s: seconds to compute a batch of trees, by depth and number of sequences.
        right: probability that a level is right if the level before is, by time and stream.
        hop_s: seconds of a message from target to draft, or back.
        prompt_s: seconds to read a prompt, or the tokens committed in a pause.
        num_cold: batches at the start that take `cold` times as long.
        shape: shape of its trees while the target requests no other.
        slower: factor on all durations, by time.
        budget: outcomes it prepares for, unless the target requests fewer.
        ahead_s: seconds to prepare, by depth and the outcomes of all sequences.
        hit_rate: share of verdicts that are among the prepared outcomes.
        capture_s: seconds to capture the graphs for trees of one shape and roughly one batch
            size, for drafting after a verdict or ahead of one.
        late_s: seconds that candidates are late, by time; infinite while the draft is silent.
    """

    tree_s: Callable[[int, int], float]
    right: Callable[[float, int], float]
    name: str = "draft"
    hop_s: float = 0.0002
    prompt_s: float = 0.0
    num_cold: int = 0
    cold: float = 10.0
    shape: TreeShape = CHAIN
    slower: Callable[[float], float] = _unchanged
    budget: int = 0
    ahead_s: Callable[[int, int], float] = _in_no_time
    hit_rate: float = 0.0
    capture_s: float = 0.0
    late_s: Callable[[float], float] = _in_time


@dataclass(frozen=True)
class Split:
    """Hardware, text and load.

    Attributes:
        step_s: seconds of a forward pass by its rows.
        num_streams: concurrent requests, by time.
        num_tokens: mean tokens of an answer.
        num_cold: first forward passes per power of two of rows that take `cold` times as long.
        noise: standard deviation of a duration's logarithm.
        beside: factor on forward passes and trees while the other side computes, too: target and
            draft share cores.
        attended_s: extra seconds of a step for each sequence at a draft: the host keeps its record
            and sends its verdicts, with or without trees.
        num_prompt_tokens: prompt tokens of a request.
    """

    step_s: Callable[[int], float]
    drafts: tuple[Kind, ...]
    num_streams: Callable[[float], int] = _alone
    num_tokens: int = 96
    num_cold: int = 0
    cold: float = 5.0
    noise: float = 0.0
    beside: float = 1.0
    attended_s: float = 0.0
    num_prompt_tokens: int = PROMPT_TOKENS


class _Noise:
    def __init__(self, seed: int, sigma: float) -> None:
        self._source, self._sigma = random.Random(seed), sigma

    def __call__(self) -> float:
        return math.exp(self._source.gauss(0.0, self._sigma)) if self._sigma else 1.0


class KnownRunner(ModelRunner):
    """Returns logits of the known answers; nothing is computed."""

    def __init__(self, decoder: Decoder, pool: KvPool, clock: ModelClock, world: World) -> None:
        super().__init__(decoder, pool)
        self._world = world
        self._table = torch.stack(
            [
                torch.nn.functional.one_hot(torch.tensor(answer(position + 1)), VOCAB_SIZE)
                for position in range(VOCAB_SIZE)
            ]
        ).float()

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        self._world.compute(len(batch.token_ids))
        positions = batch.positions.index_select(0, batch.logit_rows)
        # Answers repeat after VOCAB_SIZE tokens.
        logits = self._table[positions % VOCAB_SIZE]
        return RunnerOutput(logits, torch.empty(len(batch.token_ids), 0), ())


@dataclass
class World:
    """Spends the durations that a split gives, with its noise."""

    split: Split
    clock: ModelClock
    seed: int
    drafts: list[ModelledDraft] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise = _Noise(self.seed, self.split.noise)
        self._seen: dict[int, int] = {}

    def compute(self, rows: int) -> None:
        """Spends the time of a forward pass, in which target and drafts slow each other down."""
        beside, left_s = self.split.beside, self._step_s(rows)
        while left_s > _INSTANT_S:
            busy = [draft for draft in self.drafts if draft.free_s > self.clock.now_s]
            slowdown = beside if busy else 1.0
            until_due_s = max(self.clock.next_due_s - self.clock.now_s, _INSTANT_S)
            slice_s = min(left_s * slowdown, until_due_s)
            left_s -= slice_s / slowdown
            for draft in busy:
                draft.delay(slice_s * (1.0 - 1.0 / beside))
            self.clock.advance(slice_s)

    def _step_s(self, rows: int) -> float:
        duration_s = self.split.step_s(rows) * self._noise()
        width = rows.bit_length()
        self._seen[width] = self._seen.get(width, 0) + 1
        if self._seen[width] <= self.split.num_cold:
            duration_s *= self.split.cold
        return duration_s + self.split.attended_s * sum(map(len, self.drafts))


@dataclass
class ModelledDraft:
    """Follows tree requests; computes one batch after another, in the times of its kind."""

    engine: Engine
    clock: ModelClock
    kind: Kind
    seed: int
    free_s: float = 0.0
    is_pinned: bool = False
    shapes: list[tuple[float, TreeShape]] = field(default_factory=list)
    sequence_ids: list[int] = field(default_factory=list)
    _lengths: dict[int, int] = field(default_factory=dict)
    _num_read: dict[int, int] = field(default_factory=dict)
    _lag_s: float = 0.0
    budgets: list[int] = field(default_factory=list)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _pushed: dict[int, dict[Condition, Candidate]] = field(default_factory=dict)
    _tree_requests: dict[int, TreeRequest] = field(default_factory=dict)
    _due: dict[int, tuple[int, TreeRequest]] = field(default_factory=dict)
    _unread: list[int] = field(default_factory=list)
    _in_flight: list[Candidate] = field(default_factory=list)
    _captured: set[tuple[str, TreeShape, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        source = random.Random(self.seed)
        self._preparation = Preparation(self, self.announce, lambda: self.free_s)
        self._draws = [source.random() for _ in range(_NUM_DRAWS)]

    def __len__(self) -> int:
        """Returns the number of its sequences."""
        return len(self._lengths)

    def delay(self, delay_s: float) -> None:
        """Prolongs the current computation."""
        self.free_s += delay_s
        self._lag_s += delay_s

    def _at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedules an action for the end of the current computation, delays included."""
        lag_s = self._lag_s

        def act() -> None:
            late_s = self._lag_s - lag_s
            if late_s > _INSTANT_S:
                self._at(time_s + late_s, action)
            else:
                action()

        self.clock.at(time_s, act)

    def attach(self) -> None:
        kind = self.kind
        identity = DraftIdentity(kind.name, kind.name, "m", kind.name, 64, 0.0, kind.shape)
        self.engine.attach(Attachment(identity, self, DraftTimeout(0.25)))

    def close(self) -> None:
        raise AssertionError("the target gave the draft up")

    def send(self, message: DraftMessage) -> bool:
        self.clock.at(self.clock.now_s + self.kind.hop_s, lambda: self._receive(message))
        return True

    def _receive(self, message: DraftMessage) -> None:
        for opened in message.opened:
            self._lengths[opened.sequence_id] = len(opened.token_ids)
            self._unread.append(opened.sequence_id)
            self._due[opened.sequence_id] = opened.round, opened.tree_request
            self._tree_requests[opened.sequence_id] = opened.tree_request
            self._num_read[opened.sequence_id] = len(opened.token_ids)
        for verdict in message.verdicts:
            self._lengths[verdict.sequence_id] = verdict.committed_token_count
            self._tree_requests[verdict.sequence_id] = verdict.tree_request
            self._fall_behind(verdict.sequence_id, is_paused=verdict.tree_request.is_paused)
            ready = self._pushed.pop(verdict.sequence_id, {}).get(verdict.condition)
            if ready is None:
                self._due[verdict.sequence_id] = verdict.round + 1, verdict.tree_request
            else:
                self._in_flight.append(replace(ready, round=verdict.round + 1))
        for sequence_id in message.closed:
            del self._lengths[sequence_id], self._num_read[sequence_id]
            self._due.pop(sequence_id, None)
            if sequence_id in self._unread:
                self._unread.remove(sequence_id)
        if self.clock.now_s >= self.free_s:
            self._work()

    def _fall_behind(self, sequence_id: int, *, is_paused: bool) -> None:
        """Queues reading of the tokens committed in a pause, once they are many. A sequence that
        is not paused reads them for its next tree."""
        length = self._lengths[sequence_id]
        if not is_paused:
            self._num_read[sequence_id] = length
        elif length - self._num_read[sequence_id] > MOST_BEHIND:
            self._num_read[sequence_id] = length
            if sequence_id not in self._unread:
                self._unread.append(sequence_id)

    def _work(self) -> None:
        """Computes all trees that are due, then reads one prompt."""
        ready = {
            sequence_id: (round_, tree_request)
            for sequence_id, (round_, tree_request) in self._due.items()
            if not tree_request.is_paused and sequence_id not in self._unread
        }
        self.free_s = self.clock.now_s
        self._preparation.begin_step()
        by_shape: dict[TreeShape, list[tuple[int, int]]] = {}
        for sequence_id, (round_, _) in ready.items():
            del self._due[sequence_id]
            shape = self._shape_for(sequence_id)
            by_shape.setdefault(shape, []).append((sequence_id, round_))
        for shape, rounds in by_shape.items():
            self._draft(shape, rounds)
        self._prepare()
        if self._unread:
            self._unread.pop(0)
            self.free_s += self.kind.prompt_s
        if self._preparation.is_due(is_idle=not len(self)):
            self._preparation.advance()
        if self.free_s > self.clock.now_s:
            self._at(self.free_s, self._work)

    def _draft(self, shape: TreeShape, rounds: Sequence[tuple[int, int]]) -> None:
        duration_s = self.kind.tree_s(shape.num_steps, len(rounds))
        duration_s *= self.kind.slower(self.clock.now_s)
        if len(self.shapes) < self.kind.num_cold:
            duration_s *= self.kind.cold
        self._preparation.ensure(shape, len(self))
        self.free_s += duration_s
        self.shapes.append((self.clock.now_s, shape))
        batch = [
            Candidate(
                sequence_id,
                round_,
                self._lengths[sequence_id],
                self._tree(sequence_id, self._lengths[sequence_id], shape),
                candidate_id=next(self._ids),
                shape=shape,
            )
            for sequence_id, round_ in rounds
        ]
        self._in_flight += batch
        self.sequence_ids += [sequence_id for sequence_id, _ in rounds]
        report = self._report(duration_s)
        self._at(self.free_s + self.kind.hop_s, lambda: self._offer(batch, report))

    def _prepare(self) -> None:
        """Prepares trees for the verdicts on the trees that the target verifies now."""
        batch: list[Candidate] = []
        by_shape: Counter[TreeShape] = Counter()
        for candidate in self._in_flight:
            length = self._lengths.get(candidate.sequence_id)
            wanted = self._tree_requests[candidate.sequence_id].num_outcomes
            budget = self.kind.budget if wanted is None else min(wanted, self.kind.budget)
            if length is not None and self.kind.budget:
                self.budgets.append(budget)
            if length is None or not budget or not candidate.tree.token_ids:
                continue
            by_shape[self._shape_for(candidate.sequence_id)] += budget
            batch.append(self._foreseen(candidate, length))
        self._in_flight.clear()
        if batch:
            for shape, num_outcomes in by_shape.items():
                self.free_s += self.kind.ahead_s(shape.num_steps, num_outcomes)
            report = self._report(None)
            self._at(self.free_s + self.kind.hop_s, lambda: self._offer(batch, report))

    def _foreseen(self, candidate: Candidate, length: int) -> Candidate:
        """Returns the tree for the verdict to come, or for a wrong one if it is not foreseen."""
        tokens = candidate.tree.token_ids
        num_right = 0
        while num_right < len(tokens) and tokens[num_right] == answer(length + num_right):
            num_right += 1
        bonus, end = answer(length + num_right), length + num_right + 1
        place = (candidate.sequence_id * 31 + length) % _NUM_DRAWS
        if self._draws[place] >= self.kind.hit_rate:
            bonus = (bonus + 1) % VOCAB_SIZE
        node = num_right - 1 if num_right else None
        condition = Condition(node, bonus, candidate.candidate_id)
        shape = self._shape_for(candidate.sequence_id)
        tree = self._tree(candidate.sequence_id, end, shape)
        pushed = replace(
            candidate, tree=tree, condition=condition, candidate_id=next(self._ids),
            committed_token_count=length, shape=shape,
        )  # fmt: skip
        self._pushed[candidate.sequence_id] = {condition: pushed}
        return pushed

    def _shape_for(self, sequence_id: int) -> TreeShape:
        requested = None if self.is_pinned else self._tree_requests[sequence_id].shape
        if requested is None:
            return self.kind.shape
        return self._preparation.shape_for(requested, self.kind.shape, len(self))

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        """See `Preparation`."""
        return not self._missing_graphs(shape, num_sequences)

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        """See `Preparation`."""
        assert num_sequences is not None, "it is never idle"
        missing = self._missing_graphs(shape, num_sequences)
        if missing:
            self._captured.add(missing[0])
            self.free_s += self.kind.capture_s
        return bool(missing)

    def _missing_graphs(
        self, shape: TreeShape, num_sequences: int
    ) -> list[tuple[str, TreeShape, int]]:
        if not self.kind.capture_s:
            return []
        sizes = {"trees": num_sequences, "ahead": num_sequences * self.kind.budget}
        keys = [(name, shape, 1 << (size - 1).bit_length()) for name, size in sizes.items() if size]
        return [key for key in keys if not any(_serves(own, key) for own in self._captured)]

    def announce(self) -> None:
        """Sends a report of the draft's present state."""
        report = self._report(None)
        self.clock.at(self.free_s + self.kind.hop_s, lambda: self._offer([], report))

    def _offer(self, batch: Sequence[Candidate], report: DraftReport) -> None:
        late_s = self.kind.late_s(self.clock.now_s)
        if not math.isinf(late_s):
            columns = CandidateColumns.of(batch)
            offer = partial(self.engine.offer, self.kind.name, columns, report)
            self.clock.at(self.clock.now_s + late_s, offer) if late_s else offer()

    def _report(self, draft_s: float | None) -> DraftReport:
        pinned_shape = self.kind.shape if self.is_pinned else None
        return DraftReport(draft_s, pinned_shape, self._preparation.is_warming)

    def _tree(self, sequence_id: int, length: int, shape: TreeShape) -> TokenTree:
        right = self.kind.right(self.clock.now_s, sequence_id)
        tokens = []
        for position in range(length, length + shape.num_steps):
            is_right = self._draws[(sequence_id * 7919 + position) % _NUM_DRAWS] < right
            tokens.append((answer(position) + (0 if is_right else 5)) % VOCAB_SIZE)
        parents = (None, *range(len(tokens) - 1))
        return TokenTree(tuple(tokens), parents, (math.log(0.7),) * len(tokens))


def _serves(captured: tuple[str, TreeShape, int], wanted: tuple[str, TreeShape, int]) -> bool:
    """Returns whether a captured graph serves a batch: it is not smaller, nor much too large."""
    size = wanted[2]
    return captured[:2] == wanted[:2] and size <= captured[2] <= max(8, 4 * size)


@dataclass
class Served:
    """The result of serving.

    Attributes:
        tokens: time and number of tokens of each delta, in order.
    """

    tokens: list[tuple[float, int]]
    drafts: list[ModelledDraft]

    def rate(self, start_s: float, end_s: float) -> float:
        """Returns the tokens a second between two times."""
        count = sum(count for at_s, count in self.tokens if start_s <= at_s < end_s)
        return count / (end_s - start_s)


class Sink:
    """Records when tokens arrive.

    Attributes:
        num_open: open requests; the submitter counts them up.
    """

    def __init__(self, clock: ModelClock) -> None:
        self._clock = clock
        self.tokens: list[tuple[float, int]] = []
        self.num_open = 0

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        for _, event in events:
            if isinstance(event, Delta):
                self.tokens.append((self._clock.now_s, len(event.token_ids)))
            self.num_open -= isinstance(event, Finished)

    def __hash__(self) -> int:
        return id(self)


def serve(
    decoder: Decoder,
    split: Split,
    duration_s: float,
    adaptive: AdaptiveConfig | None,
    *,
    is_plain: bool = False,
    pinned: TreeShape | None = None,
    seed: int = 0,
) -> Served:
    """Serves streams of requests for `duration_s`.

    Args:
        is_plain: serve without drafts.
        pinned: shape of every tree; None lets the policy choose.
    """
    clock = ModelClock()
    world = World(split, clock, seed)
    engine = build_engine(
        decoder,
        clock=clock,
        adaptive=adaptive,
        make_runner=lambda decoder, pool: KnownRunner(decoder, pool, clock, world),
        num_pages=4000,
        max_running=64,
        max_step_rows=2048,
        max_context_tokens=4096,
        prefix_cache=False,
        # With a pinned shape the target always wants trees, even if plain steps are faster.
        always_up_to=0 if pinned is None else ALWAYS,
    )
    drafts: list[ModelledDraft] = []
    for index, kind in enumerate(() if is_plain else split.drafts):
        chosen = kind if pinned is None else replace(kind, shape=pinned)
        draft = ModelledDraft(engine, clock, chosen, seed + index, is_pinned=pinned is not None)
        drafts.append(draft)
        draft.attach()
    world.drafts = drafts
    sink, keys = Sink(clock), itertools.count()
    while clock.now_s < duration_s:
        while sink.num_open < split.num_streams(clock.now_s):
            sink.num_open += 1
            key = next(keys)
            # Of different lengths, so that requests do not begin and end together.
            num_tokens = split.num_tokens // 2 + 37 * key % split.num_tokens
            engine.submit(plain_request(num_tokens, split.num_prompt_tokens), sink, key)
        if not engine.step():
            clock.idle(engine)
    return Served(sink.tokens, drafts)


def plain_request(num_tokens: int, num_prompt_tokens: int = PROMPT_TOKENS) -> GenerationRequest:
    """Returns a greedy request for `num_tokens` tokens."""
    prompt = [answer(position) for position in range(num_prompt_tokens)]
    return request(prompt, SamplingParams(temperature=0.0), StopParams(num_tokens, ignore_eos=True))
