"""A gateway in front of a target that says what a script says: for agents, whose prompts alone are
longer than the demo's context. `python -m tests.clients.scripted PORT FOLDER`.

The script forces a session of several turns: a file is written by a tool, read by another, and the
last answer ends it. Which tools there are is the agent's: it is told by its prompt.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.settings import DEMO_MODEL
from shared.model_files import tokenizer_sha256
from shared.pb.outrider.target.v1 import target_service_pb2 as pb
from shared.text import Tokenizer
from tests.clients.with_agents import LAST_WORDS, SECRET
from tests.helpers.fake_target import FakeTarget, Steps

_CONTEXT = 262_144
_TOKENS_A_STEP = 3
_RESULT = "<|im_start|>tool\n"


def call(name: str, arguments: dict[str, Any]) -> str:
    """Returns a call as the demo's format has it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said(prompt: str, path: Path) -> str:
    """Returns the next answer to an agent's prompt."""
    num_results = prompt.count(_RESULT)
    file = str(path)
    if "*SEARCH/REPLACE*" in prompt:  # aider, which knows no tools
        return f"{path.name}\n```\n<<<<<<< SEARCH\n=======\n{SECRET}\n>>>>>>> REPLACE\n```\n"
    if '"name": "exec_command"' in prompt:  # Codex
        commands = (f"echo {SECRET} > {path}", f"cat {path}")
        turns = [call("exec_command", {"cmd": command}) for command in commands]
    elif '"name": "write"' in prompt and '"name": "read"' in prompt:  # opencode
        turns = [
            call("write", {"filePath": file, "content": SECRET}),
            call("read", {"filePath": file}),
        ]
    elif '"name": "Write"' in prompt and '"name": "Read"' in prompt:
        key = "filepath" if '"filepath"' in prompt else "file_path"  # Continue, Claude Code
        turns = [call("Write", {key: file, "content": SECRET}), call("Read", {key: file})]
    elif '"name": "note"' in prompt:  # the SDKs
        turns = [call("note", {"text": SECRET})]
    elif "as JSON" in prompt:
        return json.dumps({"name": "fox", "legs": 4})
    else:  # a title for the session, and the like
        turns = []
    return turns[num_results] if num_results < len(turns) else LAST_WORDS


async def serve(port: int, folder: Path) -> None:
    """Serves until SIGTERM."""
    tokenizer = Tokenizer.read(DEMO_MODEL)
    (end,) = tokenizer.ids_of(["<|im_end|>"])
    path = folder / "fox.txt"

    def reply(request: pb.GenerateRequest) -> Steps:
        prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        ids: Sequence[int] = [*tokenizer._encode(said(prompt, path), False), end]
        return [ids[i : i + _TOKENS_A_STEP] for i in range(0, len(ids), _TOKENS_A_STEP)]

    target = FakeTarget(
        tokenizer_sha256(DEMO_MODEL),
        reply,
        model_id="demo",
        max_context_tokens=_CONTEXT,
        vocab_size=8192,
        eos_token_ids=(end,),
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with target:
        gateway = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway", "--port", str(port), "--target", target.address),
            *("--tokenizer", str(DEMO_MODEL), "--response-store", "memory"),
        )
        await stop.wait()
        gateway.terminate()
        await gateway.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
