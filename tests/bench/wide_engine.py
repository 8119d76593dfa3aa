"""Plain and speculative decoding by the whole engine, with a draft hosted in its process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from services.draft.drafters.drafter import Drafter
from services.draft.drafters.eagle import EagleDrafter
from services.draft.engine import DraftEngine
from services.draft.worker import WorkerIdentity
from services.embedded import EmbeddedDraft
from services.target.drafts.attachment_terms import AttachmentTerms
from services.target.engine import Engine
from services.target.inbox import Inbox
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.rounds.device_rounds import RoundSource
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.verifier import VerificationMode, Verifier
from shared.kv.leases import KvLeases
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.bench.engine_times import Answers, StepTimes

MAX_SEQUENCES = 64
_TERMS = AttachmentTerms(VerificationMode.COUPLED, 256, MAX_SEQUENCES, 0.25)
_LONGEST_RUN_S = 120.0


@dataclass(frozen=True, slots=True)
class Drafting:
    """How a mode drafts.

    Attributes:
        build: returns a new drafter.
        floor_ms: of the draft's part of a round of so many sequences.
        is_on_device: rounds run on the device, with the head that the drafter lends.
    """

    algorithm: str
    shape: TreeShape
    build: Callable[[], Drafter]
    floor_ms: Callable[[int], float]
    is_on_device: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One mode at one batch size.

    Attributes:
        tokens_per_s: over the steps in which every sequence takes part.
        tokens_a_round: committed, bonus included.
        step_ms: median time between two commits.
    """

    tokens_per_s: float
    tokens_a_round: float
    step_ms: float
    answers: tuple[tuple[int, ...], ...]


def serve(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    drafting: Drafting | None = None,
) -> Run:
    """Answers all prompts at once, greedily, by a new engine over `runner`."""
    times, answers = StepTimes(), Answers(len(prompts))
    engine = _engine(runner, times)
    draft = None if drafting is None else _attached(engine, drafting)
    for key, prompt in enumerate(prompts):
        engine.submit(_request(prompt, num_tokens), answers, key)
    engine.start()
    has_ended = answers.all_ended.wait(_LONGEST_RUN_S)
    engine.stop()
    if draft is not None:
        draft.stop()
    assert has_ended, "the engine does not come to an end"
    return _figures(times, answers, len(prompts))


def _figures(times: StepTimes, answers: Answers, num_sequences: int) -> Run:
    steps = [
        (at_s - before_s, report)
        for (before_s, _), (at_s, report) in zip(times.reports, times.reports[1:], strict=False)
        if report.num_rounds == num_sequences
    ]
    # The first ones compute what is left of prompts and capture graphs.
    steps = steps[len(steps) // 4 :]
    assert steps, "no step had all sequences"
    committed = sum(report.num_committed for _, report in steps)
    return Run(
        tokens_per_s=committed / sum(duration_s for duration_s, _ in steps),
        tokens_a_round=committed / (num_sequences * len(steps)),
        step_ms=1e3 * statistics.median(duration_s for duration_s, _ in steps),
        answers=tuple(tuple(answers.token_ids[key]) for key in range(num_sequences)),
    )


def _engine(runner: ModelRunner, times: StepTimes) -> Engine:
    leases = KvLeases(runner.pool.num_pages, runner.page_size, prefix_cache=False)
    config = runner.decoder.config
    return Engine(
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
        inbox=Inbox(1024),
        clock=time.perf_counter,
        on_step=times.observe,
    )


def _attached(target: Engine, drafting: Drafting) -> DraftEngine:
    """Starts a draft and attaches it to the engine."""
    drafter = drafting.build()
    # Before the draft's thread has the drafter.
    rounds = _lent(drafter, drafting.shape, target) if drafting.is_on_device else None
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


def _lent(drafter: Drafter, shape: TreeShape, target: Engine) -> RoundSource:
    """Returns what rounds on the device need of the drafter."""
    assert isinstance(drafter, EagleDrafter), "only EAGLE heads are lent"
    loan = drafter.lend()
    return RoundSource(
        head=loan.head,
        pool=loan.pool,
        pages=loan.pages,
        tree=shape,
        max_context_tokens=min(loan.max_context_tokens, target.limits.max_sequence_tokens),
        max_sequences=MAX_SEQUENCES,
    )


def _request(prompt: Sequence[int], num_tokens: int) -> GenerationRequest:
    return GenerationRequest(
        "bench",
        tuple(prompt),
        SamplingParams(temperature=0.0),
        StopParams(num_tokens),
        arrival_s=0.0,
    )
