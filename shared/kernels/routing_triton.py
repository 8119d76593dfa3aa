"""Launches the choice of experts on CUDA; the kernel is in `routing_jit`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent import dependent_launch
from shared.kernels.partials import Partials
from shared.kernels.routing import RouterScores, Routing
from shared.kernels.routing_jit import choose_experts

_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_SCORES = {
    RouterScores.SOFTMAX: 0,
    RouterScores.SIGMOID: 1,
    RouterScores.SOFTMAX_OF_CHOSEN: 2,
}


def fused_route(
    logits: Tensor | Partials, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Chooses as `route` does; arguments and result are its own."""
    parts = logits.parts if isinstance(logits, Partials) else logits.unsqueeze(0)
    assert parts.stride(2) == 1
    num_rows, num_chosen = parts.shape[1], routing.num_chosen
    weights = parts.new_empty((num_rows, num_chosen), dtype=torch.float32)
    experts = parts.new_empty((num_rows, num_chosen), dtype=torch.int64)
    if num_rows:
        choose_experts[(num_rows,)](
            parts, parts if correction is None else correction, weights, experts,
            parts.stride(1), parts.stride(0), routing.scale,
            NUM_PARTS=len(parts), DTYPE=_DTYPES[logits.dtype],
            NUM_EXPERTS=routing.num_experts, NUM_CHOSEN=num_chosen,
            NUM_GROUPS=routing.num_groups, NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
            SCORES=_SCORES[routing.scores], NORMALISES=routing.normalises,
            HAS_CORRECTION=correction is not None,
            BLOCK=triton.next_power_of_2(routing.num_experts),
            BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
            BLOCK_GROUPS=triton.next_power_of_2(routing.num_groups), num_warps=1,
            **dependent_launch(parts.device, num_rows),
        )  # fmt: skip
    return weights, experts
