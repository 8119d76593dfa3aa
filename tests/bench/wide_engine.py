"""Plain and speculative decoding by the whole engine, with a draft hosted in its process."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.engine import DraftEngine
from services.draft.events import WorkerIdentity
from services.embedded import EmbeddedDraft
from services.target.adaptive_config import DEFAULT_CONFIG
from services.target.drafts.attachment import AttachmentTerms
from services.target.engine import Engine
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.rounds.round_shapes import RoundSource, capacities
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.step_loop import StepLoop
from services.target.verifier import VerificationMode, Verifier
from shared.inbox import Inbox
from shared.kv.leases import KvLeases
from shared.runtime.round_head import OwnHead
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.bench.engine_times import Answers, StepTimes

MAX_SEQUENCES = 64
_TERMS = AttachmentTerms(VerificationMode.COUPLED, 256, MAX_SEQUENCES, 0.25)
_LONGEST_RUN_S = 120.0
_WARM_UP_TOKENS = 16
_NUM_PASSES = 3


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a mode drafts.

    Attributes:
        build: returns a new drafter.
        floor_ms: of the draft's part of a round of so many sequences with trees of a shape.
        is_on_device: rounds run on the device, with the head that the drafter lends.
        is_chosen: a controller chooses between such rounds of several shapes and plain steps.
    """

    algorithm: str
    shape: TreeShape
    build: Callable[[], Drafter]
    floor_ms: Callable[[int, TreeShape], float]
    is_on_device: bool = False
    is_chosen: bool = False

    @property
    def warms_itself(self) -> bool:
        """Whether the first pass is the warm-up. Every engine captures the graphs of its rounds
        anew, so another one's would help little; but what a controller tries must be warm."""
        return self.is_on_device and not self.is_chosen

    def passes(self, num_tokens: int) -> tuple[int, ...]:
        """Returns how many tokens the prompts are answered with, each time; the last one is
        measured, so that a controller has tried what there is."""
        if self.warms_itself:
            return (min(_WARM_UP_TOKENS, num_tokens), num_tokens)
        return (num_tokens,) * (_NUM_PASSES if self.is_chosen else 1)


@dataclass(frozen=True, slots=True)
class Run:
    """One mode at one batch size.

    Attributes:
        tokens_per_s: while no sequence has a prompt to compute and none has ended.
        tokens_a_round: committed, bonus included.
        round_ms: mean time from one round of a sequence to its next.
        num_steps: by the shape of the trees of a round on the device; None is any other step.
    """

    tokens_per_s: float
    tokens_a_round: float
    round_ms: float
    answers: tuple[tuple[int, ...], ...]
    num_steps: Mapping[TreeShape | None, int]


def serve(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    drafting: Drafting | None = None,
) -> Run:
    """Answers all prompts at once, greedily, by a new engine over `runner`."""
    return _figures(*_served(runner, prompts, num_tokens, drafting))


def warm_up(runner: ModelRunner, prompts: Sequence[Sequence[int]], drafting: Drafting) -> None:
    """Compiles kernels and captures graphs: a target does not wait that long for a draft."""
    _served(runner, prompts, _WARM_UP_TOKENS, drafting)
    # All drafters of a mode share their graphs. Without a thread nothing is captured when idle.
    drafter = drafting.build()
    while drafter.prepare(drafting.shape, None) or runner.prepare_next():
        pass


def _served(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    drafting: Drafting | None,
) -> tuple[StepTimes, Answers]:
    times = StepTimes()
    engine = _engine(runner, times, drafting)
    draft = None if drafting is None else _attached(engine, drafting, len(prompts))
    counts = (num_tokens,) if drafting is None else drafting.passes(num_tokens)
    passes = [Answers(len(prompts)) for _ in counts]

    def submit(place: int) -> None:
        for key, prompt in enumerate(prompts):
            engine.submit(_request(prompt, counts[place]), passes[place], key)

    for place in range(1, len(passes)):
        passes[place - 1].when_ended = functools.partial(submit, place)
    submit(0)
    engine.start()
    has_ended = passes[-1].all_ended.wait(_LONGEST_RUN_S)
    engine.stop()
    if draft is not None:
        draft.stop()
    assert has_ended, "the engine does not come to an end"
    return times, passes[-1]


def _figures(times: StepTimes, answers: Answers) -> Run:
    steps = times.shared_steps(answers.first_ended_s)
    # The first ones capture graphs.
    steps = steps[len(steps) // 4 :]
    assert steps, "no step had all sequences"
    num_sequences = answers.num_requests
    committed = sum(report.num_committed for _, report in steps)
    num_rounds = sum(report.num_rounds for _, report in steps)
    span_s = sum(duration_s for duration_s, _ in steps)
    return Run(
        tokens_per_s=committed / span_s,
        tokens_a_round=committed / num_rounds,
        round_ms=1e3 * span_s * num_sequences / num_rounds,
        answers=tuple(tuple(answers.token_ids[key]) for key in range(num_sequences)),
        num_steps=Counter(report.round_shape for _, report in steps),
    )


def _engine(runner: ModelRunner, times: StepTimes, drafting: Drafting | None) -> Engine:
    leases = KvLeases(runner.pool.num_pages, runner.page_size, prefix_cache=False)
    config = runner.decoder.config
    loop = StepLoop(
        runner=runner,
        leases=leases,
        scheduler=Scheduler(leases, SchedulerLimits(MAX_SEQUENCES, 256, 2048)),
        verifier=Verifier(VerificationMode.COUPLED, generator=torch.Generator()),
        limits=ModelLimits(
            config.vocab_size,
            config.max_position_embeddings,
            leases.num_pages * runner.page_size,
            frozenset(),
        ),
        clock=time.perf_counter,
        on_step=times.observe,
        adaptive=DEFAULT_CONFIG if drafting and drafting.is_chosen else None,
    )
    return Engine(loop, Inbox(1024))


def _attached(target: Engine, drafting: Drafting, num_sequences: int) -> DraftEngine:
    """Starts a draft and attaches it to the engine."""
    drafter = drafting.build()
    # Before the draft's thread has the drafter.
    rounds = _lent(drafter, drafting, target, num_sequences) if drafting.is_on_device else None
    draft = DraftEngine(
        drafter,
        drafting.shape,
        chunk_tokens=2048,
        max_sequences=MAX_SEQUENCES,
        is_pinned=True,
    )
    draft.start()
    worker = WorkerIdentity(
        worker_id="bench",
        model_id=drafting.algorithm,
        algorithm=drafting.algorithm,
        tokenizer_sha256=None,
        max_sequences=MAX_SEQUENCES,
        max_context_tokens=drafter.limits.max_context_tokens,
        feature_spec=drafter.limits.feature_spec,
    )
    EmbeddedDraft(target, draft, worker, _TERMS, rounds).attach("")
    return draft


def _lent(drafter: Drafter, drafting: Drafting, target: Engine, num_sequences: int) -> RoundSource:
    """Returns what rounds on the device need of the drafter."""
    assert isinstance(drafter, EagleDrafter), "only EAGLE heads are lent"
    shared, shape = drafter.share_head(), drafting.shape
    assert shared is not None, "its head can be lent"
    trees = {shape: num_sequences}
    if drafting.is_chosen:
        trees = capacities(DEFAULT_CONFIG.round_shapes(shape), num_sequences)
    return RoundSource(
        head=OwnHead(shared.model),
        pages=shared.pages,
        trees=trees,
        max_context_tokens=min(shared.max_context_tokens, target.limits.max_sequence_tokens),
        is_pinned=not drafting.is_chosen,
    )


def _request(prompt: Sequence[int], num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        "bench",
        tuple(prompt),
        SamplingParams(temperature=0.0),
        StopParams(num_tokens),
        arrival_s=0.0,
    )
