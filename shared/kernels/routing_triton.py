"""Launches the choice of experts on CUDA; the kernel is in `routing_jit`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from shared.kernels.routing import RouterScores, Routing
from shared.kernels.routing_jit import choose_experts

_SCORES = {
    RouterScores.SOFTMAX: 0,
    RouterScores.SIGMOID: 1,
    RouterScores.SOFTMAX_OF_CHOSEN: 2,
}


def fused_route(
    logits: Tensor, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Chooses as `route` does; arguments and result are its own."""
    assert logits.stride(1) == 1
    num_rows, num_chosen = len(logits), routing.num_chosen
    weights = torch.empty((num_rows, num_chosen), dtype=torch.float32, device=logits.device)
    experts = torch.empty((num_rows, num_chosen), dtype=torch.int64, device=logits.device)
    if num_rows:
        choose_experts[(num_rows,)](
            logits, logits if correction is None else correction, weights, experts,
            logits.stride(0), routing.scale,
            NUM_EXPERTS=routing.num_experts, NUM_CHOSEN=num_chosen,
            NUM_GROUPS=routing.num_groups, NUM_CHOSEN_GROUPS=routing.num_chosen_groups,
            SCORES=_SCORES[routing.scores], NORMALISES=routing.normalises,
            HAS_CORRECTION=correction is not None,
            BLOCK=triton.next_power_of_2(routing.num_experts),
            BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
            BLOCK_GROUPS=triton.next_power_of_2(routing.num_groups), num_warps=1,
        )  # fmt: skip
    return weights, experts
