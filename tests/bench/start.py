"""`make bench-start`: from the start of a target's process to the first token it serves, in parts.

Starts the target again and again. The first start reads the files into the page cache and fills
the kernels' caches, and has a column of its own; the others are medians. `--cold-kernels` gives
every start empty caches of compiled kernels.

The target itself says how long its parts take (`shared/telemetry/start_up.py`); what this program
sees from outside, the port, health and the first tokens over gRPC, stands below them. The second
request shows what the first one still paid for.

With `--widen DIR` the demo's models are first written there with the matrices of an 8B target and,
for `--algorithm STANDALONE`, a 1B draft or, for a head, one of the published shape.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc import aio

from services.draft.algorithm import Algorithm
from services.draft.settings_problems import default_model_folder
from services.probe import grpc_is_serving
from services.target.settings import DEMO_MODEL
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.pb.outrider.target.v1 import target_service_pb2_grpc as pb_grpc
from shared.pb.outrider.types.v1 import sampling_pb2
from shared.rpc.channel import open_channel
from tests.bench.figure import add_figures_flag
from tests.bench.start_parts import FIRST_TOKEN, Part, Start, first_token_figure, report, told
from tests.bench.wide_folders import target_folder, widened, widened_draft
from tests.helpers.serving import free_ports

_POLL_S = 0.005
_NUM_TOKENS = 16
_PROMPT = tuple(range(10, 26))


class StartFailed(Exception):
    """The target ended or did not come up in time; holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to start, and how often.

    Attributes:
        arguments: of the target.
        repeats: starts behind the first.
    """

    arguments: tuple[str, ...]
    repeats: int
    has_cold_kernels: bool
    timeout_s: float


async def measure(plan: Plan, folder: Path) -> AsyncIterator[Start]:
    """Yields the parts of every start."""
    for number in range(1 + plan.repeats):
        yield await _start(plan, folder / f"{number}.log")


async def _start(plan: Plan, log: Path) -> Start:
    port, start_s = next(free_ports(1)), time.monotonic()
    async with _running(plan, port, log) as process:
        seen: dict[str, Part] = {}

        def passed(name: str) -> None:
            seen[name] = Part(time.monotonic() - start_s)

        async with asyncio.timeout(plan.timeout_s):
            await _until_open(port, process, log)
            passed("start to open port")
            while not await grpc_is_serving(f"127.0.0.1:{port}"):
                await _pause(process, log)
            passed("start to SERVING")
            first = await _first_token_s(port)
            second = await _first_token_s(port)
        seen["first token of request 1"] = Part(first)
        seen["first token of request 2"] = Part(second)
        seen[FIRST_TOKEN] = Part(seen["start to SERVING"].seconds + first)
    return {**told(_text(log)), **seen}


@asynccontextmanager
async def _running(plan: Plan, port: int, log: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with tempfile.TemporaryDirectory(prefix="outrider-kernels-") as caches, log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.target", "--port", str(port)),
            *("--maintenance-port", "0", "--log-format", "json", *plan.arguments),
            stdout=file,
            stderr=file,
            env={**os.environ, **(_caches_in(Path(caches)) if plan.has_cold_kernels else {})},
        )
        try:
            yield process
        except TimeoutError:
            raise StartFailed(f"no token in {plan.timeout_s:.0f} s\n{_tail(log)}") from None
        except aio.AioRpcError as error:
            raise StartFailed(f"{error.details()}\n{_tail(log)}") from None
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


def _caches_in(folder: Path) -> dict[str, str]:
    """Returns the environment in which kernels are compiled anew."""
    return {
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "CUDA_CACHE_PATH": str(folder / "cuda"),
    }


async def _until_open(port: int, process: asyncio.subprocess.Process, log: Path) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await _pause(process, log)
        else:
            writer.close()
            return await writer.wait_closed()


async def _pause(process: asyncio.subprocess.Process, log: Path) -> None:
    if process.returncode is not None:
        raise StartFailed(f"the target ended with {process.returncode}\n{_tail(log)}")
    await asyncio.sleep(_POLL_S)


async def _first_token_s(port: int) -> float:
    """Returns the seconds to the first token of an answer, and lets it finish."""
    request = pb.GenerateRequest(
        prompt_token_ids=_PROMPT,
        sampling_params=sampling_pb2.SamplingParams(temperature=0.0),
        stop_params=sampling_pb2.StopParams(max_output_token_count=_NUM_TOKENS, ignore_eos=True),
    )
    start_s, first_s = time.monotonic(), None
    async with open_channel(f"127.0.0.1:{port}") as channel:
        async for response in pb_grpc.TargetServiceStub(channel).Generate(request):
            if first_s is None and response.delta.token_ids:
                first_s = time.monotonic() - start_s
    assert first_s is not None, "an answer without tokens"
    return first_s


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


def _tail(log: Path) -> str:
    return _text(log)[-2000:]


def target_arguments(flags: argparse.Namespace) -> tuple[str, ...]:
    """Returns the target's flags; writes wide models first where they are asked for."""
    model, drafted = flags.model, list[str]()
    if flags.algorithm is not None:
        algorithm = Algorithm(flags.algorithm)
        drafted = ["--draft", "embedded", "--speculative-algorithm", algorithm.value]
        if algorithm.has_model:
            draft = flags.draft_model or default_model_folder(algorithm, DEMO_MODEL)
            if flags.widen is not None:
                draft = widened_draft(flags.widen, algorithm, model, draft)
            drafted += ["--speculative-draft-model-path", str(draft)]
    if flags.widen is not None:
        model = widened(target_folder(flags.widen), model, "8b")
    return ("--model-path", str(model), *drafted, *flags.target_flags.split())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-start", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--widen", type=Path, metavar="DIR", help="folder for an 8B copy")
    parser.add_argument(
        "--algorithm",
        choices=("EAGLE", "EAGLE3", "MTP", "DFLASH", "STANDALONE", "NGRAM"),
        help="of a draft inside the target; none when unset",
    )
    parser.add_argument("--draft-model", type=Path, help="folder of the draft; the demo's")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold-kernels", action="store_true", help="compile at every start")
    parser.add_argument("--timeout-s", type=float, default=600.0)
    parser.add_argument("--target-flags", default="", help="further flags of the target")
    add_figures_flag(parser)
    return parser.parse_args(arguments)


async def run(flags: argparse.Namespace) -> list[Start]:
    """Returns the parts of the starts that the flags ask for, the first one's first. What is known
    after each of them goes to `--figures`.

    Raises:
        StartFailed: a start came to no token.
    """
    plan = Plan(target_arguments(flags), flags.repeats, flags.cold_kernels, flags.timeout_s)
    starts: list[Start] = []
    with tempfile.TemporaryDirectory(prefix="outrider-bench-start-") as name:
        async for start in measure(plan, Path(name)):
            starts.append(start)
            flags.figures.add([first_token_figure(starts)])
    return starts


def main() -> int:
    flags = parse(sys.argv[1:])
    try:
        starts = asyncio.run(run(flags))
    except (StartFailed, subprocess.CalledProcessError) as error:
        print(f"bench-start: {error}", file=sys.stderr)
        return 1
    print(report(starts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
