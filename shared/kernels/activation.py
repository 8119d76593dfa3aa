"""Gated activation of the feed-forward block: one pass on CUDA, plain torch elsewhere."""

from __future__ import annotations

import enum

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton

# Of CLAMPED_SWIGLU.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


class Activation(enum.Enum):
    """The gate's activation in a feed-forward block, by its name in checkpoints."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"
    CLAMPED_SWIGLU = "clamped_swiglu"


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns `activation(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first.

    CLAMPED_SWIGLU is gpt-oss's, whose `up` has an offset of 1 as well.
    """
    if activation is Activation.SILU:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation is Activation.GELU_TANH:
        return F.gelu(gate, approximate="tanh").mul_(up)
    gate = gate.clamp(max=SWIGLU_LIMIT)
    up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1.0) * (gate * torch.sigmoid(SWIGLU_ALPHA * gate))


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first.

    Source: Shazeer, arXiv 2002.05202, equation 6 (SwiGLU).
    """
    if runs_triton(gate_up):
        from shared.kernels.fused_triton import fused_silu_mul

        return fused_silu_mul(gate_up)
    return plain_silu_mul(gate_up)


def plain_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` in plain torch, on any device: the kernel's oracle."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
