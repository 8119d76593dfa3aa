"""A trainer's calls over HTTP, in slime's order, to a gateway in front of two real targets."""

from __future__ import annotations

import asyncio
import base64
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from gateway.api_keys import KeyLimits, Quotas, Scope, keys_from_texts
from tests.gateway.driving import eventually
from tests.helpers.rollout_server import ASK, client_from, rollout_server
from tests.helpers.step_hold import hold_outputs


async def test_a_step_of_training_in_slimes_order_of_calls(old: Path, new: Path) -> None:
    async with rollout_server(new) as other:
        expected = (await other.ask())["output_ids"]
    async with rollout_server(old) as server:
        first = await server.ask()
        short = {"prompt": [1, 2, 3], "max_tokens": 1}
        fingerprint = (await server.post("/v1/completions", short))["system_fingerprint"]
        assert first["meta_info"]["weight_version"] == "default"
        assert "weight_version_spans" not in first["meta_info"]
        await server.get("/health_generate")
        await server.post("/pause_generation", {})
        assert (await server.get("/flush_cache"))["success"]
        await server.post("/begin_weight_update", {"selector": "all"})
        weights = load_file(new / "model.safetensors")
        names = sorted(weights)
        for part in (names[::2], names[1::2]):
            content = save({name: weights[name] for name in part})
            body = {
                "serialized_named_tensors": [base64.b64encode(content).decode()],
                "load_format": "safetensors", "flush_cache": False, "weight_version": "1",
            }  # fmt: skip
            await server.post("/update_weights_from_tensor", body)
        ended = await server.post("/end_weight_update", {"selector": "all"})
        assert ended["weight_version"] == "1"
        await server.post("/continue_generation", {})
        after = await server.ask()
        assert after["output_ids"] == expected != first["output_ids"]
        assert after["meta_info"]["weight_version"] == "1"
        assert (await server.post("/v1/completions", short))["system_fingerprint"] != fingerprint
        assert (await server.get("/model_info"))["weight_version"] == "1"
        info = await server.get("/server_info")
        shown = {
            name: info[name]
            for name in ("tp_size", "pp_size", "ep_size", "enable_memory_saver", "weight_version")
        }
        assert shown == {
            "tp_size": 1, "pp_size": 1, "ep_size": 1, "enable_memory_saver": True,
            "weight_version": "1",
        }  # fmt: skip
        assert info["max_total_num_tokens"] == 1024
        (load,) = (await server.get("/v1/loads"))["loads"]
        assert (load["max_total_num_tokens"], load["token_usage"]) == (1024, 0.0)


@pytest.mark.parametrize("is_rolling", [False, True])
async def test_several_targets_are_updated_at_once_or_one_after_the_other(
    is_rolling: bool, old: Path, new: Path
) -> None:
    async with rollout_server(old, count=2) as server:
        asking = [asyncio.create_task(server.ask()) for _ in range(6)]
        body = {"model_path": str(new), "weight_version": "7", "rolling": is_rolling}
        updated = await server.post("/update_weights_from_disk", body)
        assert [each["weight_version"] for each in updated["targets"].values()] == ["7", "7"]
        assert await server.versions() == ["7", "7"]
        answers = await asyncio.gather(*asking)
        assert all(len(each["output_ids"]) == 24 for each in answers), "a request was lost"


async def test_no_target_takes_what_one_of_them_refuses(old: Path, new: Path) -> None:
    async with rollout_server(old, count=2) as server:
        expected = (await server.ask())["output_ids"]
        body = {"model_path": str(new / "nowhere"), "weight_version": "7"}
        refused = await server.post("/update_weights_from_disk", body, status=400)
        assert (refused["success"], refused["error"]["type"]) == (False, "invalid_request_error")
        assert "which is no folder here" in refused["message"]
        assert refused["error"]["code"] == "checkpoint_invalid"
        # The second is busy with an update that somebody has begun there.
        admin = server.gateway.target_admins()[1]
        await admin.begin()
        body["model_path"] = str(new)
        refused = await server.post("/update_weights_from_disk", body, status=400)
        assert refused["message"].startswith(f"{admin.address}: an update was begun")
        assert await server.versions() == ["default", "default"]
        await admin.end("", drop=True)
        assert (await server.ask())["output_ids"] == expected
        await server.post("/update_weights_from_disk", body)
        assert await server.versions() == ["7", "7"]


async def test_the_history_tells_when_weights_were_replaced(old: Path, new: Path) -> None:
    async with rollout_server(old, count=2) as server:
        before = await server.get("/speculation_history")
        assert before["weight_versions"] == ["default"]
        assert before["weight_changes"] == []
        begin_s = time.time()
        await server.post("/update_weights_from_disk", {"model_path": str(new)})
        after = await server.get("/speculation_history", model="tiny")
        assert after["weight_versions"] == ["1"]
        changes = after["weight_changes"]
        assert [(each["algorithm"], each["weight_version"]) for each in changes] == [
            (None, "1")
        ] * 2
        assert begin_s <= changes[0]["time"] <= changes[1]["time"] <= time.time()
        await server.get("/speculation_history", status=404, model="other")


async def test_an_abort_answers_with_what_was_drawn(old: Path) -> None:
    async with rollout_server(old) as server:
        hold_outputs(server.targets[0])
        long = {**ASK["sampling_params"], "max_new_tokens": 100}
        asking = asyncio.create_task(server.ask(sampling_params=long))
        await eventually(lambda: server.gateway.pool.links[0].num_tokens > 0)
        paused = await server.post("/pause_generation", {"mode": "abort"})
        assert paused["success"]
        answer = await asking
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        drawn = answer["output_ids"]
        assert 0 < len(drawn) < 100
        waiting = asyncio.create_task(server.ask(sampling_params=long))
        await eventually(lambda: server.gateway.pool.links[0].num_live == 1)
        assert not waiting.done()
        await server.post("/continue_generation", {})
        whole = (await waiting)["output_ids"]
        assert whole[: len(drawn)] == drawn
        # A partial rollout is resumed with its own tokens and its seed, bit for bit.
        rest = {**long, "max_new_tokens": 100 - len(drawn)}
        resumed = await server.ask(input_ids=[*ASK["input_ids"], *drawn], sampling_params=rest)
        assert drawn + resumed["output_ids"] == whole


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_request_goes_on_across_an_update_and_tells_its_spans(
    mode: str, old: Path, new: Path
) -> None:
    async with rollout_server(old) as server:
        hold_outputs(server.targets[0])
        long = {**ASK["sampling_params"], "max_new_tokens": 100}
        asking = asyncio.create_task(server.ask(sampling_params=long))
        await eventually(lambda: server.gateway.pool.links[0].num_tokens > 0)
        await server.post("/pause_generation", {"mode": mode})
        await server.post("/update_weights_from_disk", {"model_path": str(new)})
        await server.post("/continue_generation", {})
        info = (await asking)["meta_info"]
        (first, start), (second, place) = info["weight_version_spans"]
        assert (first, start, second, info["weight_version"]) == ("default", 0, "1", "1")
        assert 0 < place < 100 == info["completion_tokens"]


async def test_log_probabilities_are_those_of_the_law_at_the_temperature(old: Path) -> None:
    from tests.helpers.checkpoints import build_model

    model = build_model("llama", seed=3)
    async with rollout_server(old) as server:
        for shaped in ({}, {"logit_bias": {"5": 3.0}}, {"temperature": 0.0}):
            params = {**ASK["sampling_params"], **shaped}
            answer = await server.ask(
                sampling_params=params, return_logprob=True, logprob_start_len=0
            )
            info, tokens = answer["meta_info"], answer["output_ids"]
            ids = [*ASK["input_ids"], *tokens]
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0]
            log_probs = logits.clone()
            log_probs[:, 5] += shaped.get("logit_bias", {}).get("5", 0.0)
            log_probs = (log_probs / (params["temperature"] or 1.0)).log_softmax(-1)
            place = len(ASK["input_ids"]) - 1
            for step, (log_prob, token, _) in enumerate(info["output_token_logprobs"]):
                assert log_prob == pytest.approx(float(log_probs[place + step, token]), abs=1e-4)
            # The prompt was not drawn: SGLang gives it the model's own.
            raw = logits.log_softmax(-1)
            for step, (log_prob, token, _) in enumerate(info["input_token_logprobs"][1:]):
                assert log_prob == pytest.approx(float(raw[step, token]), abs=1e-4)


async def test_memory_is_released_and_resumed_around_a_step(old: Path) -> None:
    async with rollout_server(old) as server:
        expected = (await server.ask())["output_ids"]
        released = await server.post("/release_memory_occupation", {})
        assert released["freed_bytes"] > 0
        assert released["kept"] == []
        kept = await server.post("/release_memory_occupation", {"tags": ["cuda_graph"]})
        assert kept["kept"] == ["cuda_graph: graphs stay captured"]
        refused = await server.post(
            "/update_weights_from_disk", {"model_path": str(old)}, status=400
        )
        assert "memory of kv_cache, weights is released" in refused["message"]
        await server.post("/resume_memory_occupation", {"tags": ["weights"]})
        await server.post("/update_weights_from_disk", {"model_path": str(old)})
        await server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert (await server.ask())["output_ids"] == expected
        await server.post("/release_memory_occupation", {"tags": ["disk"]}, status=400)


async def test_a_checker_names_what_changed(old: Path, new: Path) -> None:
    async with rollout_server(old) as server:
        await server.post("/weights_checker", {"action": "snapshot"})
        await server.post("/weights_checker", {"action": "reset_tensors"})
        await server.post("/update_weights_from_disk", {"model_path": str(old)})
        await server.post("/weights_checker", {"action": "compare"})
        sums = (await server.post("/weights_checker", {"action": "checksum"}))["checksums"]
        assert len(sums) == 1
        await server.post("/update_weights_from_disk", {"model_path": str(new)})
        changed = await server.post("/weights_checker", {"action": "compare"}, status=400)
        assert "embedding" in changed["message"]
        await server.post("/weights_checker", {"action": "guess"}, status=400)


async def test_what_is_wrong_with_a_body_is_named(old: Path) -> None:
    async with rollout_server(old) as server:
        tensor = {"serialized_named_tensors": ["gASV"]}
        refused = await server.post("/update_weights_from_tensor", tensor, status=400)
        assert refused["error"]["code"] == "weights_pickled"
        cases = (
            ("/update_weights_from_tensor", {**tensor, "load_format": "safetensors"}),
            ("/update_weights_from_tensor", {
                "serialized_named_tensors": ["?"], "load_format": "safetensors"}),
            ("/update_weights_from_disk", {"model_path": "x", "load_format": "flash_rl"}),
            ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": []}),
            ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
            ("/init_weights_update_group", {
                "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0,
                "world_size": 1}),
            ("/destroy_weights_update_group", {"group_name": "nobody"}),
            ("/begin_weight_update", {"selector": "draft"}),
            ("/end_weight_update", {}),
            ("/pause_generation", {"mode": "stop"}),
        )  # fmt: skip
        for path, body in cases:
            assert not (await server.post(path, body, status=400))["success"]
        assert await server.versions() == ["default"]


async def test_only_operators_of_this_host_change_weights(old: Path, new: Path) -> None:
    async with rollout_server(old) as server:
        body = {"model_path": str(new)}
        user, operator = keys_from_texts(("user:u", "op:o"), KeyLimits())
        quotas = Quotas((user, replace(operator, scope=Scope.OPERATE)))
        kept = replace(server.gateway, quotas=quotas)
        settings = replace(kept.settings, remote_operators=True, api_key=("op:o",))
        opened = replace(kept, settings=settings)
        for gateway, host, key, status in (
            (server.gateway, "192.0.2.7", "", 403),
            (kept, "127.0.0.1", "u", 403),
            (kept, "192.0.2.7", "o", 403),
            (opened, "192.0.2.7", "u", 403),
            (opened, "192.0.2.7", "o", 200),
            (kept, "127.0.0.1", "o", 200),
        ):
            async with client_from(gateway, host, key) as client:
                response = await client.post("/update_weights_from_disk", json=body)
            assert response.status_code == status, response.text
