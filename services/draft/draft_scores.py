"""How likely the target is to draw each token, as far as the draft can tell.

The draft mirrors the sequence's sampling transform. Where the target draws with noise keyed by
(seed, position, token), the draft adds the very same noise: given the noise the target's draw is
certain, and the softmax of the draft's noisy logits ranks which token it will be. At temperature 0
there is no noise and this is the plain draft distribution.

Source: Daliri, Musco, Suresh, arXiv 2408.07978 (shared Gumbel noise).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.draft.sequence import DraftSequence
from shared.speculation.noise import gumbel_noise


def draft_log_probs(
    logits: Tensor, sequences: Sequence[DraftSequence], paths: Sequence[Sequence[int]]
) -> Tensor:
    """Returns `[R, V]` float32 log probabilities of the next token of each row.

    Args:
        logits: `[R, V]` float32 of the draft.
        sequences: the sequence of each row.
        paths: tree tokens on each row's path, its own token included.
    """
    device = logits.device
    temperatures = torch.tensor([s.sampling.temperature or 1.0 for s in sequences], device=device)
    scaled = logits / temperatures.unsqueeze(1)
    noisy = [i for i, s in enumerate(sequences) if s.mirrors_noise and not s.sampling.is_greedy]
    if noisy:
        rows = torch.tensor(noisy, device=device)
        seeds = torch.tensor([sequences[i].sampling.seed for i in noisy], device=device)
        positions = torch.tensor(
            [sequences[i].num_tokens + len(paths[i]) for i in noisy], device=device
        )
        noise = gumbel_noise(seeds, positions, logits.shape[1])
        scaled = scaled.index_add(0, rows, noise)
    return scaled.log_softmax(dim=1)
