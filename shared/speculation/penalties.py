"""Token counts and the penalties they cause, for every row of every tree.

The row of a tree node predicts what follows the node, so it counts the committed output and the
tokens on the node's own path, and nothing of its siblings. The root's token is committed already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.speculation.upload import uploaded, uploaded_ids


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Counts of R rows over V tokens.

    Attributes:
        output: `[R, V]` float32, occurrences in the output and on the row's path.
        occurs: `[R, V]` bool, in the prompt, the output or on the row's path.
    """

    output: Tensor
    occurs: Tensor

    def with_paths(self, owners: Sequence[int], paths: Sequence[Sequence[int]]) -> TokenCounts:
        """Returns the counts of rows of trees.

        Args:
            owners: for each of them the row of these counts that it adds to.
            paths: the tree tokens that it adds.
        """
        rows = uploaded_ids(owners, self.output.device)
        output = self.output.index_select(0, rows)
        output += histogram(paths, self.output.shape[1], self.output.device)
        return TokenCounts(output, self.occurs.index_select(0, rows) | (output > 0))


@dataclass(frozen=True, slots=True)
class Penalties:
    """Strengths of R rows, each `[R, 1]` float32; 1, 0 and 0 are off.

    Attributes:
        repetition: divides positive and multiplies negative logits of tokens that occur.
        frequency: subtracted for each occurrence in the output.
        presence: subtracted once for a token that occurs in the output.
    """

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


def count_committed(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    device: torch.device,
) -> TokenCounts:
    """Returns the counts of committed tokens, one row for each prompt and its output."""
    output = histogram(outputs, vocab_size, device)
    in_prompt = histogram(prompts, vocab_size, device) > 0
    return TokenCounts(output, in_prompt | (output > 0))


def apply_penalties(logits: Tensor, penalties: Penalties, counts: TokenCounts) -> Tensor:
    """Returns penalised logits `[R, V]` float32: repetition, then frequency and presence."""
    scaled = torch.where(logits > 0, logits / penalties.repetition, logits * penalties.repetition)
    logits = torch.where(counts.occurs, scaled, logits)
    logits = logits - penalties.frequency * counts.output
    return logits - penalties.presence * (counts.output > 0)


def histogram(token_ids: Sequence[Sequence[int]], vocab_size: int, device: torch.device) -> Tensor:
    """Returns `[len(token_ids), V]` float32 occurrences of each token in each list.

    Does not wait for the device.
    """
    counts = torch.zeros(len(token_ids) * vocab_size, dtype=torch.float32, device=device)
    lists = [
        torch.tensor(ids, dtype=torch.int64) + row * vocab_size
        for row, ids in enumerate(token_ids)
        if len(ids)
    ]
    if lists:
        places = uploaded(torch.cat(lists), device)
        # Sums of ones are exact in float32, so the order of the additions does not matter.
        counts.scatter_add_(0, places, torch.ones((), device=device).expand(len(places)))
    return counts.view(len(token_ids), vocab_size)
