"""Triton kernel that chooses the experts of a row; see `shared.kernels.routing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent_jit import begin
from shared.kernels.fused_jit import summed
from shared.kernels.launch import dependent_launch
from shared.kernels.partials import Partials
from shared.kernels.routing import RouterScores, Routing

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


@triton.jit  # type: ignore[untyped-decorator]
def choose_experts(  # type: ignore[no-untyped-def]
    logits, correction, weights, experts, logits_stride, part_size, scale,
    NUM_PARTS: tl.constexpr, DTYPE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN_GROUPS: tl.constexpr, SCORES: tl.constexpr, NORMALISES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_CHOSEN: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program a row. SCORES: 0 softmax, 1 sigmoid, 2 softmax of the chosen."""
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_expert = columns < NUM_EXPERTS
    low = float("-inf")
    places = row * logits_stride + columns
    scores = summed(logits, places, is_expert, part_size, DTYPE, NUM_PARTS).to(tl.float32)
    scores = tl.where(is_expert, scores, low)
    if SCORES == 0:
        powers = tl.exp(scores - tl.max(scores, 0))
        scores = powers / tl.sum(powers, 0)
    elif SCORES == 1:
        scores = 1.0 / (1.0 + tl.exp(-scores))
    choice = scores
    if HAS_CORRECTION:
        choice += tl.load(correction + columns, mask=is_expert, other=0.0)
    choice = tl.where(is_expert, choice, low)
    if NUM_GROUPS > 1:
        group_of = columns // (NUM_EXPERTS // NUM_GROUPS)
        groups = tl.arange(0, BLOCK_GROUPS)
        group_scores = tl.full((BLOCK_GROUPS,), low, tl.float32)
        for group in tl.static_range(NUM_GROUPS):
            members = tl.where(is_expert & (group_of == group), choice, low)
            best = tl.max(members, 0)
            if HAS_CORRECTION:
                first = tl.argmax(members, 0)
                best += tl.max(tl.where(columns == first, low, members), 0)
            group_scores = tl.where(groups == group, best, group_scores)
        is_kept = columns < 0
        for _ in tl.static_range(NUM_CHOSEN_GROUPS):
            group = tl.argmax(group_scores, 0)
            is_kept = is_kept | (group_of == group)
            group_scores = tl.where(groups == group, low, group_scores)
        choice = tl.where(is_kept, choice, low)
    ranks = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.full((BLOCK_CHOSEN,), 0, tl.int64)
    chosen_scores = tl.full((BLOCK_CHOSEN,), low if SCORES == 2 else 0.0, tl.float32)
    for rank in tl.static_range(NUM_CHOSEN):
        # Rows that pad a batch may be no numbers, and must name an expert all the same.
        expert = tl.minimum(tl.argmax(choice, 0), NUM_EXPERTS - 1)
        score = tl.sum(tl.where(columns == expert, scores, 0.0), 0)
        chosen = tl.where(ranks == rank, expert.to(tl.int64), chosen)
        chosen_scores = tl.where(ranks == rank, score, chosen_scores)
        choice = tl.where(columns == expert, low, choice)
    if SCORES == 2:
        powers = tl.exp(chosen_scores - tl.max(chosen_scores, 0))
        chosen_scores = powers / tl.sum(powers, 0)
    if NORMALISES:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + 1e-20)
    is_chosen = ranks < NUM_CHOSEN
    tl.store(weights + row * NUM_CHOSEN + ranks, chosen_scores * scale, mask=is_chosen)
    tl.store(experts + row * NUM_CHOSEN + ranks, chosen, mask=is_chosen)


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
