"""Chooses each row's experts and their weights."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.kernels.kernel_settings import dispatched
from shared.kernels.pointwise import Partials, total_of


class RouterScores(enum.Enum):
    """The function from a router's logits to scores."""

    SOFTMAX = "softmax over all experts"
    SIGMOID = "sigmoid of each"
    SOFTMAX_OF_CHOSEN = "softmax over the chosen experts"


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a router chooses experts.

    Experts form groups of equal size. First the best groups are chosen, then the best experts of
    these groups. A group's score is the sum of its two best scores if scores have a correction,
    else its best score.

    Source: Fedus et al., arXiv 2101.03961, section 2.1; the groups and the correction are
    DeepSeek-V3's, arXiv 2412.19437, section 2.1.2.

    Attributes:
        num_chosen: experts per row, k.
        normalises: the weights of the chosen experts are divided by their sum.
        scale: final factor of the weights.
    """

    num_experts: int
    num_chosen: int
    scores: RouterScores
    normalises: bool
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1


@dispatched("routing_triton")
def route(
    logits: Tensor | Partials, correction: Tensor | None, routing: Routing
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each row.

    Args:
        logits: `[T, E]`.
        correction: `[E]` float32, added to the scores for the choice and not to the weights; None
            in most families.

    Returns:
        Weights `[T, k]` float32 and experts `[T, k]` int64, best first.
    """
    wide = total_of(logits).float()
    if routing.scores is RouterScores.SOFTMAX:
        scores = wide.softmax(-1)
    else:
        # In float64, rounded once: torch computes the last elements of a tensor by another method.
        is_sigmoid = routing.scores is RouterScores.SIGMOID
        scores = wide.double().sigmoid().float() if is_sigmoid else wide
    choice = scores if correction is None else scores + correction
    if routing.num_groups > 1:
        choice = _keep_best_groups(choice, correction is not None, routing)
    experts = choice.topk(routing.num_chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.scores is RouterScores.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    if routing.normalises:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, experts


def _keep_best_groups(choice: Tensor, is_corrected: bool, routing: Routing) -> Tensor:
    """Returns the scores of experts in the best groups, and -inf for the others."""
    grouped = choice.view(len(choice), routing.num_groups, -1)
    group_scores = grouped.topk(2 if is_corrected else 1, dim=-1).values.sum(-1)
    best = group_scores.topk(routing.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).view_as(choice)
