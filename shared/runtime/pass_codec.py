"""What the host reads of a pass, as tensors that take one copy each."""

from __future__ import annotations

import torch
from torch import Tensor

from shared.runtime.round_draft import ScoredRows
from shared.speculation.growth import Children


def packed_trees(trees: ScoredRows) -> Tensor:
    """Returns trees as one tensor `[S, 3 T + 2 L K]` int32: tokens, parents and the bits of the
    scores of T rows, then tokens and parents of the rows of L levels."""
    rows, beams = trees.rows, trees.beams.flatten(2).int().unbind()
    bits = trees.paths.view(torch.int32)
    return torch.cat((rows.token_ids.int(), rows.parents.int(), bits, *beams), dim=1)


def packed_choices(choices: Children) -> Tensor:
    """Returns choices `[S, N, W]` as one tensor `[S, 2 N W]` int32: tokens, then the bits of their
    scores."""
    bits = choices.log_probs.contiguous().view(torch.int32)
    return torch.cat((choices.token_ids.int(), bits), dim=1).flatten(1)
