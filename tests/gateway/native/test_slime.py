"""The bodies that slime's engine and rollout send, in their order, a whole step of training long.

Read from THUDM/slime: slime/backends/sglang_utils/sglang_engine.py and server_control.py,
slime/rollout/sglang_rollout.py. Its colocated updates pickle tensors, which are refused; what it
sends from other hosts goes through a group, or through a folder.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.driving import eventually
from tests.helpers.rollout_server import Server, rollout_server
from tests.helpers.step_hold import hold_outputs

SAMPLING: dict[str, Any] = {
    "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "stop": None,
    "stop_token_ids": None, "skip_special_tokens": False, "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}  # fmt: skip
PROMPT = [10, 20, 30, 40, 50, 60, 70]


@pytest.fixture(scope="module")
def folders(old: Path, new: Path) -> tuple[Path, Path]:
    return old, new


async def _rollout(server: Server, tokens: list[int], drawn: int = 0, **more: Any) -> Any:
    params = {**SAMPLING, "sampling_seed": 5, "ignore_eos": True, **more}
    params["max_new_tokens"] -= drawn
    body = {"sampling_params": params, "return_logprob": True, "input_ids": tokens}
    return await server.post("/generate", body)


def _drawn(answer: Any) -> list[int]:
    """As slime reads tokens: from the log probabilities."""
    return [item[1] for item in answer["meta_info"]["output_token_logprobs"]]


async def _is_idle(server: Server) -> bool:
    found = await server.get("/v1/loads", include="core,disagg,queues")
    return not any(each["num_running_reqs"] + each["num_waiting_reqs"] for each in found["loads"])


async def test_a_step_of_training(folders: tuple[Path, Path]) -> None:
    old, new = folders
    async with rollout_server(new) as other:
        expected = _drawn(await _rollout(other, PROMPT))
    async with rollout_server(old) as server:
        # An engine that is there already is asked what it is.
        await server.get("/health_generate")
        await server.get("/flush_cache")
        info = await server.get("/get_server_info")
        parallel = {name: info[name] for name in ("tp_size", "pp_size", "ep_size")}
        assert parallel == {"tp_size": 1, "pp_size": 1, "ep_size": 1}

        # Rollouts; the last ones are cut off, and go on in the next step.
        whole = _drawn(await _rollout(server, PROMPT, max_new_tokens=100))
        assert len(whole) == 100
        [link] = server.gateway.pool.links
        num_before = link.num_tokens
        hold_outputs(server.targets[0])
        asking = asyncio.create_task(_rollout(server, PROMPT, max_new_tokens=100))
        await eventually(lambda: link.num_tokens > num_before)
        while not await _is_idle(server):
            await server.post("/abort_request", {"abort_all": True})
        partial = await asking
        assert partial["meta_info"]["finish_reason"]["type"] == "abort"
        tokens = _drawn(partial)
        assert 0 < len(tokens) < 100
        rest = await _rollout(server, [*PROMPT, *tokens], len(tokens), max_new_tokens=100)
        assert tokens + _drawn(rest) == whole

        # The engine sleeps while the trainer computes.
        await server.get("/flush_cache")
        await server.post("/release_memory_occupation", {})
        await server.post("/resume_memory_occupation", {"tags": ["weights"]})
        await server.post("/pause_generation", {})
        await server.get("/flush_cache")
        body = {"model_path": str(new), "weight_version": "1"}
        await server.post("/update_weights_from_disk", body)
        await server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        await server.post("/continue_generation", {})
        assert (await server.get("/get_weight_version"))["weight_version"] == "1"
        await server.post("/weights_checker", {"action": "checksum"})
        answer = await _rollout(server, PROMPT)
        assert _drawn(answer) == expected
        assert answer["meta_info"]["weight_version"] == "1"
        # A group of the step before is left first, whether there was one or not.
        gone = await server.post("/destroy_weights_update_group", {"group_name": "s"}, status=400)
        assert gone["error"]["code"] == "weight_group_missing"
