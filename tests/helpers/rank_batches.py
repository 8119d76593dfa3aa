"""Forward batches of sequences whose pages lie on two ranks, with pools of equal size."""

from __future__ import annotations

import torch

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch

PAGE_SIZE, NUM_PAGES = 4, 24
"""Sizes of each rank's pool."""
NUM_RANKS = 2
_TOKENS = list(range(3, 33))
# A root, its two children, and a child of the second.
_TREE = ((1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 1, 1))


def rank_batches(device: torch.device) -> list[ForwardBatch]:
    """Returns three batches: prompts; a chunk, a tree and a token after the prompts; and chunks of
    the second rank's sequences only. Of three sequences the first rank has one, the second two."""
    first, second = range(1, 12), range(NUM_PAGES + 1, NUM_PAGES + 10)
    third = range(NUM_PAGES + 10, NUM_PAGES + 17)
    prompts = [
        SequenceRows.causal(_TOKENS[:18], 0, first, range(18)),
        SequenceRows.causal(_TOKENS[3:20], 0, second, range(17)),
        SequenceRows.causal(_TOKENS[5:9], 0, third, range(4)),
    ]
    mask = [[bool(is_visible) for is_visible in row] for row in _TREE]
    more = [
        SequenceRows.causal(_TOKENS[:20], 18, first, range(20)),
        SequenceRows(_TOKENS[:4], (17, 18, 18, 19), 17, second, 17, mask, range(4)),
        SequenceRows.causal(_TOKENS[9:10], 4, third, range(1)),
    ]
    last = [
        SequenceRows.causal(_TOKENS[2:20], 5, third, range(18)),
        SequenceRows.causal(_TOKENS[9:12], 17, second, range(3)),
    ]
    steps = (prompts, more, last)
    return [build_batch(rows, page_size=PAGE_SIZE, device=device) for rows in steps]
