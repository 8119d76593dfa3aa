"""What a step costs the host: the real engine over a runner that computes nothing.

Planning, packing, committing and telling are all there; the forward is replaced by logits that lie
ready, and the vocabulary is small. On one core of an idle machine: `python -m tests.bench.host`.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from services.target.engine import Engine
from services.target.inbox import Inbox
from services.target.requests.request import Event, GenerationRequest, ModelLimits
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.step_report import StepReport
from services.target.verifier import VerificationMode, Verifier
from shared.kv.batch import ForwardBatch
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import VOCAB_SIZE, tiny_decoder

PAGE_SIZE, PROMPT_TOKENS, OUTPUT_TOKENS = 16, 512, 256
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(seed=7)}


class IdleRunner(ModelRunner):
    """Returns the same logits whatever it is asked."""

    logits = torch.randn(4096, VOCAB_SIZE)

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        hidden = self.logits[: len(batch.token_ids)]
        return RunnerOutput(self.logits[: len(batch.logit_rows)], hidden, ())


class Silence:
    """A sink that drops everything."""

    def deliver(self, events: Sequence[tuple[int, Event]]) -> None:
        """Drops the events."""


def build(
    folder: Path,
    num_sequences: int,
    *,
    overlaps: bool,
    on_step: Callable[[StepReport], None] = lambda report: None,
) -> Engine:
    """Returns an engine that is about to serve `num_sequences` equal requests."""
    decoder = tiny_decoder(folder)
    num_tokens = PROMPT_TOKENS + OUTPUT_TOKENS
    num_pages = num_sequences * (-(-num_tokens // PAGE_SIZE) + 1) + 2
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), num_pages, torch.device("cpu"))
    leases = KvLeases(num_pages, PAGE_SIZE, prefix_cache=False)
    return Engine(
        runner=IdleRunner(decoder, pool),
        leases=leases,
        scheduler=Scheduler(leases, SchedulerLimits(num_sequences, num_sequences, 1 << 20)),
        verifier=Verifier(VerificationMode.COUPLED, generator=torch.Generator()),
        limits=ModelLimits(VOCAB_SIZE, num_tokens + 1, num_pages * PAGE_SIZE, frozenset()),
        inbox=Inbox(num_sequences),
        clock=time.perf_counter,
        on_step=on_step,
        overlaps=overlaps,
    )


def submit(engine: Engine, num_sequences: int, sampling: SamplingParams) -> None:
    """Queues the requests and steps until all of them decode."""
    sink = Silence()
    for key in range(num_sequences):
        prompt = [key % VOCAB_SIZE] * PROMPT_TOKENS
        stop = StopParams(OUTPUT_TOKENS)
        engine.submit(GenerationRequest("bench", prompt, sampling, stop, 0.0), sink, key)
    for _ in range(8):
        engine.step()


def step_times_ms(engine: Engine) -> list[float]:
    """Returns the host's time of each decode step."""
    times_ms = []
    for _ in range(OUTPUT_TOKENS - 16):
        start_s = time.perf_counter()
        engine.step()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| batch | sampling | overlap | host ms a step, median | µs a sequence |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for num_sequences in options.batches:
            for name, sampling in SAMPLINGS.items():
                for overlaps in (True, False):
                    engine = build(Path(folder), num_sequences, overlaps=overlaps)
                    submit(engine, num_sequences, sampling)
                    with cProfile.Profile() as profile:
                        if not options.profile:
                            profile.disable()
                        time_ms = statistics.median(step_times_ms(engine))
                    mode = "on" if overlaps else "off"
                    share = 1e3 * time_ms / num_sequences
                    print(f"| {num_sequences} | {name} | {mode} | {time_ms:.3f} | {share:.1f} |")
                    if options.profile:
                        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
