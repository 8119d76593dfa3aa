"""Products on CUDA in which a row's bits do not depend on the number of rows.

Libraries choose another kernel for another number of rows, with sums in another order. Here one
order holds for all of them. For few rows this is the faster product as well: it leaves its parts
to the kernel after it (`partials`), or takes over what that would do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.activation import silu_mul
from shared.kernels.partials import Partials

# A matrix instruction of a warp group has 64 rows, here channels of the weight.
TILE_CHANNELS = 64
WORD_BLOCK = 128
# Of products whose segments are spread over programs.
MAX_ROW_TILES = 2
# Measured on an H200 with the matrices of an 8B: up to here no product of cuBLAS is faster.
MOST_FEW_ROWS = 64
_HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class SteadyOperand:
    """The weight of a product, `[N, K]`.

    Attributes:
        values: half precision, or 8 bits in the order of `quantised.in_words`.
        scales: `[N, 1]` float32 of 8-bit values; None of others.
        counters: see `tile_counters`. Two products with them must not run at the same time.
    """

    values: Tensor
    scales: Tensor | None
    counters: Tensor


def can_be_steady(weight: Tensor) -> bool:
    """Whether a product with `weight` `[N, K]` in half precision can keep its rows' bits.

    It needs the matrix instructions of compute capability 9.0, and K must be a multiple of 128.
    """
    return (
        is_hopper(weight.device)
        and weight.dtype in _HALF_PRECISION
        and weight.shape[1] % WORD_BLOCK == 0
    )


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a GPU of compute capability 9.0 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def tile_counters(num_channels: int, device: torch.device) -> Tensor:
    """Returns what programs that share a tile count themselves with: `[C]` int32 zeros."""
    num_tiles = MAX_ROW_TILES * -(-num_channels // TILE_CHANNELS)
    return torch.zeros(num_tiles, dtype=torch.int32, device=device)


def steady_linear(inputs: Tensor, weight: SteadyOperand, bias: Tensor | None) -> Tensor:
    """Returns `inputs @ weight.T + bias`, `[T, N]`, of `[T, K]` in half precision on CUDA."""
    # Triton is not installed where there is no CUDA.
    from shared.kernels.steady_triton import launch

    return launch(inputs, weight, bias)


def steady_partials(inputs: Tensor, weight: SteadyOperand) -> Tensor | Partials:
    """Returns `steady_linear` without a bias, in parts where it is made of some."""
    from shared.kernels.steady_triton import launch, launch_partials

    partials = launch_partials(inputs, weight)
    return launch(inputs, weight, None) if partials is None else partials


def steady_gated(inputs: Tensor, weight: SteadyOperand) -> Tensor:
    """Returns `silu_mul` of `steady_linear` without a bias, with its bits."""
    from shared.kernels.steady_triton import launch, launch_gated

    gated = launch_gated(inputs, weight)
    return silu_mul(launch(inputs, weight, None)) if gated is None else gated
