"""Rounds of mixtures of experts with their own next-token layers, at a tiny size on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from services.target.rounds import round_shapes
from shared.layers.experts import Experts
from shared.models.heads.mtp_loader import MtpLayer
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import RoundSampling
from shared.runtime.runner import ModelRunner
from tests.bench import expert_rounds, simulated_rounds
from tests.bench.expert_floors import StepFloor, level_bytes, tensors_of
from tests.bench.expert_rounds import CHAIN, HEADER, PolicyRun, RoundsLine
from tests.bench.expert_shapes import GLM_45_AIR, SHAPES, ExpertShape
from tests.bench.experts import ShapeBench
from tests.bench.simulated_rounds import NUM_ROUNDS, level_rate, spread_counts
from tests.bench.test_experts import tiny

CPU = torch.device("cpu")
WITH_MTP = [name for name, shape in SHAPES.items() if shape.mtp is not None]
PLAIN_MS = 10.0


@pytest.fixture(autouse=True)
def _few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rounds, "NUM_RUNS", 1)
    monkeypatch.setattr(expert_rounds, "BATCHES", (1, 8))


@dataclass
class World:
    """Time that passes with steps alone.

    Attributes:
        round_ms: of a round of any shape.
    """

    round_ms: float
    now_s: float = field(default=0.0)

    def clock(self, work: Callable[[], object], **_: int) -> float:
        began_s = self.now_s
        work()
        return 1e3 * (self.now_s - began_s)

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the time of these steps pass."""
        self._slow(monkeypatch, ModelRunner, "run", PLAIN_MS)
        for name in ("launch", "run_empty"):
            self._slow(monkeypatch, RoundRunner, name, self.round_ms)
        for module in (simulated_rounds, round_shapes):
            clock = SimpleNamespace(perf_counter=lambda: self.now_s)
            monkeypatch.setattr(module, "time", clock)

    def _slow(self, monkeypatch: pytest.MonkeyPatch, kind: type, name: str, took_ms: float) -> None:
        real = getattr(kind, name)

        def slowed(*given: object, **options: object) -> object:
            self.now_s += took_ms / 1e3
            return real(*given, **options)

        monkeypatch.setattr(kind, name, slowed)


def rounds_bench(
    shape: ExpertShape, clock: Callable[..., float], device: torch.device = CPU
) -> ShapeBench:
    """Returns the bench of a tiny shape with its next-token layer."""
    torch.manual_seed(0)  # of the weights, which decide how many experts rows hit
    shape = tiny(shape)
    return ShapeBench(shape, shape.layers_most, device, clock, has_rounds=True)


def _lines(
    shape: ExpertShape, round_ms: float, monkeypatch: pytest.MonkeyPatch
) -> list[RoundsLine]:
    world = World(round_ms)
    world.enter(monkeypatch)
    lines = list(rounds_bench(shape, world.clock).rounds())
    measured = [line for line in lines if isinstance(line, RoundsLine)]
    assert [line.batch for line in measured] == [*expert_rounds.BATCHES], lines
    return measured


@pytest.mark.parametrize("name", WITH_MTP)
def test_rounds_commit_as_many_tokens_as_simulated_and_are_chosen_when_they_pay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in _lines(SHAPES[name], 16.0, monkeypatch):
        assert line.num_tokens == 2.5 * line.batch
        assert (line.plain_ms, line.round_ms) == pytest.approx((PLAIN_MS, 16.0))
        assert line.over_plain == pytest.approx(2.5 * PLAIN_MS / 16.0)
        # All layers are built.
        assert line.at_full_depth == pytest.approx(line.over_plain)
        assert line.policy_run.most == CHAIN
        assert 0.97 * line.over_plain < line.chosen_over_plain <= line.over_plain
        # Rows that differ, as requests' do, choose experts of their own.
        assert line.plain.hits > 12 or line.batch == 1
        assert line.forward.hits >= line.plain.hits
        assert line.draft_floor_ms > 0.0


def test_plain_steps_are_chosen_when_rounds_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for line in _lines(GLM_45_AIR, 60.0, monkeypatch):
        assert line.over_plain == pytest.approx(2.5 * PLAIN_MS / 60.0)
        assert line.policy_run.most is None
        assert 0.97 < line.chosen_over_plain <= 1.0


def test_layers_that_are_not_built_count_in_forwards_alone() -> None:
    floor = StepFloor(5.0, 8.0, 8.0)
    line = RoundsLine(
        batch=2,
        plain_ms=10.0,
        plain=floor,
        round_ms=16.0,
        forward_ms=13.0,
        forward=floor,
        draft_floor_ms=1.0,
        num_tokens=5.0,
        head_ms=1.0,
        depth=2.0,
        policy_run=PolicyRun(200.0, {None: 1.0}),
    )
    assert line.over_plain == pytest.approx(2.5 * 10.0 / 16.0)
    assert line.at_full_depth == pytest.approx(2.5 * 19.0 / 28.0)
    assert line.at_the_floor == pytest.approx(2.5 * 5.0 / 6.0)
    assert line.chosen_over_plain == pytest.approx(1.0)
    assert str(line).endswith("| 1.00 × | plain 100% |")
    assert str(line).count("|") == len(HEADER) + 1


def test_a_batch_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, real = rounds_bench(GLM_45_AIR, World(1.0).clock), RoundRunner.capture

    def failing(runner: RoundRunner, num_sequences: int, sampling: RoundSampling) -> None:
        if num_sequences > 1:
            raise RuntimeError("out of luck")
        real(runner, num_sequences, sampling)

    monkeypatch.setattr(expert_rounds, "run_policy", lambda *_: PolicyRun(1.0, {None: 1.0}))
    monkeypatch.setattr(RoundRunner, "capture", failing)
    first, *others = bench.rounds()
    assert isinstance(first, RoundsLine)
    assert len(others) == len(expert_rounds.BATCHES) - 1
    assert all("out of luck" in str(line) for line in others)


def test_a_pass_of_the_layer_reads_the_experts_that_it_hits() -> None:
    head = rounds_bench(GLM_45_AIR, World(1.0).clock).head
    assert head is not None
    layer = head.layers[0]
    assert isinstance(layer, MtpLayer)
    mixture = layer.block.mlp
    assert isinstance(mixture, Experts)
    experts = sum(tensor.nbytes for tensor in tensors_of((mixture.gate_up, mixture.down)))
    whole = sum(tensor.nbytes for tensor in tensors_of((layer, head.vocabulary.lm_head)))
    assert level_bytes(head, 16) == pytest.approx(whole)
    assert level_bytes(head, 4) == pytest.approx(whole - 0.75 * experts)


def test_simulated_acceptance_has_the_wanted_mean_in_each_slot() -> None:
    rate = level_rate(1.5, 3)
    assert rate + rate**2 + rate**3 == pytest.approx(1.5)
    counts = spread_counts(1.5, 3, 5)
    for own in zip(*counts, strict=True):
        assert sum(own) == 1.5 * NUM_ROUNDS
        for level in (1, 2, 3):
            share = sum(count >= level for count in own) / NUM_ROUNDS
            assert share == pytest.approx(rate**level, abs=0.5 / NUM_ROUNDS)
    # Slots do not accept in step.
    assert len({tuple(own) for own in zip(*counts, strict=True)}) > 1
