"""`make load`: load on a running gateway.

N workers each keep one request in flight until M requests are done; with `--arrivals` requests are
sent at times of their own instead, and timed from when they were due. Prints time to the first
token, gaps between chunks, tokens per second and errors; exits with code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.load.arrivals import Arrivals, arrivals_named
from tests.load.chat import ChatFailed, ChatRequest, ChatResult, served_model, stream_chat
from tests.load.figures import percentile, table
from tests.load.prompts import PROMPTS, load_prompts

_PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """Shape of the load.

    Attributes:
        arrivals: None is a closed loop of `concurrency` workers.
        speculation: False asks for plain decoding.
        api_key: sent as a bearer token; None sends none.
    """

    url: str
    concurrency: int
    num_requests: int
    max_tokens: int
    temperature: float
    timeout_s: float
    arrivals: Arrivals | None = None
    prompts: tuple[str, ...] = PROMPTS
    speculation: bool = True
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Outcome of a run; durations in seconds."""

    results: tuple[ChatResult, ...]
    errors: tuple[str, ...]
    duration_s: float

    def summary(self) -> dict[str, Any]:
        """Returns the figures under stable names, times in milliseconds."""
        num_tokens = sum(result.num_tokens for result in self.results)
        return {
            "requests": len(self.results) + len(self.errors),
            "errors": len(self.errors),
            "duration_s": round(self.duration_s, 3),
            "output_tokens": num_tokens,
            "tokens_per_s": round(num_tokens / self.duration_s, 1),
            "requests_per_s": round(len(self.results) / self.duration_s, 2),
            **{name: _percentiles(values) for name, values in self._series().items()},
        }

    def _series(self) -> dict[str, list[float]]:
        return {
            "first_token_ms": [result.first_token_s for result in self.results],
            "inter_chunk_ms": [gap for result in self.results for gap in result.gaps_s],
            "request_ms": [result.duration_s for result in self.results],
        }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"p{p}": round(1000 * percentile(seconds, p), 2) for p in _PERCENTS}


async def run(
    settings: LoadSettings, transport: httpx.AsyncBaseTransport | None = None
) -> LoadReport:
    """Sends the load and waits for its end.

    Args:
        transport: takes the requests; None opens connections to `settings.url`.
    """
    # An open loop has as many connections as it needs.
    is_closed = settings.arrivals is None
    limits = httpx.Limits(max_connections=settings.concurrency if is_closed else None)
    key = settings.api_key
    async with httpx.AsyncClient(
        base_url=settings.url,
        headers=None if key is None else {"authorization": f"Bearer {key}"},
        limits=limits,
        timeout=settings.timeout_s,
        transport=transport,
    ) as http:
        model = await served_model(http)
        requests = _requests(settings)
        results: list[ChatResult] = []
        errors: list[str] = []

        async def ask(request: ChatRequest, late_s: float = 0.0) -> None:
            try:
                results.append((await stream_chat(http, model, request)).delayed(late_s))
            except (ChatFailed, httpx.HTTPError) as error:
                errors.append(f"{type(error).__name__}: {error}")

        async def work() -> None:
            for request in requests:  # shared by all workers: each takes the next
                await ask(request)

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            if settings.arrivals is None:
                for _ in range(settings.concurrency):
                    group.create_task(work())
            else:
                pairs = zip(requests, settings.arrivals.offsets_s(), strict=False)
                for request, due_s in pairs:
                    await asyncio.sleep(due_s - (time.perf_counter() - started))
                    late_s = time.perf_counter() - started - due_s
                    group.create_task(ask(request, late_s))
        return LoadReport(tuple(results), tuple(errors), time.perf_counter() - started)


def _requests(settings: LoadSettings) -> Iterator[ChatRequest]:
    for number in range(settings.num_requests):
        yield ChatRequest(
            prompt=settings.prompts[number % len(settings.prompts)],
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=number,
            speculation=settings.speculation,
        )


def _table(summary: dict[str, Any]) -> str:
    series = {name: value for name, value in summary.items() if isinstance(value, dict) and value}
    header = ("", *(f"p{p}" for p in _PERCENTS))
    rows = [(name, *(f"{v:.2f}" for v in value.values())) for name, value in series.items()]
    counts = [f"{name} {value}" for name, value in summary.items() if name not in series and value]
    return "\n".join([", ".join(counts), table(header, rows)])


def parse(arguments: list[str]) -> tuple[LoadSettings, bool]:
    """Returns the settings, and whether the figures are printed as JSON."""
    parser = argparse.ArgumentParser(prog="load", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", help="of the gateway")
    help_text = "JSON lines with `prompt`, `messages` or `turns`; unset: twenty of our own"
    parser.add_argument("--prompts", type=Path, help=help_text)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--arrivals", help="open loop: poisson, burst or steady")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second, open loop")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    flags = parser.parse_args(arguments)
    try:
        prompts = PROMPTS if flags.prompts is None else load_prompts(flags.prompts)
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    if not prompts:
        parser.error(f"--prompts: {flags.prompts} is empty")
    settings = LoadSettings(
        url=flags.url,
        concurrency=flags.concurrency,
        num_requests=flags.requests,
        max_tokens=flags.max_tokens,
        temperature=flags.temperature,
        timeout_s=flags.timeout_s,
        arrivals=flags.arrivals and arrivals_named(flags.arrivals, flags.rate),
        prompts=prompts,
        api_key=flags.api_key,
    )
    return settings, flags.json


def main() -> int:
    settings, as_json = parse(sys.argv[1:])
    try:
        report = asyncio.run(run(settings))
    except httpx.HTTPError as error:
        print(f"load: {settings.url} does not answer: {error}", file=sys.stderr)
        return 1
    summary = report.summary()
    print(json.dumps(summary, indent=2) if as_json else _table(summary))
    for message in sorted(set(report.errors)):
        print(f"{report.errors.count(message)} x {message}", file=sys.stderr)
    return 1 if report.errors else 0


if __name__ == "__main__":
    sys.exit(main())
