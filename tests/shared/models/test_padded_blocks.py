"""Gated blocks whose channels are padded to what products on a GPU read."""

from __future__ import annotations

import pytest
import torch

from shared.kernels.pointwise import Activation
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.models.loader import _padded


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
@pytest.mark.parametrize("has_bias", [False, True])
def test_channels_of_zeros_change_nothing(activation: Activation, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    gate_up, down, bias, inputs = (
        torch.randn(*shape, generator=generator) for shape in ((80, 24), (24, 40), (80,), (5, 24))
    )
    own_bias = bias if has_bias else None
    wide, wide_bias, deep = _padded(gate_up, own_bias, down, 88)
    assert wide.shape == (256, 24)
    assert deep.shape == (24, 128)
    plain = Mlp(Linear.of(gate_up, own_bias), Linear.of(down), activation)
    padded = Mlp(Linear.of(wide, wide_bias), Linear.of(deep), activation)
    torch.testing.assert_close(padded(inputs), plain(inputs), rtol=1e-5, atol=1e-5)
