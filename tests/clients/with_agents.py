"""Claude Code and Codex, unmodified: a session of several turns with tools, to its end.

`python with_agents.py claude-code|codex`, with the folder of Node's packages in `OUTRIDER_NODE` and
a gateway with the script of `tests.clients.scripted` at `OUTRIDER_SCRIPTED_URL`.
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
    command = [str(Path(os.environ["OUTRIDER_NODE"]) / "node_modules" / ".bin" / program)]
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


def main() -> None:
    path = Path.cwd() / "fox.txt"
    path.unlink(missing_ok=True)
    {"claude-code": claude_code, "codex": codex}[sys.argv[1]](os.environ["OUTRIDER_SCRIPTED_URL"])
    assert path.read_text().strip() == SECRET
    print("three turns with two calls of tools")


if __name__ == "__main__":
    main()
