"""Coding agents, unmodified: a session of several turns with tools, to its end.

`python with_agents.py claude-code|codex|opencode|continue|aider`, with Node's packages below
`OUTRIDER_NODE`, aider's program in `OUTRIDER_AIDER`, and a gateway with the script of
`tests.clients.scripted` at `OUTRIDER_SCRIPTED_URL`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SECRET = "the fox is quick"
LAST_WORDS = "The file says that the fox is quick."
_TASK = "Write a file about a fox and read it."
_TIMEOUT_S = 120


def _run(program: str, *arguments: str, **variables: str) -> str:
    folder = Path(os.environ["OUTRIDER_NODE"]) / "node_modules" / ".bin"
    command = [program if Path(program).is_absolute() else str(folder / program)]
    done = subprocess.run(
        [*command, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def claude_code(url: str) -> None:
    """Anthropic's interface: three turns, a file written by one tool and read by another."""
    output = _run(
        *("claude", "-p", _TASK, "--permission-mode", "bypassPermissions"),
        *("--output-format", "json"),
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_API_KEY="none",
        ANTHROPIC_MODEL="demo",
        ANTHROPIC_SMALL_FAST_MODEL="demo",
        ANTHROPIC_DEFAULT_HAIKU_MODEL="demo",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        IS_SANDBOX="1",
    )
    result = json.loads(output)
    assert result["is_error"] is False, result
    assert (result["num_turns"], result["result"]) == (3, LAST_WORDS)


def codex(url: str) -> None:
    """OpenAI's responses: the same by commands of a shell."""
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        'model = "demo"\nmodel_provider = "outrider"\n[model_providers.outrider]\n'
        f'name = "outrider"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
    )
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    assert _run("codex", "exec", *flags, _TASK).strip() == LAST_WORDS


def opencode(url: str) -> None:
    """Chats by Vercel's AI SDK."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "outrider",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"demo": {"name": "demo", "tool_call": True}},
    }
    config = {"provider": {"outrider": provider}, "permission": {"*": "allow"}}
    config |= {"autoupdate": False, "share": "disabled", "small_model": "outrider/demo"}
    output = _run(
        *("opencode", "run", "--model", "outrider/demo", _TASK),
        OPENCODE_CONFIG_CONTENT=json.dumps(config),
        OPENCODE_DISABLE_AUTOUPDATE="1",
        OPENCODE_DISABLE_MODELS_FETCH="1",
    )
    assert LAST_WORDS in output, output


def continue_(url: str) -> None:
    """Chats of Continue's command line."""
    path = Path.cwd() / "continue.yaml"
    path.write_text(
        "name: outrider\nversion: 1.0.0\nschema: v1\nmodels:\n- name: demo\n  provider: openai\n"
        f"  model: demo\n  apiBase: {url}/v1\n  apiKey: none\n  roles: [chat, edit, apply]\n"
        "  capabilities: [tool_use]\n"
    )
    output = _run(
        *("cn", "-p", _TASK, "--config", str(path), "--auto"), CONTINUE_TELEMETRY_ENABLED="0"
    )
    assert LAST_WORDS in output, output


def aider(url: str) -> None:
    """Edits in text, by litellm; no tools."""
    _run(
        os.environ["OUTRIDER_AIDER"],
        *("--model", "openai/demo", "--edit-format", "diff", "--message", _TASK, "--yes-always"),
        *("--no-git", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"),
        *("--no-show-release-notes", "--map-tokens", "0", "--no-suggest-shell-commands"),
        "fox.txt",
        OPENAI_API_BASE=f"{url}/v1",
        OPENAI_API_KEY="none",
    )


_AGENTS = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "continue": continue_,
    "aider": aider,
}


def main() -> None:
    path = Path.cwd() / "fox.txt"
    path.unlink(missing_ok=True)
    _AGENTS[sys.argv[1]](os.environ["OUTRIDER_SCRIPTED_URL"])
    assert path.read_text().strip() == SECRET
    print("one edit" if sys.argv[1] == "aider" else "three turns with two calls of tools")


if __name__ == "__main__":
    main()
