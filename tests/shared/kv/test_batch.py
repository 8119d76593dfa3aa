"""Rows of several sequences are packed into the tensors of one forward."""

from __future__ import annotations

import torch

from shared.kv.batch import SequenceRows, build_batch

CPU = torch.device("cpu")
CHUNK = SequenceRows(
    token_ids=[5, 6, 7],
    positions=[2, 3, 4],
    kv_start=2,
    pages=[9, 3],
    prefix_length=2,
    tail_mask=None,
    logit_rows=[2],
)
TREE = SequenceRows(
    token_ids=[1, 2],
    positions=[6, 6],
    kv_start=6,
    pages=[4, 8],
    prefix_length=5,
    tail_mask=[[True, True, False], [True, False, True]],
    logit_rows=[1, 0],
)


def test_rows_are_laid_end_to_end_and_slots_follow_the_page_table() -> None:
    batch = build_batch([CHUNK, TREE], page_size=4, device=CPU)
    assert batch.token_ids.tolist() == [5, 6, 7, 1, 2]
    assert batch.positions.tolist() == [2, 3, 4, 6, 6]
    assert batch.slots.tolist() == [9 * 4 + 2, 9 * 4 + 3, 3 * 4, 8 * 4 + 2, 8 * 4 + 3]
    assert batch.query_starts.tolist() == [0, 3, 5]
    assert batch.kv_lengths.tolist() == [5, 8]
    assert batch.prefix_lengths.tolist() == [2, 5]
    assert batch.logit_rows.tolist() == [2, 4, 3]
    assert (batch.max_query_length, batch.max_kv_length) == (3, 8)


def test_tail_mask_belongs_to_the_rows_of_trees() -> None:
    batch = build_batch([CHUNK, TREE], page_size=4, device=CPU)
    assert batch.is_causal.tolist() == [True, False]
    assert batch.tail_mask is not None
    assert batch.tail_mask[3:].tolist() == [[True, True, False], [True, False, True]]


def test_causal_rows_alone_need_no_tail_mask() -> None:
    assert build_batch([CHUNK], page_size=4, device=CPU).tail_mask is None


def test_shorter_page_tables_are_padded_with_page_zero() -> None:
    long = SequenceRows([1], [9], 9, [1, 2, 5], 9, None, [0])
    batch = build_batch([CHUNK, long], page_size=4, device=CPU)
    assert batch.page_table.tolist() == [[9, 3, 0], [1, 2, 5]]
