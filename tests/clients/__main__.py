"""`make test-clients`: other people's clients against a gateway that serves the demo model.

Each client is a program of its own in an environment of its own, so that their dependencies cannot
change ours. Schemathesis sends what the OpenAPI document allows, to a gateway in front of a target
without a model: no answer may be of 500 and above, or other than the document says.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

from gateway.settings import DEMO_MODEL
from tests.clients import stacks
from tests.clients.client import Client, Outcome, run_client

_HERE = Path(__file__).parent


def _python(name: str, environment: str = "sdk") -> Client:
    return Client(name, environment, ("python", str(_HERE / f"with_{name.replace('-', '_')}.py")))


_STANDARD_TESTS = ("-c", str(_HERE / "pytest.ini"), str(_HERE / "langchain_standard.py"))
_WITH_DEMO = (
    _python("openai"),
    _python("anthropic"),
    _python("langchain"),
    Client("langchain-tests", "sdk", ("pytest", *_STANDARD_TESTS)),
    Client("llm", "sdk", ("llm", "-m", "demo", "-o", "max_tokens", "16", "Name a colour.")),
    _python("litellm", "litellm"),
    _python("aiperf", "aiperf"),
    _python("guidellm", "guidellm"),
    _python("instructor", "instructor"),
    _python("llama-index", "llama_index"),
    _python("smg", "smg"),
    _python("smg-stubs", "smg"),
    _python("lm-eval", "lm_eval"),
    # Reads what lm-eval left behind, so it comes after it.
    Client(
        "lm-eval-recomputed", None, (sys.executable, "-m", "tests.clients.likelihoods", "lm_eval")
    ),
    Client("openai-node", None, ("node", "with_openai.mjs")),
    *(
        Client(f"suite-{name}", "suites", ("python", str(_HERE / "with_suite.py"), name))
        for name in ("openai", "vllm", "sglang", "llama_cpp")
    ),
)
_AGENTS = (
    *(
        Client(name, None, (sys.executable, str(_HERE / "with_agents.py"), name))
        for name in ("claude-code", "codex", "opencode", "continue", "aider")
    ),
    _python("openai-agents", "openai_agents"),
    _python("pydantic-ai", "pydantic_ai"),
)
_AGENT_PROGRAMS = {
    "claude-code": "node/node_modules/.bin/claude",
    "codex": "node/node_modules/.bin/codex",
    "opencode": "node/node_modules/.bin/opencode",
    "continue": "node/node_modules/.bin/cn",
    "aider": "aider/bin/aider",
    "openai-agents": "openai_agents/bin/python",
    "pydantic-ai": "pydantic_ai/bin/python",
}


def _schemathesis(url: str, max_examples: int, seed: int) -> Client:
    program = (
        *("schemathesis", "run", f"{url}/openapi.json", "--max-examples", str(max_examples)),
        *("--wait-for-schema", "60", "--request-timeout", "60"),
        *("--checks", "not_a_server_error,status_code_conformance,content_type_conformance"),
        *("--checks", "response_schema_conformance"),
        # A target without a model has no weights to replace.
        *(
            "--exclude-tag",
            "rollouts",
            "--generation-database",
            "none",
            "--seed",
            str(seed),
            "--no-color",
        ),
    )
    return Client("schemathesis", "sdk", program)


def _variables(url: str, home: str) -> dict[str, str]:
    return {
        "OUTRIDER_URL": url,
        "OUTRIDER_TARGET": stacks.DEMO_TARGET,
        "OUTRIDER_TOKENIZER": str(DEMO_MODEL),
        "HOME": home,
        "OPENAI_API_KEY": "none",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network for prices
        "LLM_USER_PATH": home,
        "SCHEMATHESIS_HOOKS": "tests.clients.schemathesis_hooks",
        "PYTHONPATH": str(_HERE.parents[1]),
    }


async def _try(client: Client, environments: Path, url: str, home: str) -> Outcome:
    program, *arguments = client.program
    variables = _variables(url, home)
    if client.environment is not None:
        program = str(environments / client.environment / "bin" / program)
    elif shutil.which(program) is None or not _has_packages(program, environments):
        outcome = Outcome(client.name, None, f"{program} or its packages are not installed")
        print(outcome.line(), flush=True)
        return outcome
    return await run_client(client, (program, *arguments), variables)


async def _try_agent(agent: Client, environments: Path, url: str, home: str) -> Outcome:
    if not (environments / _AGENT_PROGRAMS[agent.name]).exists():
        outcome = Outcome(agent.name, None, "it is not installed")
        print(outcome.line(), flush=True)
        return outcome
    variables = {
        "HOME": home,
        "OUTRIDER_SCRIPTED_URL": url,
        "OUTRIDER_NODE": str(environments / "node"),
        "OUTRIDER_AIDER": str(environments / "aider" / "bin" / "aider"),
        "PYTHONPATH": str(_HERE.parents[1]),
    }
    program, *arguments = agent.program
    if agent.environment is not None:
        program = str(environments / agent.environment / "bin" / program)
    return await run_client(agent, (program, *arguments), variables)


def _has_packages(program: str, environments: Path) -> bool:
    return program != "node" or (environments / "node" / "node_modules" / "openai").is_dir()


def _prepare(home: str, environments: Path, url: str) -> None:
    """Writes what clients expect to find in the folder they run in."""
    model = f"- model_id: demo\n  model_name: demo\n  api_base: {url}/v1\n"
    (Path(home) / "extra-openai-models.yaml").write_text(model)  # of llm
    # Node looks for packages beside the program.
    shutil.copy(_HERE / "with_openai.mjs", home)
    (Path(home) / "node_modules").symlink_to(environments / "node" / "node_modules")


async def run(flags: argparse.Namespace) -> list[Outcome]:
    """Returns how each client that was asked for ended."""
    outcomes: list[Outcome] = []
    chosen = [client for client in _WITH_DEMO if client.name in flags.only or not flags.only]
    with tempfile.TemporaryDirectory() as home:
        if chosen:
            async with stacks.demo() as url:
                _prepare(home, flags.environments, url)
                outcomes += [await _try(each, flags.environments, url, home) for each in chosen]
        agents = [agent for agent in _AGENTS if agent.name in flags.only or not flags.only]
        if agents:
            async with stacks.scripted(home) as url:
                outcomes += [
                    await _try_agent(each, flags.environments, url, home) for each in agents
                ]
        if "schemathesis" in flags.only or not flags.only:
            async with stacks.synthetic() as url:
                client = _schemathesis(url, flags.max_examples, flags.seed)
                outcomes.append(await _try(client, flags.environments, url, home))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="test-clients", description=__doc__)
    parser.add_argument("--environments", type=lambda text: Path(text).resolve(), required=True)
    names = [client.name for client in (*_WITH_DEMO, *_AGENTS)]
    parser.add_argument(
        "--only",
        nargs="+",
        choices=(*names, "schemathesis"),
        metavar="CLIENT",
        default=(),
        help="names of clients; all unless given",
    )
    parser.add_argument(
        "--max-examples", type=int, default=20, help="of schemathesis, an operation"
    )
    parser.add_argument("--seed", type=int, default=1, help="of schemathesis")
    outcomes = asyncio.run(run(parser.parse_args()))
    print(f"{sum(outcome.duration_s for outcome in outcomes):.0f} s for {len(outcomes)} clients")
    return 1 if any(outcome.is_well is False for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
