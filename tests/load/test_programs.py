"""The load programs against small real servers: that they end, and what they leave."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.target.engine_factory import build_engine
from services.target.process import TargetProcess
from services.target.settings import TargetSettings
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.serving import free_ports
from tests.load import draft as load_draft
from tests.load import gateway as load_gateway
from tests.load import target as load_target
from tests.load.gateway_stack import NUM_PORTS
from tests.services.draft.scripted_drafter import serving_scripted_draft


def _check_files(out: Path, name: str, num_requests: int) -> list[dict[str, float]]:
    assert (out / f"{name}.png").stat().st_size > 1000
    assert len((out / f"{name}.jsonl").read_text().splitlines()) == num_requests
    summaries: list[dict[str, float]] = json.loads((out / f"{name}.json").read_text())
    return summaries


async def test_load_target_measures_a_target_to_its_knee(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", "llama", TinyShape(vocab_size=24), seed=3)
    settings = TargetSettings(
        model_path=tmp_path / "model", port=0, max_total_tokens=512, device="cpu"
    )
    process = TargetProcess(build_engine(settings, lambda report: None), settings, "ab" * 32)
    await process.start()
    try:
        flags = load_target.parse(
            [
                *("--address", f"127.0.0.1:{process.port}", "--out", str(tmp_path)),
                *("--loads", "1,2", "--requests", "4", "--output-tokens", "4"),
                *("--prompt-tokens", "5", "--slo-first-ms", "60000", "--slo-gap-ms", "60000"),
            ]
        )
        text = await load_target.run(flags)
    finally:
        await process.stop(0.0)
    assert "knee: " in text
    for summary in _check_files(tmp_path, "target", 8):
        assert (summary["requests"], summary["errors"]) == (4, 0)
        assert summary["goodput_per_s"] == summary["requests_per_s"]
        assert summary["tokens_per_s"] == pytest.approx(4 * summary["requests_per_s"], rel=1e-3)


async def test_load_draft_measures_trees_in_an_open_loop(tmp_path: Path) -> None:
    async with serving_scripted_draft() as process:
        flags = load_draft.parse(
            [
                *("--address", f"127.0.0.1:{process.port}", "--out", str(tmp_path)),
                *("--loads", "200", "--requests", "6", "--arrivals", "burst"),
                *("--prompt-tokens", "4", "--vocab-size", "50"),
            ]
        )
        text = await asyncio.wait_for(load_draft.run(flags), 120.0)
    assert "requests a second (burst)" in text
    [summary] = _check_files(tmp_path, "draft", 6)
    assert summary["requests"] == 6


async def test_load_gateway_measures_cost_age_memory_and_what_resets_leave() -> None:
    port = next(free_ports(NUM_PORTS))
    flags = load_gateway.parse(
        [
            *("--port", str(port), "--streams", "8", "--clients", "1", "--duration-s", "0.4"),
            *("--requests", "20", "--disconnects", "10"),
        ]
    )
    figures = await load_gateway.run(flags)
    cost, latency, memory, left = figures.values()
    # A role, twenty steps, a finish and [DONE] for each; steps may be merged, none is lost.
    assert (cost["streams"], cost["failed"]) == (8, 0)
    assert 8 * 4 <= cost["chunks"] <= 8 * 23
    assert cost["floor_us_per_chunk"] >= 0.0
    assert 0 < latency["age_ms_p50"] <= latency["age_ms_p99"]
    assert 0 < latency["bare_age_ms_p50"] <= latency["bare_age_ms_p99"]
    assert (memory["requests"], memory["failed"]) == (20, 0)
    assert memory["resident_mb_late"] > 10
    assert left["disconnects"] == 10
    assert (left["running_request_count"], left["held_page_count"]) == (0, 0)
    assert (left["open_request_count"], left["live_generation_count"]) == (0, 0)
    assert not [each for each in load_gateway.problems(figures) if "memory" not in each]


def test_load_gateway_tells_what_must_not_be() -> None:
    figures = {
        "cost": {"failed": 2.0},
        "memory": {"failed": 0.0, "growth_percent": 6.5},
        "disconnects": {"settled_s": 30.0, "running_request_count": 0.0, "held_page_count": 7.0},
    }
    assert load_gateway.problems(figures) == [
        "cost: 2 requests failed",
        "memory: grew by 6.5 %; at most 5 % is flat",
        "disconnects: held_page_count is 7",
    ]
