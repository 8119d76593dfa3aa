"""Inputs at fixed addresses are those that are uploaded anew."""

from __future__ import annotations

import torch

from shared.kv.leases import PADDING_PAGE
from shared.runtime.tree_pass import OpenArrays, OpenInputs, OpenSequence, OpenSlots, WalkedTree
from shared.tokens import SamplingParams, TokenTree

CPU = torch.device("cpu")
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 1)
TREE = WalkedTree.of(TokenTree((4, 5), (None, 0), (-0.1, -0.2)), 2, 1)


def _sequence(token_ids: tuple[int, ...], pages: list[int]) -> OpenSequence:
    return OpenSequence(token_ids, 9, 2, SAMPLED, pages, TREE)


def _arrays(sequences: list[OpenSequence], num_pages: int) -> OpenArrays:
    return OpenArrays.of(
        sequences, num_slots=3, max_open_rows=4, num_pages=num_pages, walk_size=(2, 4)
    )


def _tensors(inputs: OpenInputs, num_pages: int) -> list[torch.Tensor]:
    state = inputs.state
    table = state.head_page_table[:, :num_pages]
    return [state.numbers, state.sampling, table, inputs.sources, inputs.walks]


def test_slots_are_filled_with_what_an_upload_brings() -> None:
    slots = OpenSlots(_arrays([], 6), CPU)
    before = _tensors(slots.inputs, 6)
    for sequences, num_pages in (
        ([_sequence((7, 8), [3, 1, 2]), _sequence((9,), [5])], 3),
        ([_sequence((1, 2, 3, 4), [6, 7, 8, 9, 10, 11, 12])], 6),
        ([], 2),
    ):
        arrays = _arrays(sequences, num_pages)
        slots.fill(arrays)
        wanted = _tensors(arrays.upload(CPU), num_pages)
        for found, expected in zip(_tensors(slots.inputs, num_pages), wanted, strict=True):
            assert torch.equal(found, expected)
    addresses = [tensor.data_ptr() for tensor in before]
    assert [tensor.data_ptr() for tensor in _tensors(slots.inputs, 6)] == addresses


def test_empty_slots_have_no_sequence() -> None:
    state = OpenSlots(_arrays([], 6), CPU).inputs.state
    assert not state.is_active.any()
    assert (state.head_page_table == PADDING_PAGE).all()


def test_open_rows_read_their_sources_in_order() -> None:
    inputs = _arrays([_sequence((7, 8), [3]), _sequence((9,), [5])], 1).upload(CPU)
    assert inputs.sources.tolist() == [[0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
