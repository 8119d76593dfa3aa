"""Triton kernel that chooses the experts of a row; see `shared.kernels.routing`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.kernels.dependent_jit import begin, early
from shared.kernels.fused_jit import summed
from shared.kernels.launch import dependent_launch
from shared.kernels.pointwise import Partials
from shared.kernels.routing import RouterScores, Routing

# Smaller than every key.
_LOWEST: tl.constexpr = tl.constexpr(-(2**31))
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
    """Chooses the experts of one row. SCORES: 0 softmax, 1 sigmoid, 2 softmax of the chosen."""
    columns = tl.arange(0, BLOCK)
    is_expert = columns < NUM_EXPERTS
    corrections = early(correction + columns, is_expert, HAS_CORRECTION)
    begin(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
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
        choice += corrections
    choice = tl.where(is_expert, choice, low)
    if NUM_GROUPS > 1:
        groups = tl.arange(0, BLOCK_GROUPS)
        is_member = (columns // (NUM_EXPERTS // NUM_GROUPS))[None, :] == groups[:, None]
        is_member = is_member & is_expert[None, :]
        members = tl.where(is_member, choice[None, :], low)
        group_scores = tl.max(members, 1)
        if HAS_CORRECTION:
            is_best = members == group_scores[:, None]
            first = tl.min(tl.where(is_best, columns[None, :], BLOCK), 1)
            others = tl.where(columns[None, :] == first[:, None], low, members)
            group_scores += tl.max(others, 1)
        theirs = group_scores[None, :]
        is_better = (theirs > group_scores[:, None]) | (
            (theirs == group_scores[:, None]) & (groups[None, :] < groups[:, None])
        )
        is_kept = tl.sum(is_better.to(tl.int32), 1) < NUM_CHOSEN_GROUPS
        num_kept = tl.sum((is_member & is_kept[:, None]).to(tl.int32), 0)
        choice = tl.where(num_kept > 0, choice, low)
    # Integer keys in the order of the scores, since warps have an instruction for the maximum of
    # integers. Adding 0.0 makes zeros of both signs equal.
    keys = (choice + 0.0).to(tl.int32, bitcast=True)
    keys = tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    keys = tl.where(is_expert, keys, _LOWEST)
    ranks = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.full((BLOCK_CHOSEN,), 0, tl.int32)
    for rank in tl.static_range(NUM_CHOSEN):
        expert = tl.min(tl.where(keys == tl.max(keys, 0), columns, NUM_EXPERTS - 1), 0)
        chosen = tl.where(ranks == rank, expert, chosen)
        keys = tl.where(columns == expert, _LOWEST, keys)
    is_chosen = ranks < NUM_CHOSEN
    is_own = columns[None, :] == chosen[:, None]
    chosen_scores = tl.sum(tl.where(is_own, scores[None, :], 0.0), 1)
    chosen_scores = tl.where(is_chosen, chosen_scores, low if SCORES == 2 else 0.0)
    if SCORES == 2:
        powers = tl.exp(chosen_scores - tl.max(chosen_scores, 0))
        chosen_scores = powers / tl.sum(powers, 0)
    if NORMALISES:
        chosen_scores = chosen_scores / (tl.sum(chosen_scores, 0) + 1e-20)
    tl.store(weights + row * NUM_CHOSEN + ranks, chosen_scores * scale, mask=is_chosen)
    tl.store(experts + row * NUM_CHOSEN + ranks, chosen.to(tl.int64), mask=is_chosen)


def fused_route(
    logits: Tensor | Partials, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
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
