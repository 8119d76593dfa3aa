"""Every drafter on the same prompts: tokens a round, and what a round of drafting costs.

    python -m tests.bench.drafters --prompts question.jsonl [--temperatures 0 1] [--only EAGLE3 …]
        [--chains] [--rule rejection]

Target and draft run in one process, as with `--draft embedded`. For the accepted lengths and the
comparison with plain decoding, prompts are answered `--concurrency` at a time. Draft and
verification are timed with one request at a time, on the first `--timed` prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.draft.drafter_factory import build_drafter, outcome_budget, worker_identity
from services.draft.drafters.drafter import Drafter, Proposal
from services.draft.engine import DraftEngine, warm_up
from services.draft.sequence import DraftSequence
from services.draft.settings import DraftSettings
from services.draft.settings_problems import DEMO, DEMO_TARGET
from services.draft.training.documents import TextReader
from services.embedded import EmbeddedDraft
from services.target.__main__ import read_settings
from services.target.engine import Engine
from services.target.engine_factory import build_engine
from services.target.process import attachment_terms
from services.target.requests.request import Event, Finished, GenerationRequest
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from shared.generation import Failed
from shared.model_files import tokenizer_sha256
from shared.settings import load_settings
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.bench.engine_times import Answers
from tests.load.figures import table

CHAIN, TREE = TreeShape(5, 1, 6), TreeShape(5, 4, 16)
MAP_FLAGS = ("--speculative-token-map", str(DEMO / "token_map.json"))


RULES = {
    "coupled": (),
    "point-mass": ("--verification-mode", "point-mass"),
    "rejection": ("--speculative-use-rejection-sampling",),
    "block": ("--speculative-use-block-verification",),
}
"""Flags of the target, by the rule they ask for."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A drafter in the form in which it is measured.

    Attributes:
        shape: the tree of a round.
        flags: beside algorithm and shape.
    """

    name: str
    algorithm: str
    shape: TreeShape
    flags: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Flags of the draft."""
        shape = self.shape
        return [
            *("--speculative-algorithm", self.algorithm, *self.flags),
            *("--speculative-num-steps", str(shape.num_steps)),
            *("--speculative-eagle-topk", str(shape.topk)),
            *("--speculative-num-draft-tokens", str(shape.num_draft_tokens)),
        ]


def chosen(options: argparse.Namespace, target: TargetSettings) -> list[Entrant]:
    """Returns the entrants that are asked for, and can do what the target's rule needs."""
    draws = target.verification.draws_chains
    return [
        each
        for each in entrants()
        if (not options.only or each.algorithm in options.only)
        and (not (options.chains or draws) or each.shape.topk == 1)
        and not (draws and each.algorithm in ("NGRAM", "DFLASH"))
    ]


def entrants() -> list[Entrant]:
    """Returns every drafter of the demo, as a chain and as a tree."""
    found = []
    for shape in (CHAIN, TREE):
        found += [
            Entrant("NGRAM", "NGRAM", shape, ("--speculative-ngram-max-trie-depth", "18")),
            Entrant("STANDALONE", "STANDALONE", shape),
            Entrant("EAGLE", "EAGLE", shape),
            Entrant("EAGLE + map", "EAGLE", shape, MAP_FLAGS),
            Entrant("EAGLE3", "EAGLE3", shape),
            Entrant("MTP", "MTP", shape),
        ]
    # A block has its own depth; a tree over its marginals holds as many nodes as the other trees.
    found += [
        Entrant("DFLASH", "DFLASH", TreeShape(7, 1, 8)),
        Entrant("DFLASH", "DFLASH", TreeShape(7, 4, 16)),
    ]
    return found


@dataclass(frozen=True, slots=True)
class Figures:
    """One drafter at one temperature.

    Attributes:
        accepted_length: tokens a verified round, bonus included.
        num_identical: answers that equal the plain ones.
        draft_ms, step_ms: median of a proposal, and of a target's step, one request at a time.
        tokens_per_s: of that request.
    """

    accepted_length: float
    num_identical: int
    draft_ms: float
    step_ms: float
    tokens_per_s: float


@dataclass(eq=False, kw_only=True)
class CountedAnswers(Answers):
    """Counts the rounds that were verified, and frees a place for each answer that ends."""

    places: threading.Semaphore
    num_verified: int = 0
    num_accepted: int = 0

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        """Takes the events of a step."""
        for _, event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                self.num_verified += event.stats.num_verified_rounds
                self.num_accepted += event.stats.num_accepted
                self.places.release()
        super().deliver(events)


class Bench:
    """One target over its life, with one draft after another."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._steps: list[StepReport] = []
        arguments = ["--model-path", str(DEMO_TARGET), "--device", options.device]
        # The wait is for the draft however slow it is: the figures are per round.
        arguments += ["--candidate-wait-ms", "5000", "--candidate-wait-sequences=99"]
        arguments += ["--disable-radix-cache"]
        arguments += [*RULES[options.rule], "--draft", "embedded"]
        self.settings, _ = read_settings(arguments, {})
        self.prompts = TextReader(DEMO_TARGET).prompts(options.prompts)[: options.limit]

    def plain(self, temperature: float) -> tuple[dict[int, list[int]], Figures]:
        """Returns the answers without speculation, and their figures."""
        engine = self._engine()
        try:
            answers = self._answer(engine, self.prompts, temperature, self._options.concurrency)
            step_ms, tokens_per_s = self._timed(engine, temperature)
        finally:
            engine.stop()
        return answers.token_ids, Figures(1.0, len(answers.token_ids), 0.0, step_ms, tokens_per_s)

    def measure(self, entrant: Entrant, temperature: float, plain: dict[int, list[int]]) -> Figures:
        """Serves all prompts with one drafter."""
        engine = self._engine()
        with self._draft(engine, entrant) as draft_times:
            answers = self._answer(engine, self.prompts, temperature, self._options.concurrency)
            draft_times.clear()
            step_ms, tokens_per_s = self._timed(engine, temperature)
        return Figures(
            accepted_length=1 + answers.num_accepted / max(answers.num_verified, 1),
            num_identical=sum(plain[key] == ids for key, ids in answers.token_ids.items()),
            draft_ms=1e3 * statistics.median(draft_times) if draft_times else 0.0,
            step_ms=step_ms,
            tokens_per_s=tokens_per_s,
        )

    def _engine(self) -> Engine:
        engine = build_engine(self.settings, self._steps.append)
        engine.start()
        return engine

    @contextmanager
    def _draft(self, engine: Engine, entrant: Entrant) -> Iterator[list[float]]:
        """Attaches the drafter; yields the seconds that each of its proposals takes."""
        settings = _draft_settings(self.settings, entrant)
        drafter = build_drafter(settings)
        times = _time_proposals(drafter)
        draft = DraftEngine(
            drafter,
            settings.shape,
            chunk_tokens=settings.chunked_prefill_size,
            max_sequences=settings.max_running_requests,
            is_pinned=True,
            outcome_budget=outcome_budget(settings),
        )
        draft.start()
        warm_up(draft, drafter.limits.feature_spec)
        worker = worker_identity(settings, drafter.limits, worker_id="bench")
        link = EmbeddedDraft(engine, draft, worker, attachment_terms(self.settings))
        link.attach(tokenizer_sha256(DEMO_TARGET))
        try:
            yield times
        finally:
            engine.stop()
            link.stop()

    def _answer(
        self,
        engine: Engine,
        prompts: Sequence[Sequence[int]],
        temperature: float,
        concurrency: int,
    ) -> CountedAnswers:
        places = threading.Semaphore(concurrency)
        answers = CountedAnswers(len(prompts), places=places)
        for key, prompt in enumerate(prompts):
            places.acquire()
            engine.submit(self._request(key, prompt, temperature), answers, key)
        assert answers.all_ended.wait(600), "the engine does not come to an end"
        return answers

    def _request(self, key: int, prompt: Sequence[int], temperature: float) -> GenerationRequest:
        sampling = SamplingParams(temperature=temperature, seed=key)
        stop = StopParams(self._options.max_tokens)
        return GenerationRequest(str(key), tuple(prompt), sampling, stop, time.monotonic())

    def _timed(self, engine: Engine, temperature: float) -> tuple[float, float]:
        """Returns ms a decode step and tokens a second, one request at a time."""
        prompts = self.prompts[: self._options.timed]
        if not prompts:
            return 0.0, 0.0
        self._steps.clear()
        start_s = time.perf_counter()
        answers = self._answer(engine, prompts, temperature, 1)
        elapsed_s = time.perf_counter() - start_s
        num_tokens = sum(map(len, answers.token_ids.values()))
        decode = [each.duration_s for each in self._steps if each.num_rounds and each.num_rows < 32]
        return 1e3 * statistics.median(decode), num_tokens / elapsed_s


def _draft_settings(target: TargetSettings, entrant: Entrant) -> DraftSettings:
    arguments = [*entrant.arguments, "--device", target.device]
    arguments += ["--target-model-path", str(DEMO_TARGET)] * _is_head(entrant)
    return load_settings(DraftSettings, service="draft", arguments=arguments, env={})


def _is_head(entrant: Entrant) -> bool:
    return entrant.algorithm not in ("NGRAM", "STANDALONE")


def _time_proposals(drafter: Drafter) -> list[float]:
    """Makes the drafter note how long each proposal takes; returns the list it notes it in."""
    times: list[float] = []
    propose = drafter.propose

    def timed(sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        start_s = time.perf_counter()
        proposals = propose(sequences, shape)
        times.append(time.perf_counter() - start_s)
        return proposals

    drafter.propose = timed  # type: ignore[method-assign]
    return times


HEADER = (
    "drafter",
    "shape",
    "T",
    "tokens a round",
    "equal",
    "draft ms",
    "step ms",
    "tokens/s",
)


def _row(name: str, shape: str, temperature: float, figures: Figures, num: int) -> list[str]:
    return [
        *(name, shape, f"{temperature:g}", f"{figures.accepted_length:.2f}"),
        *(f"{figures.num_identical}/{num}", f"{figures.draft_ms:.1f}", f"{figures.step_ms:.1f}"),
        f"{figures.tokens_per_s:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl of prompts")
    parser.add_argument("--limit", type=int, help="prompts; all when left out")
    parser.add_argument("--timed", type=int, default=8, help="prompts that are timed")
    parser.add_argument("--only", nargs="+", default=[], help="algorithms")
    parser.add_argument("--chains", action="store_true", help="no trees with branches")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--rule",
        choices=RULES,
        default="coupled",
        help="of verification; only under the coupled one are answers equal to plain ones",
    )
    bench = Bench(options := parser.parse_args())
    rows: list[list[str]] = []
    for temperature in options.temperatures:
        plain, figures = bench.plain(temperature)
        rows.append(_row("plain", "-", temperature, figures, len(plain)))
        for entrant in chosen(options, bench.settings):
            figures = bench.measure(entrant, temperature, plain)
            shape = entrant.shape
            named = f"{shape.num_steps},{shape.topk},{shape.num_draft_tokens}"
            rows.append(_row(entrant.name, named, temperature, figures, len(plain)))
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    print(table(HEADER, rows))


if __name__ == "__main__":
    main()
