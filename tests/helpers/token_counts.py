"""Token counts of every tree row, from complete histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shared.speculation.row_sampling import TokenCounts, count_committed


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens that the penalties of one sequence count.

    Attributes:
        prompt_ids: the prompt.
        output_ids: every committed output token, the last one (the tree's root) included.
        row_paths: for each of the sequence's rows the tree tokens on its path, see
            `tree.row_paths`; one empty path for a plain row.
        has_penalties: False leaves the sequence's counts at zero.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    row_paths: Sequence[Sequence[int]]
    has_penalties: bool


def count_tokens(
    histories: Sequence[TokenHistory], *, vocab_size: int, device: torch.device
) -> TokenCounts | None:
    """Returns the counts of all rows, sequence after sequence; None when no penalty is on.

    A sequence's committed tokens are counted once and copied to its rows, so the cost is one pass
    over the histories with penalties and one over `[R, V]`.
    """
    if not any(history.has_penalties for history in histories):
        return None
    committed = count_committed(
        [h.prompt_ids if h.has_penalties else () for h in histories],
        [h.output_ids if h.has_penalties else () for h in histories],
        vocab_size=vocab_size,
        device=device,
    )
    owners = [i for i, history in enumerate(histories) for _ in history.row_paths]
    paths = [p if h.has_penalties else () for h in histories for p in h.row_paths]
    return committed.with_paths(owners, paths)
