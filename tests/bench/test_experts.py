"""The bench of mixtures of experts, at a tiny size on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from services.followers import Followers, rank_devices
from services.ranks import Ranks
from shared.kernels.exchange import PeerSlots
from shared.layers.experts import Experts
from shared.layers.tensor_group import TensorGroup
from shared.models.shard import Shard
from tests.bench import expert_rounds
from tests.bench import experts as program
from tests.bench.expert_floors import expected_hits, tensors_of, weight_bytes, weights_a_row
from tests.bench.expert_shapes import (
    DEEPSEEK_V3,
    GLM_45_AIR,
    QWEN3_30B,
    QWEN3_NEXT,
    SHAPES,
    ExpertShape,
    Prompt,
)
from tests.bench.experts import ShapeBench, follow_rank_0, shared_as

CPU = torch.device("cpu")
TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 16,
}


def _count(shape: ExpertShape) -> int:
    """Returns the layers of a bench: one of each kind, and two at least."""
    return max(2, shape.period)


def tiny(shape: ExpertShape) -> ExpertShape:
    own = {DEEPSEEK_V3.name: LATENT, QWEN3_NEXT.name: LINEAR}.get(shape.name, {})
    count = {"num_experts" if "num_experts" in shape.values else "n_routed_experts": 16}
    return replace(
        shape,
        values={**shape.values, **TINY, **count, **own},
        context=24,
        trees=(3, 5),
        prompt=Prompt(2, 20),
        layers_most=_count(shape),
    )


def _run_once(work: Callable[[], object], **_: int) -> float:
    work()
    return 2.0


def _bench(shape: ExpertShape) -> ShapeBench:
    return ShapeBench(tiny(shape), _count(shape), CPU, _run_once)


@pytest.mark.parametrize("name", SHAPES)
def test_every_row_of_a_shape_is_measured(name: str) -> None:
    lines = list(_bench(SHAPES[name]).lines())
    names = [f"plain decode, batch {count}" for count in SHAPES[name].batches]
    names += ["verify 3 nodes, batch 1", "verify 5 nodes, batch 1", "prefill 2 × 20"]
    assert [line.name for line in lines] == names
    assert all(line.floor_ms > 0.0 for line in lines)
    chosen = SHAPES[name].values.get("num_experts_per_tok")
    assert lines[0].note.startswith(f"experts hit {chosen}.0, {chosen}.0 expected")


def test_a_row_that_fails_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, real = _bench(QWEN3_30B), program.experts_hit
    calls = iter(range(9))

    def failing(*arguments: object) -> list[int]:
        if next(calls) == 1:
            raise RuntimeError("out of luck")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(program, "experts_hit", failing)
    assert len(list(bench.lines())) == 5
    assert "plain decode, batch 8 | failed" in capsys.readouterr().out


def test_floors_count_the_experts_that_are_hit() -> None:
    decoder = _bench(GLM_45_AIR).decoder
    # The first layer is dense.
    mixture = decoder.layers[1].mlp
    assert isinstance(mixture, Experts)
    experts = sum(tensor.nbytes for tensor in tensors_of((mixture.gate_up, mixture.down)))
    whole = sum(tensor.nbytes for tensor in tensors_of((decoder.layers, decoder.lm_head)))
    assert weight_bytes(decoder, [16]) == pytest.approx(whole)
    assert weight_bytes(decoder, [4]) == pytest.approx(whole - 0.75 * experts)


def test_memory_for_sums_over_gpus_is_no_weight() -> None:
    memory, turns = torch.zeros(64), torch.zeros(8)
    slots = PeerSlots(0, memory, turns, turns, slot_bytes=16, max_programs=1)
    group = TensorGroup(0, 2, lambda *_: None, slots)
    assert list(tensors_of((group, turns))) == [turns]


def test_a_row_multiplies_the_weights_of_its_experts() -> None:
    decoder = _bench(QWEN3_30B).decoder
    hidden, heads, width = 32, (4 + 2 * 2 + 4) * 16, 3 * 8 * 16
    matrices = hidden * (heads + width + 16)
    norms = 2 * hidden + (4 + 2) * 16
    assert weights_a_row(decoder) == pytest.approx(2 * (matrices + norms))


def test_rows_hit_more_experts_the_more_they_are() -> None:
    assert expected_hits(128, 8, 1) == pytest.approx(8.0)
    assert expected_hits(128, 8, 64) == pytest.approx(128 * (1 - (120 / 128) ** 64))


@pytest.mark.parametrize(
    ("name", "has_rounds"), [*((name, True) for name in SHAPES), (next(iter(SHAPES)), False)]
)
def test_a_shape_is_measured_from_its_command_on(
    name: str, has_rounds: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, with the sizes of its memory; the forwards run on the CPU."""

    def on_cpu(shape: ExpertShape, count: int, *_: object, has_rounds: bool) -> ShapeBench:
        return ShapeBench(shape, count, CPU, _run_once, has_rounds=has_rounds)

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * 2**30, 80 * 2**30))
    monkeypatch.setattr(expert_rounds, "NUM_RUNS", 1)
    monkeypatch.setattr(expert_rounds, "BATCHES", (1, 8))
    monkeypatch.setattr(program, "ShapeBench", on_cpu)
    monkeypatch.setattr(program, "_kernel_times", lambda work: "failed" if work() is None else "")
    shape = tiny(SHAPES[name])
    program.measure(shape, Shard(0, 1), has_kernels=True, has_rounds=has_rounds)
    printed, _, rounds = capsys.readouterr().out.partition("rounds with its own")
    if has_rounds and shape.mtp is None:
        assert "no rounds" in printed
    elif has_rounds:
        assert f", {_count(shape)} of {_count(shape)} layers" in rounds
        assert rounds.count("\n| ") == 1 + len(expert_rounds.BATCHES)
        assert "failed" not in rounds
    assert f"{_count(shape)} of {_count(shape)} layers" in printed
    assert printed.count("\n| ") == 1 + len(shape.batches) + len(shape.trees) + 1
    assert f"batch {max(shape.batches)}: " in printed
    assert "failed" not in printed


@pytest.mark.parametrize("name", SHAPES)
def test_published_shapes_are_read(name: str) -> None:
    shape = SHAPES[name]
    assert shape.config(4).num_layers == 4
    assert program.num_layers(tiny(shape), CPU) == _count(shape)


@pytest.mark.parametrize("spreads_sequences", [False, True])
def test_processes_that_share_a_model_compute_every_line(spreads_sequences: bool) -> None:
    shape = tiny(QWEN3_30B)
    shard = Shard(0, 2, True, spreads_sequences)
    work = partial(follow_rank_0, shape, 2, _run_once, shard)
    ranks = Ranks(2)
    followers = Followers(work, ranks, rank_devices("cpu", ranks), service="bench")
    try:
        group = shared_as(shard, followers.group)
        bench = ShapeBench(shape, 2, CPU, _run_once, group, followers.leader)
        whole = ShapeBench(shape, 2, CPU, _run_once)
        names = [line.name for line in bench.lines()]
        assert names == [line.name for line in whole.lines()]
        experts, own = whole.decoder.layers[0].mlp, bench.decoder.layers[0].mlp
        assert isinstance(experts, Experts)
        assert isinstance(own, Experts)
        assert own.gate_up.num_experts == experts.gate_up.num_experts / 2
        heads, own_heads = (each.decoder.layers[0].attention.shape for each in (whole, bench))
        assert own_heads.num_heads == heads.num_heads / (1 if spreads_sequences else 2)
        # All choose experts by the same numbers.
        assert torch.equal(own.router.weight.dense(), experts.router.weight.dense())
    finally:
        followers.stop()
