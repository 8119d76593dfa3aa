"""A draft whose model two processes hold: accepted tokens, and the plain answer whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.driving import eventually
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.followers import follower_of
from tests.helpers.served import MAX_TOKENS, PROMPTS, ROOT, draft_process, serving_target
from tests.helpers.step_hold import hold_outputs

AHEAD = ("--speculative-outcome-budget", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a draft that is the same model."""
    shape = TinyShape(vocab_size=300)
    folder = tmp_path_factory.mktemp("model")
    return write_checkpoint(folder, "llama", shape, seed=3, with_tokenizer=True)


def _of_two(folder: Path) -> tuple[str, ...]:
    """Returns the flags of a draft of two processes."""
    return (
        *("--device", "cpu", "--tp-size", "2", "--max-total-tokens", "2048"),
        *("--speculative-draft-model-path", str(folder)),
    )


@pytest.mark.skipif(sys.platform != "linux", reason="finds the follower in /proc")
async def test_a_draft_of_two_processes_speeds_up_and_may_lose_one(folder: Path) -> None:
    async with serving_target(folder) as target:
        expected = await target.outputs(1.0)
        async with draft_process(target, *_of_two(folder), *AHEAD) as draft:
            await target.until_attached(1)
            assert await target.outputs(1.0) == expected
            tokens, stats = await target.generate(PROMPTS[0], 1.0)
            assert tokens == expected[0]
            # The draft is the target: what it proposes is what the target draws.
            assert stats.accepted_token_count > MAX_TOKENS // 2
            hold = hold_outputs(target.process)
            running = asyncio.create_task(target.outputs(1.0))
            await eventually(lambda: hold.is_held)
            os.kill(follower_of(draft.pid), signal.SIGKILL)
            hold.release()
            assert await running == expected
            assert draft.stderr is not None
            messages = (await draft.stderr.read()).decode()
            assert await draft.wait() == 1
        assert "draft-1 died; without its part of the model this draft ends" in messages
        await target.until_attached(0)
        assert await target.outputs(1.0) == expected


def test_a_draft_that_cannot_serve_ends_with_its_followers(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "services.draft", *_of_two(folder), "--port", str(port)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


async def test_a_draft_that_is_told_to_ends_with_its_followers(folder: Path) -> None:
    async with (
        serving_target(folder) as target,
        draft_process(target, *_of_two(folder), *AHEAD) as draft,
    ):
        await target.until_attached(1)
        draft.send_signal(signal.SIGTERM)
        assert draft.stderr is not None
        # The follower has this end of the pipe as well, so it is read once both have ended.
        assert "leaked" not in (await draft.stderr.read()).decode()
        assert await draft.wait() == 0
