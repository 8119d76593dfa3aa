"""A small real target engine that is stepped by hand, and drafts that follow a script."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from services.target.adaptive_config import AdaptiveConfig
from services.target.drafts.attachment import (
    Attachment,
    DraftIdentity,
    DraftMessage,
    DraftTimeout,
    FeatureRows,
)
from services.target.drafts.draft_policy import ALWAYS
from services.target.drafts.feature_store import FeatureSpec
from services.target.engine import Engine
from services.target.grammars.matcher import CompiledGrammar
from services.target.requests.request import Event, Finished, GenerationRequest, ModelLimits
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.step_loop import StepLoop
from services.target.step_report import StepReport
from services.target.verifier import VerificationMode, Verifier
from shared.candidate_columns import CandidateColumns
from shared.generation import Delta, Failed, PromptScored, PromptScoring
from shared.inbox import Inbox
from shared.kv.leases import KvLeases, PageGroup, PagePool
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.round_runner import RoundLimits
from shared.runtime.runner import ModelRunner
from shared.speculation.verify import EXACT, Thresholds
from shared.tokens import Candidate, SamplingParams, StopParams, TokenLogprobs, TokenTree
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.poisoned import POISON

CPU = torch.device("cpu")
PAGE_SIZE = 4
VOCAB_SIZE = 24


def tiny_decoder(
    folder: Path, device: torch.device = CPU, *, seed: int = 3, num_layers: int = 2
) -> Decoder:
    """Returns a random decoder with a small vocabulary, so that drafts also hit by chance.

    Another seed gives another model of the same shape.
    """
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=num_layers)
    write_checkpoint(folder, "llama", shape, seed=seed)
    return load_decoder(folder, dtype=torch.float32, device=device)


def recurrent_decoder(folder: Path, device: torch.device = CPU) -> Decoder:
    """Returns a random decoder of the same vocabulary that has layers with recurrent states."""
    write_checkpoint(folder, "qwen3_5", TinyShape(vocab_size=VOCAB_SIZE, overrides=DELTA))
    return load_decoder(folder, dtype=torch.float32, device=device)


@dataclass
class Clock:
    """Advances a second whenever it is read."""

    now_s: float = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class PoisonedPages(PagePool):
    """Overwrites released pages, so that reading one gives a visibly wrong answer."""

    def __init__(self, num_pages: int, pool: KvPool) -> None:
        super().__init__(range(1, num_pages))
        self._kv = pool

    def release(self, pages: Iterable[int]) -> None:
        freed = list(pages)
        super().release(freed)
        for page in freed:
            slots = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
            for cache in (*self._kv.keys, *self._kv.values):
                cache[slots].fill_(POISON)


def build_engine(
    decoder: Decoder,
    *,
    num_pages: int = 200,
    max_running: int = 8,
    max_step_rows: int = 64,
    prefix_cache: bool = True,
    mode: VerificationMode = VerificationMode.COUPLED,
    thresholds: Thresholds = EXACT,
    max_context_tokens: int = 200,
    eos_token_ids: frozenset[int] = frozenset(),
    on_step: Callable[[StepReport], None] = lambda report: None,
    graph_limits: GraphLimits | None = None,
    kv_dtype: torch.dtype | None = None,
    overlaps: bool = True,
    poisons_free_pages: bool = False,
    clock: Callable[[], float] | None = None,
    adaptive: AdaptiveConfig | None = None,
    make_runner: Callable[[Decoder, KvPool], ModelRunner] | None = None,
    selects: bool = False,
    always_up_to: int = ALWAYS,
) -> Engine:
    """Returns an engine over `decoder`, on its device, whose thread is not started.

    Args:
        poisons_free_pages: fills pages with large numbers when they are released.
        selects: whether the device selects among the trees that drafts push.
    """
    layout = decoder.kv_layout(PAGE_SIZE, kv_dtype)
    scales = kv_scales(decoder) if layout.is_e4m3 else None
    pool = KvPool(layout, num_pages, decoder.device, scales)
    graphs = None if graph_limits is None else ForwardGraphs(decoder, pool, graph_limits)
    leases = KvLeases(num_pages, PAGE_SIZE, prefix_cache=prefix_cache)
    if poisons_free_pages:
        [group] = leases._groups
        group.pages = PoisonedPages(num_pages, pool)
    return engine_over(
        ModelRunner(decoder, pool, graphs) if make_runner is None else make_runner(decoder, pool),
        leases,
        max_running=max_running,
        max_step_rows=max_step_rows,
        mode=mode,
        thresholds=thresholds,
        max_context_tokens=max_context_tokens,
        eos_token_ids=eos_token_ids,
        on_step=on_step,
        clock=clock,
        overlaps=overlaps,
        adaptive=adaptive,
        selects=selects,
        always_up_to=always_up_to,
    )


def leases_over(pool: KvPool, num_pages: Sequence[int] | None = None) -> KvLeases:
    """Returns leases of the pages of a pool and of the same pool on other ranks.

    Args:
        num_pages: usable pages of each rank, its padding page included; None takes all.
    """
    leases = KvLeases(pool.num_leased_pages, pool.page_size, num_groups=pool.num_ranks)
    if num_pages is not None:
        leases._groups = tuple(
            PageGroup(group.numbers[: count - 1])
            for group, count in zip(leases._groups, num_pages, strict=True)
        )
        leases.num_pages = sum(num_pages) - len(num_pages)  # without padding pages
    return leases


def engine_over(
    runner: ModelRunner,
    leases: KvLeases,
    *,
    max_running: int = 8,
    max_step_rows: int = 64,
    mode: VerificationMode = VerificationMode.COUPLED,
    thresholds: Thresholds = EXACT,
    max_context_tokens: int = 200,
    eos_token_ids: frozenset[int] = frozenset(),
    on_step: Callable[[StepReport], None] = lambda report: None,
    clock: Callable[[], float] | None = None,
    overlaps: bool = True,
    adaptive: AdaptiveConfig | None = None,
    selects: bool = False,
    always_up_to: int = ALWAYS,
) -> Engine:
    """Returns an engine over an existing runner; arguments as in `build_engine`."""
    num_pages = runner.pool.num_pages
    loop = StepLoop(
        runner=runner,
        leases=leases,
        scheduler=Scheduler(leases, SchedulerLimits(max_running, 64, max_step_rows)),
        verifier=Verifier(mode, generator=torch.Generator().manual_seed(0), thresholds=thresholds),
        limits=ModelLimits(
            VOCAB_SIZE, max_context_tokens, (num_pages - 1) * runner.page_size, eos_token_ids
        ),
        clock=clock or Clock(),
        on_step=on_step,
        overlaps=overlaps,
        adaptive=adaptive,
        selection=RoundLimits(max_running, max_context_tokens) if selects else None,
        always_up_to=always_up_to,
    )
    return Engine(loop, Inbox(10_000))


@dataclass
class Collector:
    """An `EventSink` that keeps everything."""

    events: dict[int, list[Event]] = field(default_factory=dict)

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        for key, event in events:
            self.events.setdefault(key, []).append(event)

    def token_ids(self, key: int) -> list[int]:
        return [t for event in self._deltas(key) for t in event.token_ids]

    def logprobs(self, key: int) -> list[TokenLogprobs]:
        return [token for event in self._deltas(key) for token in event.logprobs]

    def prompt_scores(self, key: int) -> dict[int, TokenLogprobs]:
        """Returns the log probabilities of prompt tokens by position. Checks that they come in
        order, without gaps, and before the first output token."""
        scores: dict[int, TokenLogprobs] = {}
        for place, event in enumerate(self.events[key]):
            if isinstance(event, PromptScored):
                assert not any(isinstance(past, Delta) for past in self.events[key][:place])
                assert not scores or event.start == max(scores) + 1
                scores |= dict(enumerate(event.logprobs, event.start))
        return scores

    def finished(self, key: int) -> Finished:
        [last] = [event for event in self.events[key] if isinstance(event, Finished)]
        return last

    def failure(self, key: int) -> Failed:
        [last] = [event for event in self.events[key] if isinstance(event, Failed)]
        return last

    def has_ended(self, key: int) -> bool:
        events = self.events.get(key)
        return bool(events) and isinstance(events[-1], Finished | Failed)

    def _deltas(self, key: int) -> list[Delta]:
        return [event for event in self.events[key] if isinstance(event, Delta)]

    def __hash__(self) -> int:
        return id(self)


def request(
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    stop: StopParams | None = None,
    *,
    top_logprobs: int | None = None,
    speculation_disabled: bool = False,
    grammar: CompiledGrammar | None = None,
    prompt_scoring: PromptScoring | None = None,
    priority: int = 0,
) -> GenerationRequest:
    """Returns a request with greedy sampling and 24 tokens unless told otherwise."""
    return GenerationRequest(
        "test",
        tuple(prompt),
        sampling or SamplingParams(temperature=0.0),
        stop or StopParams(24),
        arrival_s=0.0,
        top_logprobs=top_logprobs,
        speculation_disabled=speculation_disabled,
        grammar=grammar,
        prompt_scoring=prompt_scoring,
        priority=priority,
    )


def run(
    engine: Engine,
    requests: Sequence[GenerationRequest],
    *,
    each_step: Callable[[int], None] = lambda step: None,
) -> Collector:
    """Steps the engine until every request has ended, then checks its pages."""
    collector = Collector()
    for key, submitted in enumerate(requests):
        engine.submit(submitted, collector, key)
    for step in itertools.count():
        assert step < 100_000, "the engine does not come to an end"
        each_step(step)
        engine.step()
        if all(map(collector.has_ended, range(len(requests)))):
            break
    settle(engine)
    return collector


_plain_runs: dict[tuple[int, str], tuple[Decoder, Collector]] = {}
_MOST_PLAIN_RUNS = 64


def run_plain(decoder: Decoder, requests: Sequence[GenerationRequest]) -> Collector:
    """Returns the answers of plain decoding, by a new engine without a draft.

    Such an engine gives the same answers to the same requests, so answers are cached.
    """
    # The entry keeps the decoder alive, so that no other decoder gets its id.
    key = (id(decoder), repr(requests))
    if key not in _plain_runs:
        if len(_plain_runs) == _MOST_PLAIN_RUNS:
            _plain_runs.clear()
        _plain_runs[key] = (decoder, run(build_engine(decoder, max_running=32), requests))
    return _plain_runs[key][1]


def settle(engine: Engine) -> None:
    """Steps the engine until nothing runs, then checks its pages. While a round runs, steps do
    nothing until the round is about to end."""
    while engine.step() or engine.gauges_now().num_running:
        pass
    engine.check_idle()


Proposal = Callable[[list[int]], TokenTree]


@dataclass
class ScriptedDraft:
    """A draft in the engine's thread that proposes trees from a script.

    `disturb` may drop, repeat, delay or falsify its candidates.
    """

    engine: Engine
    propose: Proposal
    name: str = "scripted"
    algorithm: str = "SCRIPTED"
    disturb: Callable[[list[Candidate]], list[Candidate]] = lambda batch: batch
    committed: dict[int, list[int]] = field(default_factory=dict)
    is_closed: bool = False
    feature_spec: FeatureSpec | None = None
    features: dict[int, list[FeatureRows]] = field(default_factory=dict)
    wait_s: float = 0.5

    def attach(self) -> None:
        identity = DraftIdentity(self.name, self.name, "m", self.algorithm, 64, 0.0)
        self.engine.attach(Attachment(identity, self, DraftTimeout(self.wait_s), self.feature_spec))

    def detach(self) -> None:
        self.engine.detach(self.name)

    def send(self, message: DraftMessage) -> bool:
        candidates: list[Candidate] = []
        for rows in message.features:
            self.features.setdefault(rows.sequence_id, []).append(rows)
        for opened in message.opened:
            self.committed[opened.sequence_id] = list(opened.token_ids)
            candidates.append(self._candidate(opened.sequence_id, opened.round))
        for verdict in message.verdicts:
            tokens = self.committed[verdict.sequence_id]
            tokens.extend(verdict.committed_token_ids)
            assert len(tokens) == verdict.committed_token_count
            candidates.append(self._candidate(verdict.sequence_id, verdict.round + 1))
        for sequence_id in message.closed:
            del self.committed[sequence_id]
        batch = self.disturb([c for c in candidates if c.sequence_id in self.committed])
        if batch:
            self.engine.offer(self.name, CandidateColumns.of(batch))
        return True

    def close(self) -> None:
        self.is_closed = True

    def _candidate(self, sequence_id: int, round_: int) -> Candidate:
        tokens = self.committed[sequence_id]
        return Candidate(sequence_id, round_, len(tokens), self.propose(tokens))


def random_trees(seed: int, max_nodes: int = 8) -> Proposal:
    """Returns a script of random trees over the small vocabulary; some tokens hit."""
    source = random.Random(seed)

    def propose(tokens: list[int]) -> TokenTree:
        num_nodes = source.randint(0, max_nodes)
        parents = [source.choice([None, *range(node)]) for node in range(num_nodes)]
        ids = [source.randrange(VOCAB_SIZE) for _ in range(num_nodes)]
        return TokenTree(tuple(ids), tuple(parents))

    return propose


def oracle_trees(answers: Sequence[Sequence[int]], seed: int, quality: float) -> Proposal:
    """Returns a script that knows the right continuations and follows them `quality` of the time.

    Args:
        answers: complete sequences, prompt and output.
    """
    source = random.Random(seed)

    def propose(tokens: list[int]) -> TokenTree:
        answer = next((a for a in answers if list(a[: len(tokens)]) == tokens), None)
        ids: list[int] = []
        parents: list[int | None] = []
        parent: int | None = None
        for right in (answer or [])[len(tokens) : len(tokens) + 4]:
            wrong = source.randrange(VOCAB_SIZE)
            ids += [wrong, right if source.random() < quality else wrong]
            parents += [parent, parent]
            parent = len(ids) - 1
        return TokenTree(tuple(ids), tuple(parents))

    return propose


def shuffled_drops(seed: int) -> Callable[[list[Candidate]], list[Candidate]]:
    """Returns a disturbance that drops, repeats, reorders and delays candidates, and falsifies
    their rounds and lengths."""
    source = random.Random(seed)
    held: list[Candidate] = []

    def disturb(batch: list[Candidate]) -> list[Candidate]:
        out: list[Candidate] = []
        for candidate in batch + held:
            fate = source.random()
            if fate < 0.2:
                continue
            if fate < 0.4:
                out += [candidate, candidate]
            elif fate < 0.5:
                out.append(replace(candidate, round=candidate.round + 1))
            elif fate < 0.6:
                out.append(
                    replace(candidate, committed_token_count=candidate.committed_token_count - 1)
                )
            else:
                out.append(candidate)
        held[:] = [candidate for candidate in batch if source.random() < 0.3]
        source.shuffle(out)
        return out

    return disturb
