"""Gated activation of the feed-forward block: one pass on CUDA, plain torch elsewhere."""

from __future__ import annotations

import enum

import torch.nn.functional as F
from torch import Tensor

from shared.kernels.kernel_settings import runs_triton


class Activation(enum.Enum):
    """What the gate of a feed-forward block passes through, as checkpoints name it."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


def gate_mul(gate_up: Tensor, activation: Activation) -> Tensor:
    """Returns `activation(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first."""
    if activation is Activation.SILU:
        return silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


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
