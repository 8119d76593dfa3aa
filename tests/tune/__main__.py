"""`make tune`: the best tree shape, placement and concurrency for a workload, measured.

Searches shapes on a draft that runs, through `UpdateDraftConfig`, beside plain decoding and the
shapes that the target chooses by itself; at each concurrency. With `--placements` it starts a
stack for each; an embedded draft has no port to set shapes by and is measured as it comes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from grpc import aio

from shared.rpc.channel import open_channel
from tests.load.__main__ import LoadSettings
from tests.load.__main__ import run as run_load
from tests.load.figures import table
from tests.load.prompts import PROMPTS, load_prompts
from tests.tune.draft_config import DraftConfig
from tests.tune.picture import draw_trials
from tests.tune.search import Shape, coordinate_descent

PLAIN, AUTO = "plain", "chosen by the target"
_PORTS = (18200, 18202, 18204)


class TuneFailed(Exception):
    """Requests failed, so that figures would mean nothing."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One setting under the workload.

    Attributes:
        setting: a shape as steps/topk/tokens, or one of those without.
    """

    placement: str
    concurrency: int
    setting: str
    tokens_per_s: float
    first_token_ms_p50: float
    inter_chunk_ms_p50: float


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked again for each trial."""

    prompts: tuple[str, ...]
    num_requests: int
    max_tokens: int
    temperature: float


async def measure(
    url: str, work: Workload, placement: str, concurrency: int, setting: str
) -> Trial:
    """Raises:
    TuneFailed: a request failed.
    """
    settings = LoadSettings(
        url=url,
        concurrency=concurrency,
        num_requests=work.num_requests,
        max_tokens=work.max_tokens,
        temperature=work.temperature,
        timeout_s=600.0,
        prompts=work.prompts,
        speculation=setting != PLAIN,
    )
    report = await run_load(settings)
    if report.errors:
        raise TuneFailed(f"{len(report.errors)} requests failed, first: {report.errors[0]}")
    summary = report.summary()
    trial = Trial(
        placement,
        concurrency,
        setting,
        summary["tokens_per_s"],
        summary["first_token_ms"]["p50"],
        summary["inter_chunk_ms"].get("p50", 0.0),
    )
    print(f"{placement}, {concurrency} at once, {setting}: {trial.tokens_per_s:g} tokens/s")
    return trial


async def tune_shapes(
    url: str, draft: DraftConfig, work: Workload, placement: str, concurrency: int
) -> list[Trial]:
    """Searches shapes at one concurrency; plain decoding and the target's own choice beside."""
    trials: list[Trial] = []

    async def try_shape(shape: Shape) -> float:
        await draft.set(shape)
        trials.append(await measure(url, work, placement, concurrency, str(shape)))
        return trials[-1].tokens_per_s

    await draft.unpin()
    trials += await _without_shapes(url, work, placement, concurrency)
    await coordinate_descent(draft.shape, try_shape)
    return trials


async def _without_shapes(
    url: str, work: Workload, placement: str, concurrency: int
) -> list[Trial]:
    return [await measure(url, work, placement, concurrency, setting) for setting in (PLAIN, AUTO)]


@asynccontextmanager
async def _stack(placement: str, arguments: str) -> AsyncIterator[tuple[str, str]]:
    """A stack of its own; yields the gateway's URL and the draft's address."""
    gateway, target, draft = _PORTS
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.cli", "serve", "--placement", placement),
        *("--gateway-port", str(gateway), "--target-port", str(target)),
        *("--draft-port", str(draft), "--log-dir", f".run/tune-{placement}"),
        *shlex.split(arguments),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        if not (await process.stdout.readline()).startswith(b"ready:"):
            raise TuneFailed(f"no stack with placement {placement}; see .run/tune-{placement}/")
        yield f"http://127.0.0.1:{gateway}/v1", f"127.0.0.1:{draft}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _tune_running(flags: argparse.Namespace, work: Workload) -> list[Trial]:
    trials = []
    async with open_channel(flags.draft) as channel, DraftConfig(channel) as draft:
        for concurrency in flags.concurrency:
            trials += await tune_shapes(flags.url, draft, work, "running", concurrency)
    return trials


async def _tune_placement(placement: str, flags: argparse.Namespace, work: Workload) -> list[Trial]:
    trials = []
    async with _stack(placement, flags.serve_args) as (url, address):
        for concurrency in flags.concurrency:
            if placement == "embedded":
                trials += await _without_shapes(url, work, placement, concurrency)
                continue
            async with open_channel(address) as channel, DraftConfig(channel) as draft:
                trials += await tune_shapes(url, draft, work, placement, concurrency)
    return trials


async def run(flags: argparse.Namespace) -> list[Trial]:
    """Runs every trial.

    Raises:
        TuneFailed: requests failed, or no stack came up.
    """
    prompts = PROMPTS if flags.workload is None else load_prompts(flags.workload)
    work = Workload(prompts, flags.requests, flags.max_tokens, flags.temperature)
    if not flags.placements:
        return await _tune_running(flags, work)
    found = [await _tune_placement(placement, flags, work) for placement in flags.placements]
    return [trial for trials in found for trial in trials]


def best(trials: list[Trial]) -> list[Trial]:
    """Returns the fastest trial of each concurrency, lowest first."""
    by_concurrency: dict[int, Trial] = {}
    for trial in trials:
        known = by_concurrency.get(trial.concurrency)
        if known is None or trial.tokens_per_s > known.tokens_per_s:
            by_concurrency[trial.concurrency] = trial
    return [by_concurrency[concurrency] for concurrency in sorted(by_concurrency)]


def report(trials: list[Trial], out: Path) -> str:
    """Writes all trials and the picture; returns the best settings as text."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "trials.json").write_text(json.dumps([asdict(t) for t in trials], indent=2) + "\n")
    draw_trials(out / "trials.png", trials)
    header = ("concurrency", "placement", "best", "tokens/s", "over plain", "first token ms")
    rows = []
    for trial in best(trials):
        plain = max(
            each.tokens_per_s
            for each in trials
            if each.setting == PLAIN and each.concurrency == trial.concurrency
        )
        rows.append(
            (
                str(trial.concurrency),
                trial.placement,
                trial.setting,
                f"{trial.tokens_per_s:.1f}",
                f"{trial.tokens_per_s / plain:.2f}x",
                f"{trial.first_token_ms_p50:.0f}",
            )
        )
    lines = [table(header, rows), *(_flags(each) for each in best(trials))]
    return "\n".join([*lines, f"trials and picture: {out}/trials.{{json,png}}"])


def _flags(trial: Trial) -> str:
    """Returns how to serve with a trial's setting."""
    where = f"at {trial.concurrency}:"
    if trial.setting == PLAIN:
        return f"{where} ALGORITHM=NONE"
    if trial.setting == AUTO:
        return f"{where} no shape flags; the target chooses"
    steps, topk, tokens = trial.setting.split("/")
    return (
        f"{where} --speculative-num-steps {steps} --speculative-eagle-topk {topk} "
        f"--speculative-num-draft-tokens {tokens}"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tune", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--draft", default="127.0.0.1:50061", help="host:port of DraftService")
    parser.add_argument("--workload", type=Path, help="JSON lines with prompts; twenty of our own")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 8), help="1,8,…")
    parser.add_argument("--requests", type=int, default=20, help="a trial")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--placements", type=_names, default=(), help="remote,embedded")
    parser.add_argument("--serve-args", default="", help="of outrider serve, with --placements")
    parser.add_argument("--out", type=Path, default=Path(".run/tune"))
    return parser.parse_args(arguments)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def main() -> int:
    flags = parse(sys.argv[1:])
    try:
        trials = asyncio.run(run(flags))
    except (TuneFailed, httpx.HTTPError) as error:
        print(f"tune: {error}", file=sys.stderr)
        return 1
    except aio.AioRpcError as failure:
        print(f"tune: {flags.draft}: {failure.details()}", file=sys.stderr)
        return 1
    print(report(trials, flags.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
