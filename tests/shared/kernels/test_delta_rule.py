"""A chunk of tokens moves a state as its tokens do one after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from shared.kernels.delta_rule import CHUNK, DeltaShape, DeltaWeights, delta_chunk, delta_scan

SHAPES = {
    "as many heads": DeltaShape(2, 2, 8, 16, 4),
    "grouped, odd sizes": DeltaShape(2, 6, 12, 20, 3),
    "one token sees itself": DeltaShape(1, 2, 16, 8, 1),
    "Qwen3-Next's head": DeltaShape(1, 2, 128, 128, 4),
}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random_weights(shape: DeltaShape) -> DeltaWeights:
    return DeltaWeights(
        torch.randn(shape.num_channels, shape.window),
        torch.randn(shape.num_value_heads),
        torch.randn(shape.num_value_heads),
    )


def random_state(shape: DeltaShape) -> Tensor:
    size = shape.num_value_heads, shape.key_dim, shape.value_dim
    return torch.randn(size) / shape.key_dim**0.5


def one_by_one(
    inputs: Tensor, is_there: Tensor, state: Tensor, shape: DeltaShape, weights: DeltaWeights
) -> tuple[Tensor, Tensor]:
    states, read = delta_scan(inputs[None], is_there[None], state[None], shape, weights)
    return states[0], read[0]


def assert_alike(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 37, CHUNK])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_a_chunk_is_its_tokens(shape: DeltaShape, num_tokens: int) -> None:
    """Behind tokens before it, of which the first is missing, and with none where it is padded."""
    history, weights, state = shape.window - 1, random_weights(shape), random_state(shape)
    inputs = torch.randn(history + CHUNK, shape.num_inputs)
    is_there = torch.arange(history + CHUNK) < history + num_tokens
    is_there[: min(history, 1)] = False
    found = delta_chunk(inputs, is_there, state, shape, weights)
    expected = one_by_one(inputs, is_there, state, shape, weights)
    assert_alike((found[0], found[1][:num_tokens]), (expected[0], expected[1][:num_tokens]))
    # What follows changes nothing of it.
    inputs[history + num_tokens :] = 7.0
    again = delta_chunk(inputs, is_there, state, shape, weights)
    assert torch.equal(again[0], found[0])
    assert torch.equal(again[1][:num_tokens], found[1][:num_tokens])


@pytest.mark.parametrize(
    ("update", "decay"), [(9.0, -20.0), (9.0, 30.0), (-9.0, -20.0)], ids=["all", "new", "old"]
)
def test_equal_tokens_in_a_chunk(update: float, decay: float) -> None:
    """Keys that are alike and fully replaced make the worst system; strong decays leave nothing."""
    shape = SHAPES["as many heads"]
    weights, state = random_weights(shape), random_state(shape)
    inputs = torch.randn(1, shape.num_inputs).repeat(CHUNK + 3, 1)
    inputs[:, shape.num_channels : -2] = update
    inputs[:, -2:] = decay
    arguments = inputs, torch.ones(CHUNK + 3, dtype=torch.bool), state, shape, weights
    assert_alike(delta_chunk(*arguments), one_by_one(*arguments))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_chunks_equal_transformers(shape: DeltaShape) -> None:
    """Three chunks, one after another, against transformers' whole prompt."""
    weights, history, count = random_weights(shape), shape.window - 1, 3 * CHUNK
    inputs = torch.randn(count, shape.num_inputs)
    padded = torch.cat((torch.zeros(history, shape.num_inputs), inputs))
    is_there = torch.arange(history + count) >= history
    state = torch.zeros(shape.num_value_heads, shape.key_dim, shape.value_dim)
    parts = []
    for first in range(0, count, CHUNK):
        own = slice(first, first + history + CHUNK)
        state, read = delta_chunk(padded[own], is_there[own], state, shape, weights)
        parts.append(read)

    channels = padded[:, : shape.num_channels].T[None]
    mixed = silu(conv1d(channels, weights.taps[:, None], groups=shape.num_channels))[0].T
    num_keys = shape.num_key_heads * shape.key_dim
    queries, keys, values = mixed.split((num_keys, num_keys, shape.value_size), dim=1)
    updates, decays = inputs[:, shape.num_channels :].chunk(2, dim=1)
    queries, keys = (
        each.view(1, count, shape.num_key_heads, shape.key_dim).repeat_interleave(
            shape.num_value_heads // shape.num_key_heads, dim=2
        )
        for each in (queries, keys)
    )
    read, final = torch_chunk_gated_delta_rule(
        queries,
        keys,
        values.view(1, count, shape.num_value_heads, shape.value_dim),
        g=(-weights.log_decay.exp() * softplus(decays + weights.decay_bias))[None],
        beta=updates.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert final is not None
    assert_alike((state, torch.cat(parts)), (final[0], read[0]))
