"""Steps of a model with recurrent states compute in graphs what they compute without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.kv.pool import KvPool
from shared.models.loader import load_decoder
from shared.runtime.graphs import ForwardGraphs, GraphKey, GraphLimits, key_of, keys_of
from shared.runtime.runner import ModelRunner
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.state_steps import NUM_PAGES, PAGE_SIZE, batch_of, state_steps

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LIMITS = GraphLimits(max_rows=32, max_sequences=4, max_tail_width=24, max_context_tokens=128)
SHAPE = TinyShape(head_dim=16, overrides=DELTA)


@pytest.mark.parametrize("captures_first", [True, False], ids=["captured first", "when needed"])
def test_graph_steps_equal_eager_steps(tmp_path: Path, captures_first: bool) -> None:
    """A graph that is captured between two steps leaves the states of the first."""
    folder = write_checkpoint(tmp_path, "qwen3_5", SHAPE)
    decoder = load_decoder(folder, dtype=torch.float32, device=CUDA)

    def pool() -> KvPool:
        return KvPool(decoder.kv_layout(PAGE_SIZE), NUM_PAGES, CUDA, num_states=4)

    plain, own = pool(), pool()
    assert plain.states is not None
    assert own.states is not None
    graphs = ForwardGraphs(decoder, own, LIMITS)
    if captures_first:
        graphs.capture()
    assert not own.states.values.any()
    eager, captured = ModelRunner(decoder, plain), ModelRunner(decoder, own, graphs)
    num_run = 0
    run = graphs.run

    def counted(*arguments):  # type: ignore[no-untyped-def]
        nonlocal num_run
        num_run += 1
        return run(*arguments)

    graphs.run = counted  # type: ignore[method-assign]
    keys = set(keys_of(LIMITS, ())) if captures_first else set[GraphKey]()
    for step, sequences in enumerate(state_steps()):
        batch = batch_of(sequences, CUDA)
        key = key_of(batch, LIMITS, ())
        if key is not None and graphs.fits(batch, ()):
            keys.add(key)
        expected, found = (each.run(batch).logits for each in (eager, captured))
        _assert_close(found, expected, f"logits of step {step}")
        _assert_close(own.states.values, plain.states.values, f"states after step {step}")
    # The first one is a prompt of too many rows.
    assert num_run == len(list(state_steps())) - 1
    assert set(graphs._graphs) == keys


def _assert_close(found: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(
        found, expected, atol=1e-3, rtol=1e-3, msg=lambda text: f"{name}: {text}"
    )
