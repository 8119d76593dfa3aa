"""What sequences that differ cost a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.target.rounds.round_shapes import RoutingCosts
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


class _CountingRunner(ModelRunner):
    """Notes how many different tokens each step has."""

    def run(self, batch: ForwardBatch, **options: object) -> object:  # type: ignore[override]
        self.counts.append(len(torch.unique(batch.token_ids)))
        return None

    counts: list[int]


def _costs(folder: Path, family: str) -> tuple[RoutingCosts, list[int]]:
    shape = TinyShape(overrides=MIXTURE if "moe" in family else {})
    decoder = load_decoder(write_checkpoint(folder, family, shape), dtype=torch.float32, device=CPU)
    runner = _CountingRunner(decoder, KvPool(decoder.kv_layout(4), 4, CPU))
    runner.counts = []

    def timed(step: Callable[[], object]) -> float:
        step()
        return float(runner.counts[-1])

    return RoutingCosts(runner, timed), runner.counts


def test_sequences_that_differ_are_timed_beside_ones_that_do_not(tmp_path: Path) -> None:
    costs, counts = _costs(tmp_path, "qwen3_moe")
    assert costs.extra_s(8, 4) == 32.0 - 4.0
    assert costs.extra_s(5, 1) == 4.0
    assert counts == [32, 4, 5, 1]


@pytest.mark.parametrize(("family", "count"), [("qwen3_moe", 1), ("qwen3", 8)])
def test_one_sequence_or_a_dense_model_costs_nothing_more(
    family: str, count: int, tmp_path: Path
) -> None:
    costs, counts = _costs(tmp_path, family)
    assert costs.extra_s(count, 4) == 0.0
    assert not counts


def test_a_step_of_so_many_rows_runs(tmp_path: Path) -> None:
    shape = TinyShape(overrides=MIXTURE)
    decoder = load_decoder(
        write_checkpoint(tmp_path, "qwen3_moe", shape), dtype=torch.float32, device=CPU
    )
    runner = ModelRunner(decoder, KvPool(decoder.kv_layout(4), 4, CPU))
    found: list[Tensor] = []

    def timed(step: Callable[[], object]) -> float:
        output = step()
        found.append(output.logits)  # type: ignore[attr-defined]
        return 0.0

    assert RoutingCosts(runner, timed).extra_s(6, 2) == 0.0
    assert [len(each) for each in found] == [12, 12]
