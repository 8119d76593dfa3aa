"""Steps that are padded as in a CUDA graph compute what they compute as they are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.graphs import GraphInputs, GraphLimits, key_of
from shared.runtime.runner import ModelRunner
from tests.helpers.engines import recurrent_decoder
from tests.helpers.kernel_device import kernel_device
from tests.helpers.state_steps import NUM_PAGES, PAGE_SIZE, batch_of, state_steps

pytestmark = [pytest.mark.gpu, pytest.mark.interpreter]
# Prompts, plain tokens, a chain and a tree; the interpreter takes seconds a step.
NUM_STEPS = 4 if IS_INTERPRETING else None
LIMITS = GraphLimits(max_rows=64, max_sequences=4, max_tail_width=24, max_context_tokens=128)


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    return recurrent_decoder(tmp_path, kernel_device())


# Attention leaves rows of no sequence as the memory was.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@torch.inference_mode()
def test_padded_steps_compute_the_same(decoder: Decoder) -> None:
    device, layout = decoder.device, decoder.kv_layout(PAGE_SIZE)
    plain, pool = (KvPool(layout, NUM_PAGES, device, num_states=4) for _ in range(2))
    runner, inputs = ModelRunner(decoder, plain), GraphInputs(LIMITS, layout, device)
    for sequences in itertools.islice(state_steps(), NUM_STEPS):
        batch = batch_of(sequences, device)
        key = key_of(replace(batch, max_query_length=1), LIMITS, ())
        assert key is not None
        bucket, states = inputs.bucket(key), inputs.states(key)
        with pool.advancing(batch) as plan:
            # As if this were the first of its size, behind another's plan.
            inputs.fill_empty(bucket)
            decoder.forward(bucket, pool, states=states)
            inputs.fill(bucket, batch)
            inputs.fill_states(plan)
            hidden = decoder.forward(bucket, pool, states=states).hidden
        expected = runner.run(batch).hidden
        torch.testing.assert_close(hidden[: len(expected)], expected, atol=1e-4, rtol=1e-4)
