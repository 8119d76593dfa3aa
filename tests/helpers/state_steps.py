"""Steps of sequences for models with recurrent states: prompts, plain tokens, chains and trees."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shared.kv.batch import ForwardBatch, SequenceRows, build_batch

PAGE_SIZE, NUM_PAGES = 16, 40
_PAGES = [range(1 + 8 * number, 9 + 8 * number) for number in range(4)]


def state_steps() -> Iterator[list[SequenceRows]]:
    """Yields the sequences of each step; successive steps use the same pool."""
    yield [causal(0, 0, 26), causal(1, 0, 3)]
    yield [causal(2, 0, 9), causal(0, 26, 1), causal(1, 3, 1)]
    yield [causal(number, start, 1) for number, start in enumerate((27, 4, 9))]
    yield [causal(0, 28, 4), tree(1, 5, [None, 0, 0, 1, 1, 2, 3]), causal(2, 10, 1)]
    # Two tokens of the chain are kept, and only the root of the tree.
    yield [causal(0, 30, 1), causal(1, 6, 1), causal(2, 11, 1)]
    yield [tree(0, 31, [None, 0, 1, 0]), tree(2, 12, [None]), causal(1, 7, 2)]
    # A sequence that goes back before its stored state starts again from an earlier one.
    yield [causal(0, 12, 1)]


def batch_of(sequences: list[SequenceRows], device: torch.device) -> ForwardBatch:
    return build_batch(sequences, page_size=PAGE_SIZE, device=device)


def causal(number: int, start: int, count: int) -> SequenceRows:
    """Returns causal rows of a sequence; tokens depend on sequence number and position."""
    tokens = [_token(number, index) for index in range(start, start + count)]
    return SequenceRows.causal(tokens, start, _PAGES[number], range(count))


def tree(number: int, start: int, parents: list[int | None]) -> SequenceRows:
    """Returns the rows of a tree whose root is the sequence's next token."""
    masks: list[list[bool]] = []
    for node, parent in enumerate(parents):
        mask = [False] * len(parents) if parent is None else list(masks[parent])
        mask[node] = True
        masks.append(mask)
    return SequenceRows(
        token_ids=[_token(number, start + node) for node in range(len(parents))],
        positions=[start + sum(mask) - 1 for mask in masks],
        kv_start=start,
        pages=_PAGES[number],
        prefix_length=start,
        tail_mask=masks,
        logit_rows=range(len(parents)),
    )


def _token(number: int, index: int) -> int:
    return (31 * number + 7 * index) % 13
