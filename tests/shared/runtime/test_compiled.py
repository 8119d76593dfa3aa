"""Which forwards are compiled, and that compiled ones compute the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.models import decoder as decoder_module
from shared.models.loader import load_decoder
from shared.runtime.device import compile_small
from tests.helpers.checkpoints import TinyShape, write_checkpoint

CPU = torch.device("cpu")
PAGE_SIZE = 8


def _batch(num_sequences: int) -> ForwardBatch:
    rows = [SequenceRows.causal([4 + i, 5], 0, (1 + i,), (1,)) for i in range(num_sequences)]
    return build_batch(rows, page_size=PAGE_SIZE, device=CPU)


@pytest.fixture
def num_graph_runs() -> list[int]:
    """Runs of traced parts, counted by `backend`."""
    return [0]


@pytest.fixture
def backend(num_graph_runs: list[int]) -> Any:
    def compile_nothing(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            num_graph_runs[0] += 1
            return graph.forward(*args)

        return run

    return compile_nothing


def test_only_small_batches_are_compiled_and_both_compute_the_same(
    tmp_path: Path, backend: Any, num_graph_runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Plans run between the compiled parts; on a CPU, to find out where takes half of the time.
    plan = torch.compiler.disable(decoder_module.plan_for)
    monkeypatch.setattr(decoder_module, "plan_for", plan)
    folder = write_checkpoint(tmp_path, shape=TinyShape(num_layers=1))
    decoder = load_decoder(folder, dtype=torch.float32, device=CPU)
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), 8, CPU)
    forward = compile_small(decoder.forward, 2, backend=backend)
    with torch.inference_mode():
        batch = _batch(2)
        exact = decoder.forward(batch, pool).hidden
        torch.testing.assert_close(forward(batch, pool).hidden, exact)
        before = num_graph_runs[0]
        assert before > 0
        forward(_batch(3), pool)
        assert num_graph_runs[0] == before


def test_without_a_limit_nothing_is_wrapped() -> None:
    def forward(batch: ForwardBatch) -> int:
        return len(batch.token_ids)

    assert compile_small(forward, None) is forward
