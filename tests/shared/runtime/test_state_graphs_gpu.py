"""Steps of a model with recurrent states compute in graphs what they compute without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.graph_inputs import GraphLimits
from shared.runtime.graphs import ForwardGraphs
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.state_steps import NUM_PAGES, PAGE_SIZE, batch_of, state_steps

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LIMITS = GraphLimits(max_rows=32, max_sequences=4, max_tail_width=24, max_context_tokens=128)
SHAPE = TinyShape(head_dim=16, overrides=DELTA)


def test_graph_steps_equal_eager_steps(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5", SHAPE)
    decoder = load_decoder(folder, dtype=torch.float32, device=CUDA)

    def pool() -> KvPool:
        return KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CUDA, num_states=4)

    own = pool()
    graphs = ForwardGraphs(decoder, own, LIMITS)
    graphs.capture()
    assert own.states is not None
    assert not own.states.values.any()
    num_captured = len(graphs._graphs)
    eager, captured = ModelRunner(decoder, pool()), ModelRunner(decoder, own, graphs)
    num_run = 0
    run = graphs.run

    def counted(*arguments):  # type: ignore[no-untyped-def]
        nonlocal num_run
        num_run += 1
        return run(*arguments)

    graphs.run = counted  # type: ignore[method-assign]
    for sequences in state_steps():
        expected, found = (each.run(batch_of(sequences, CUDA)).logits for each in (eager, captured))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    # The first one is a prompt of too many rows.
    assert num_run == len(list(state_steps())) - 1
    assert len(graphs._graphs) == num_captured
