"""Gated activation of the feed-forward block, reference implementation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Returns `silu(gate) * up` `[T, N]` for `gate_up` `[T, 2N]`, gate first.

    Source: Shazeer, arXiv 2002.05202, equation 6 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
