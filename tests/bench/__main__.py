"""`make bench`: tokens per second and accepted length, plain and speculative, in one run.

Uses the gateway at --url, or starts a stack of its own when nothing answers there. Every repeat
measures plain decoding, what the server does by itself and each tree shape in turn, so that a slow
minute hits all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from shared.errors import InvalidArgument
from shared.tokens import TreeShape
from tests.bench.drafts import DraftConfig, live_config, set_config
from tests.bench.measure import Measurement, Pass, answer_all, summarise
from tests.bench.stack import StackFailed, running_stack
from tests.load.chat import ChatFailed, ChatRequest, served_model
from tests.load.figures import table
from tests.load.prompts import PROMPTS, load_prompts


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What to measure, on which server."""

    url: str
    draft: str
    prompts: tuple[str, ...]
    shapes: tuple[TreeShape, ...]
    max_tokens: int
    temperature: float
    concurrency: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Mode:
    """How answers are decoded.

    Attributes:
        config: of the draft; None decodes plainly.
    """

    name: str
    config: DraftConfig | None


async def run(settings: BenchSettings) -> list[Measurement]:
    """Measures every mode; the first entry is plain decoding, which the others compare with."""
    async with httpx.AsyncClient(base_url=settings.url, timeout=600.0) as http:
        model = await served_model(http)
        async with _restored_config(settings) as original:
            modes = _modes(settings, original)
            await _measure_mode(http, model, settings, modes[0])  # warms caches and clocks
            runs = [
                [await _measure_mode(http, model, settings, mode) for mode in modes]
                for _ in range(settings.repeats)
            ]
    plain_texts = runs[0][0].texts
    return [
        summarise(mode.name, [repeat[i] for repeat in runs], plain_texts)
        for i, mode in enumerate(modes)
    ]


@contextlib.asynccontextmanager
async def _restored_config(settings: BenchSettings) -> AsyncIterator[DraftConfig]:
    """Yields the draft's configuration, which is back at the end."""
    original = await live_config(settings.draft)
    try:
        yield original
    finally:
        await set_config(settings.draft, original)


def _modes(settings: BenchSettings, original: DraftConfig) -> list[Mode]:
    """Plain, what the server does by itself, and each shape that was asked for, pinned."""
    own = _shape_name(original.shape) if original.is_pinned else "adaptive"
    pinned = [Mode(_shape_name(each), DraftConfig(each, True)) for each in settings.shapes]
    return [Mode("plain", None), Mode(own, original), *pinned]


async def _measure_mode(
    http: httpx.AsyncClient, model: str, settings: BenchSettings, mode: Mode
) -> Pass:
    """Answers all prompts."""
    if mode.config is not None:
        await set_config(settings.draft, mode.config)
    requests = [
        ChatRequest(
            prompt,
            settings.max_tokens,
            temperature=settings.temperature,
            seed=seed,
            speculation=mode.config is not None,
        )
        for seed, prompt in enumerate(settings.prompts)
    ]
    return await answer_all(http, model, requests, settings.concurrency)


def _shape_name(shape: TreeShape) -> str:
    return f"{shape.num_steps} steps, top {shape.topk}, {shape.num_draft_tokens} tokens"


def _report(measurements: list[Measurement]) -> str:
    plain = measurements[0].tokens_per_s
    header = ("mode", "tok/s", "vs plain", "accepted", "first token ms", "same answers")
    rows = [
        (
            m.mode,
            f"{m.tokens_per_s:.1f}",
            f"{m.tokens_per_s / plain:.2f}",
            "-" if m.accepted_length is None else f"{m.accepted_length:.2f}",
            f"{m.first_token_ms:.1f}",
            f"{m.num_identical}/{m.num_prompts}",
        )
        for m in measurements
    ]
    note = "accepted: tokens a target step commits, the bonus token included"
    return f"{table(header, rows)}\n{note}"


async def _run_somewhere(settings: BenchSettings, stack_arguments: list[str]) -> list[Measurement]:
    """Measures the server at the URL, or one of our own when nothing answers there."""
    try:
        async with httpx.AsyncClient(base_url=settings.url, timeout=10.0) as http:
            await served_model(http)
    except httpx.TransportError:
        print(f"bench: nothing answers at {settings.url}; starting a stack", file=sys.stderr)
        async with running_stack(stack_arguments):
            return await run(settings)
    return await run(settings)


def _shape(text: str) -> TreeShape:
    try:
        num_steps, topk, num_draft_tokens = (int(part) for part in text.split(","))
        return TreeShape(num_steps, topk, num_draft_tokens)
    except (ValueError, InvalidArgument) as error:
        raise argparse.ArgumentTypeError(f"{text} is not STEPS,TOPK,TOKENS: {error}") from None


def _parse(arguments: list[str]) -> tuple[BenchSettings, bool, list[str]]:
    """Returns the settings, whether to print JSON, and the flags meant for the stack."""
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, epilog="Other flags go to the stack it starts."
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--draft", default="127.0.0.1:50061", help="gRPC address of the draft")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: 20 prompts of our own")
    parser.add_argument("--num-prompts", type=int, help="use the first N prompts")
    parser.add_argument("--shapes", type=_shape, nargs="*", default=[], metavar="STEPS,TOPK,TOKENS")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    flags, stack_arguments = parser.parse_known_args(arguments)
    prompts = load_prompts(flags.prompts) if flags.prompts else PROMPTS
    settings = BenchSettings(
        url=flags.url,
        draft=flags.draft,
        prompts=prompts[: flags.num_prompts],
        shapes=tuple(flags.shapes),
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        concurrency=flags.concurrency,
        repeats=flags.repeats,
    )
    return settings, flags.json, stack_arguments


def main() -> int:
    settings, as_json, stack_arguments = _parse(sys.argv[1:])
    try:
        measurements = asyncio.run(_run_somewhere(settings, stack_arguments))
    except (ChatFailed, StackFailed) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps([asdict(measurement) for measurement in measurements], indent=2))
    else:
        print(_report(measurements))
    return 0


if __name__ == "__main__":
    sys.exit(main())
