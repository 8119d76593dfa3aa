"""Targets whose model is held by several processes give the tokens of one process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services import followers
from services.ranks import Ranks
from services.target.engine import Engine
from services.target.engine_factory import build_runner
from services.target.settings import TargetSettings
from services.target.step_report import StepReport
from services.target.tensor_parallel import start_followers
from shared.errors import SettingsError
from shared.layers.decoder_layer import Mlp
from shared.model_options import KvDtype, Quantisation
from shared.models.config import ModelConfig
from shared.models.shard import Shard
from shared.runtime.runner import ModelRunner
from shared.tokens import SamplingParams
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.engines import (
    VOCAB_SIZE,
    ScriptedDraft,
    engine_over,
    leases_over,
    oracle_trees,
    random_trees,
    request,
    run,
    shuffled_drops,
)
from tests.helpers.followers import follower_of
from tests.helpers.mixtures import MIXTURES

PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11], [3] * 12)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(seed=7),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
}
SHAPE = TinyShape(vocab_size=VOCAB_SIZE)


def _settings(folder: Path, **changes: object) -> TargetSettings:
    settings = TargetSettings(
        model_path=folder, device="cpu", page_size=4, max_total_tokens=800, context_length=120
    )
    return replace(settings, **changes)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LATENT = MIXTURES["deepseek_v3"] | {"n_group": 1}
SPREAD = {"enable_dp_attention": True, "dp_size": 2}
IN_8_BITS = {"quantization": Quantisation.FP8, "kv_cache_dtype": KvDtype.FP8_E4M3}
# What is cut how: plain heads; one key head for two processes, norms of heads, biases and 8 bits;
# sequences, beside experts that are whole, and beside some channels of each; layers; layers and
# heads; layers and sequences.
MODELS = {
    "llama": ("llama", SHAPE, {}, Ranks(2)),
    "qwen3 in 8 bits": (
        "qwen3",
        replace(SHAPE, num_kv_heads=1, tie_word_embeddings=True),
        IN_8_BITS,
        Ranks(2),
    ),
    "sequences of qwen3-moe in 8 bits": (
        "qwen3_moe",
        replace(SHAPE, overrides=EXPERTS),
        IN_8_BITS | {"ep_size": 2} | SPREAD,
        Ranks(2),
    ),
    "sequences of deepseek": (
        "deepseek_v3",
        replace(SHAPE, num_kv_heads=4, overrides=LATENT),
        SPREAD,
        Ranks(2),
    ),
    "stages of a norm over all heads": ("olmo2", SHAPE, {}, Ranks(1, 2)),
    "stages in 8 bits": ("qwen3", SHAPE, IN_8_BITS, Ranks(2, 2)),
    "stages and sequences of deepseek": (
        "deepseek_v3",
        replace(SHAPE, num_kv_heads=4, overrides=LATENT),
        SPREAD | {"ep_size": 2},
        Ranks(2, 2),
    ),
}
OF_ONE = {"enable_dp_attention": False, "dp_size": 1, "ep_size": 1}


@pytest.fixture(scope="module", params=MODELS)
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """Runners of one and of several processes."""
    family, shape, changes, ranks = MODELS[request.param]
    folder = write_checkpoint(tmp_path_factory.mktemp("target"), family, shape, seed=3)
    whole = build_runner(_settings(folder, **(changes | OF_ONE))).runner
    settings = _settings(folder, tp_size=ranks.tp_size, pp_size=ranks.pp_size, **changes)
    others = start_followers(settings)
    try:
        cut = build_runner(settings, others.group, others.leader).runner
        yield whole, cut
    finally:
        others.stop()


def _engine(runner: ModelRunner) -> Engine:
    return engine_over(runner, leases_over(runner.pool), max_context_tokens=120)


def _outputs(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    requests = [
        request(prompt, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(PROMPTS)
    ]
    collector = run(engine, requests)
    return [collector.token_ids(key) for key in range(len(PROMPTS))]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_processes_write_what_one_writes_with_every_draft(
    name: str, runners: tuple[ModelRunner, ModelRunner]
) -> None:
    whole, cut = runners
    sampling = SAMPLINGS[name]
    expected = _outputs(_engine(whole), sampling)
    assert _outputs(_engine(cut), sampling) == expected
    wholes = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=True)]
    scripts = (
        oracle_trees(wholes, 0, quality=1.0),
        oracle_trees(wholes, 1, quality=0.5),
        random_trees(seed=2),
    )
    for seed, script in enumerate(scripts):
        engine = _engine(cut)
        ScriptedDraft(engine, script, disturb=shuffled_drops(seed)).attach()
        assert _outputs(engine, sampling) == expected


def test_each_process_holds_a_part(runners: tuple[ModelRunner, ModelRunner]) -> None:
    whole, cut = (runner.decoder for runner in runners)
    ranks = Ranks(cut.shard.size, cut.shard.num_stages)
    assert len(cut.embedding) == len(whole.embedding) // ranks.size
    assert len(cut.layers) == len(whole.layers) // ranks.pp_size
    many, few = (each.layers[0].attention.shape for each in (whole, cut))
    pool = runners[1].pool
    if pool.num_ranks == 1:
        assert few.num_heads == many.num_heads // ranks.tp_size
        assert few.num_kv_heads == max(1, many.num_kv_heads // ranks.tp_size)
    else:
        assert few == many
    if isinstance(cut.layers[0].mlp, Mlp):
        assert isinstance(whole.layers[0].mlp, Mlp)
        down = cut.layers[0].mlp.down.dense()
        assert down.shape[1] * ranks.tp_size == SHAPE.intermediate_size
        assert torch.equal(down, whole.layers[0].mlp.down.dense()[:, : down.shape[1]])
    assert runners[0].pool.num_pages == pool.num_pages


@pytest.mark.parametrize("runners", [m for m in MODELS if "sequences" in m], indirect=True)
def test_ranks_that_are_full_change_no_token(runners: tuple[ModelRunner, ModelRunner]) -> None:
    """One has room for two sequences, the other one for the longest of them."""
    whole, cut = runners
    sampling = SamplingParams(seed=3)
    expected = _outputs(_engine(whole), sampling)
    leases, reports = leases_over(cut.pool, (17, 11)), list[StepReport]()
    engine = engine_over(cut, leases, max_context_tokens=120, on_step=reports.append)
    assert _outputs(engine, sampling) == expected
    assert sum(report.num_preempted for report in reports) > 0


def _problems(size: int, **changes: int) -> Sequence[str]:
    folder_config = ModelConfig.from_folder(Path("shared/demo/target"))
    config = replace(folder_config, **changes)  # type: ignore[arg-type]
    return Shard(0, size).problems(config)


def test_sizes_that_do_not_divide_are_named() -> None:
    assert _problems(2) == ()
    [heads, wide, vocabulary] = _problems(3)
    assert heads == "--tp-size is 3; the model's num_attention_heads, 4, is not a multiple of it"
    assert "intermediate_size, 1280" in wide
    assert "vocab_size, 8192" in vocabulary
    [keys] = _problems(4, num_heads=12, num_kv_heads=6)
    assert "must divide the model's num_key_value_heads, 6, or be a multiple" in keys


def test_a_size_that_does_not_fit_is_refused_before_processes_start(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", SHAPE)
    with pytest.raises(SettingsError, match="num_attention_heads, 4"):
        start_followers(_settings(folder, tp_size=3))
    with pytest.raises(SettingsError, match="--pp-size is 4; the model has 3 layers"):
        start_followers(_settings(folder, pp_size=4))


def test_more_processes_than_gpus_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    folder = write_checkpoint(tmp_path, "llama", SHAPE)
    with pytest.raises(SettingsError, match="this host has 1 GPUs"):
        start_followers(_settings(folder, tp_size=2, device="cuda:0"))
    message = "--tp-size is 2 and --pp-size 2, together 4, from cuda:0 on; this host has 1 GPUs"
    with pytest.raises(SettingsError, match=message):
        start_followers(_settings(folder, tp_size=2, pp_size=2, device="cuda:0"))


def test_followers_do_not_outlive_a_group_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: object, **place: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(followers, "open_group", refuse)
    folder, others = write_checkpoint(tmp_path, "llama", SHAPE), multiprocessing.active_children()
    with pytest.raises(RuntimeError, match="no network"):
        start_followers(_settings(folder, tp_size=2))
    assert set(multiprocessing.active_children()) <= set(others)


def _target_of_two(folder: Path, port: int = 0, flag: str = "--tp-size") -> list[str]:
    """Returns the command of a target that two processes hold."""
    write_checkpoint(folder, "llama", TinyShape(), with_tokenizer=True)
    return [
        sys.executable, "-m", "services.target", "--model-path", str(folder), "--device", "cpu",
        flag, "2", "--host", "127.0.0.1", "--port", str(port), "--max-total-tokens", "512",
    ]  # fmt: skip


def test_a_target_that_cannot_serve_ends_with_its_followers(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            _target_of_two(tmp_path, port), capture_output=True, text=True, check=False
        )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ended.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="finds the follower in /proc")
@pytest.mark.parametrize("flag", ["--tp-size", "--pp-size"])
def test_a_target_ends_with_its_follower(flag: str, tmp_path: Path) -> None:
    command = _target_of_two(tmp_path, flag=flag)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as target:
        assert target.stderr is not None
        try:
            # The last line before it serves.
            assert any("KV pages of" in line for line in target.stderr)
            os.kill(follower_of(target.pid), signal.SIGKILL)
            messages = target.stderr.read()
            assert target.wait(60) == 1
        finally:
            target.kill()
    assert "target-1 died; without its part of the model this target ends" in messages
