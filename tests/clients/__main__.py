"""`make test-clients`: other people's clients against a gateway that serves the demo model.

Each client is a program of its own in an environment of its own, so that their dependencies cannot
change ours. Schemathesis sends what the OpenAPI document allows, to a gateway in front of a target
without a model, and looks for answers of 500 and above.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from gateway.settings import DEMO_MODEL
from services.probe import grpc_is_serving, http_is_ready

_HERE = Path(__file__).parent
_HOST = "127.0.0.1"
_DEMO_PORTS = (18500, 18510, 18520)
_SYNTHETIC_PORT = 18530
_START_TIMEOUT_S = 120.0
_CLIENT_TIMEOUT_S = 600.0


async def _start(*arguments: str, **options: int) -> asyncio.subprocess.Process:
    environment = {**os.environ, "OUTRIDER_LOG_LEVEL": "error"}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, env=environment, **options
    )


async def _end(processes: Sequence[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _demo() -> AsyncIterator[str]:
    """The demo stack; yields the gateway's URL."""
    gateway, target, draft = _DEMO_PORTS
    process = await _start(
        *("services.serve", "--gateway-port", str(gateway), "--target-port", str(target)),
        *("--draft-port", str(draft), "--log-dir", ".run/clients"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        ready = await asyncio.wait_for(process.stdout.readline(), _START_TIMEOUT_S)
        assert ready.startswith(b"ready:"), "no stack; see .run/clients/"
        yield f"http://{_HOST}:{gateway}"
    finally:
        await _end([process])


@asynccontextmanager
async def _synthetic() -> AsyncIterator[str]:
    """A gateway in front of a fast target with a short context; yields its URL."""
    port, target = _SYNTHETIC_PORT, _SYNTHETIC_PORT + 2
    tokenizer = ("--tokenizer", str(DEMO_MODEL))
    processes = [
        await _start(
            *("tests.load.synthetic_target", "--port", str(target), *tokenizer),
            *("--step-ms", "1", "--max-context", "64"),
        ),
        await _start(
            *("gateway", "--port", str(port), "--target", f"{_HOST}:{target}", *tokenizer),
            *("--target-maintenance", f"{_HOST}:{target + 1}"),
        ),
    ]
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not await grpc_is_serving(f"{_HOST}:{target}"):
                await asyncio.sleep(0.1)
            while not await http_is_ready(_HOST, port, "/ready"):
                await asyncio.sleep(0.1)
        yield f"http://{_HOST}:{port}"
    finally:
        await _end(processes)


async def _client(name: str, command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Runs one client; prints what it said when it failed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=variables["HOME"],
        env={**os.environ, **variables},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _CLIENT_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        output = b"no end within its time"
        await process.wait()
    is_well = process.returncode == 0
    print(f"{name}: {'passed' if is_well else 'FAILED'}", flush=True)
    if not is_well:
        print(output.decode(errors="replace")[-4000:], flush=True)
    return is_well


def _variables(url: str, home: str) -> dict[str, str]:
    return {
        "OUTRIDER_URL": url,
        "HOME": home,
        "OPENAI_API_KEY": "none",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network for prices
        "LLM_USER_PATH": home,
        "PYTHONPATH": "",
    }


def _write_llm_model(home: str, url: str) -> None:
    text = f"- model_id: demo\n  model_name: demo\n  api_base: {url}/v1\n"
    (Path(home) / "extra-openai-models.yaml").write_text(text)


async def run(flags: argparse.Namespace) -> list[bool]:
    """Returns whether each client was well."""
    bin_dir = flags.venv.resolve() / "bin"
    python = str(bin_dir / "python")
    outcomes = []
    with tempfile.TemporaryDirectory() as home:
        async with _demo() as url:
            variables = _variables(url, home)
            for name in ("openai", "anthropic", "litellm", "langchain"):
                program = str(_HERE / f"with_{name}.py")
                outcomes.append(await _client(name, [python, program], variables))
            _write_llm_model(home, url)
            llm = [str(bin_dir / "llm"), "-m", "demo", "-o", "max_tokens", "16", "Name a colour."]
            outcomes.append(await _client("llm", llm, variables))
            if flags.node_modules is not None:
                # Node looks for packages beside the program.
                program = flags.node_modules.resolve().parent / "with_openai.mjs"
                program.write_bytes((_HERE / "with_openai.mjs").read_bytes())
                outcomes.append(await _client("openai, Node", ["node", str(program)], variables))
        async with _synthetic() as url:
            schemathesis = [
                *(str(bin_dir / "schemathesis"), "run", f"{url}/openapi.json"),
                *("--checks", "not_a_server_error", "--max-examples", str(flags.max_examples)),
                *("--generation-database", "none", "--seed", "1", "--no-color"),
            ]
            outcomes.append(await _client("schemathesis", schemathesis, _variables(url, home)))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="test-clients", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv-clients"))
    parser.add_argument("--node-modules", type=Path, help="with the openai package of Node")
    parser.add_argument(
        "--max-examples", type=int, default=20, help="of schemathesis, an operation"
    )
    return 0 if all(asyncio.run(run(parser.parse_args()))) else 1


if __name__ == "__main__":
    sys.exit(main())
