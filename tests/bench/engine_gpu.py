"""Plain decode by the whole engine on one GPU: scheduler, forwards, draws, commits, its own thread.

The model has the shape of Llama-3.1-8B in bfloat16 and random weights; 512-token prompts that share
nothing, 256 new tokens, greedy. Times are medians over the steps in which every sequence decodes,
read from the engine's own reports. The floor is the matrix products of such a step alone, in one
CUDA graph of the same run, plus the bytes of keys and values at the mean context over the copy
bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass

import torch

from services.target.engine import Engine
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.scheduler import Scheduler, SchedulerLimits
from services.target.step_loop import StepLoop
from services.target.verifier import VerificationMode, Verifier
from shared.inbox import Inbox
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams, StopParams
from tests.bench.decode_row import HEADER, DecodeRow
from tests.bench.device_clock import copy_bandwidth, device_ms
from tests.bench.engine_times import Answers, StepTimes
from tests.bench.figure import add_figures_flag
from tests.bench.gpu import (
    CUDA,
    LLAMA_8B,
    PAGE_SIZE,
    batch_of,
    kv_bytes,
    product_floor_ms,
)
from tests.bench.random_weights import random_decoder
from tests.helpers.attention_batches import chunk

PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
MEAN_CONTEXT = PROMPT_TOKENS + OUTPUT_TOKENS // 2
BATCHES = (1, 8, 64)
NUM_PAGES = 64 * ((PROMPT_TOKENS + OUTPUT_TOKENS) // PAGE_SIZE + 1) + 2


@dataclass(frozen=True, slots=True)
class Figures:
    """One mode at one batch size.

    Attributes:
        step_ms: median time between two commits.
        gap_us: median host gap as the engine reports it.
        whole_tokens_per_s: output tokens over the time from submission to the last token.
    """

    step_ms: float
    gap_us: float
    whole_tokens_per_s: float
    token_ids: dict[int, list[int]]


def build_engine(runner: ModelRunner, times: StepTimes, *, overlaps: bool) -> Engine:
    """Returns an engine over the runner, not started."""
    leases = KvLeases(NUM_PAGES, PAGE_SIZE, prefix_cache=False)
    loop = StepLoop(
        runner=runner,
        leases=leases,
        scheduler=Scheduler(leases, SchedulerLimits(64, 256, 2048)),
        verifier=Verifier(VerificationMode.COUPLED, generator=torch.Generator()),
        limits=ModelLimits(LLAMA_8B.vocab_size, 8192, NUM_PAGES * PAGE_SIZE, frozenset()),
        clock=time.perf_counter,
        on_step=times.observe,
        overlaps=overlaps,
    )
    return Engine(loop, Inbox(1024))


def requests(num_sequences: int, sampling: SamplingParams) -> list[GenerationRequest]:
    """Returns requests with random prompts."""
    rng = random.Random(0)
    return [
        GenerationRequest(
            "bench",
            tuple(rng.randrange(LLAMA_8B.vocab_size) for _ in range(PROMPT_TOKENS)),
            sampling,
            StopParams(OUTPUT_TOKENS),
            arrival_s=0.0,
        )
        for _ in range(num_sequences)
    ]


def measure(
    runner: ModelRunner, num_sequences: int, sampling: SamplingParams, *, overlaps: bool
) -> Figures:
    """Serves one batch of requests by a new engine."""
    times, answers = StepTimes(), Answers(num_sequences)
    engine = build_engine(runner, times, overlaps=overlaps)
    for key, each in enumerate(requests(num_sequences, sampling)):
        engine.submit(each, answers, key)
    start_s = time.perf_counter()
    engine.start()
    assert answers.all_ended.wait(120), "the engine does not come to an end"
    whole_s = time.perf_counter() - start_s
    engine.stop()
    steps = times.decode_steps(num_sequences)
    return Figures(
        step_ms=statistics.median(duration_ms for duration_ms, _ in steps),
        gap_us=1e6 * statistics.median(report.host_gap_s for _, report in steps),
        whole_tokens_per_s=num_sequences * OUTPUT_TOKENS / whole_s,
        token_ids=answers.token_ids,
    )


def forward_ms(runner: ModelRunner, num_sequences: int) -> float:
    """Returns the device time of a forward and its argmax, at the mean context."""
    batch = batch_of([chunk(MEAN_CONTEXT, 1)] * num_sequences)
    return device_ms(lambda: runner.run(batch).logits.argmax(-1))


def decode_rows(
    runner: ModelRunner, num_sequences: int, bandwidth: float, sampling: SamplingParams
) -> list[DecodeRow]:
    """Returns the rows of the table for one batch size."""
    floor_ms = product_floor_ms(runner.decoder, num_sequences)
    floor_ms += kv_bytes([chunk(MEAN_CONTEXT, 1)] * num_sequences) / bandwidth
    device = forward_ms(runner, num_sequences)
    measure(runner, num_sequences, sampling, overlaps=True)  # captures the graphs it meets
    found = {
        mode: measure(runner, num_sequences, sampling, overlaps=mode) for mode in (True, False)
    }
    same = sum(
        found[True].token_ids[key] == found[False].token_ids[key] for key in range(num_sequences)
    )
    return [
        DecodeRow(
            batch=num_sequences,
            overlaps=overlaps,
            step_ms=each.step_ms,
            device_ms=device,
            gap_us=each.gap_us,
            floor_ms=floor_ms,
            whole_tokens_per_s=each.whole_tokens_per_s,
            num_same=same,
        )
        for overlaps, each in found.items()
    ]


def trace(runner: ModelRunner, num_sequences: int) -> str:
    """Returns where the device's time of some decode steps goes, as torch's profiler sees it."""
    times, answers = StepTimes(), Answers(num_sequences)
    engine = build_engine(runner, times, overlaps=True)
    for key, each in enumerate(requests(num_sequences, SamplingParams(temperature=0.0))):
        engine.submit(each, answers, key)
    for _ in range(60):
        engine.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(10):
            engine.step()
        torch.cuda.synchronize()
    return str(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30))


def build_runner(decoder: Decoder) -> ModelRunner:
    """Returns a runner with graphs, captured when they are first met."""
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CUDA)
    limits = GraphLimits.of(max_sequences=64, max_tree_nodes=64, max_context_tokens=8192)
    return ModelRunner(decoder, pool, ForwardGraphs(decoder, pool, limits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--temperature", type=float, default=0.0)
    add_figures_flag(parser)
    parser.add_argument("--trace", action="store_true", help="print what the device did")
    options = parser.parse_args()
    torch.cuda.init()
    bandwidth = copy_bandwidth()
    runner = build_runner(random_decoder(LLAMA_8B, CUDA))
    sampling = SamplingParams(temperature=options.temperature, seed=1)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy {bandwidth / 1e9:.2f} TB/s; plain decode by the engine, {sampling}")
    print(HEADER)
    for num_sequences in options.batches:
        for row in decode_rows(runner, num_sequences, bandwidth, sampling):
            print(row, flush=True)
            if not options.temperature:
                options.figures.add(row.figures())
    if options.trace:
        for num_sequences in options.batches:
            print(trace(runner, num_sequences))


if __name__ == "__main__":
    main()
