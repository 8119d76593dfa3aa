"""Slots hold what was placed in them last, and nothing of those before."""

from __future__ import annotations

import torch

from shared.runtime.round_state import RoundState, SlotSequence
from shared.tokens import SamplingParams

NUM_SLOTS, NUM_PAGES = 4, 12
ROOM = RoundState.empty(NUM_SLOTS, max_open_rows=3, num_pages=NUM_PAGES, device=torch.device("cpu"))


def _sequence(num_pages: int, num_head_pages: int, first: int) -> SlotSequence:
    return SlotSequence(
        num_tokens=5,
        last_token_id=first,
        sampling=SamplingParams(temperature=0.0),
        pages=range(first, first + num_pages),
        head_pages=range(first, first + num_head_pages),
    )


def _row(pages: range) -> list[int]:
    return [*pages, *[0] * (NUM_PAGES - len(pages))]


def test_a_slot_has_the_pages_of_its_sequence_alone() -> None:
    state = ROOM.emptied()
    state.place({1: _sequence(9, 7, 20), 3: _sequence(4, 1, 40)})
    assert state.page_table[1].tolist() == _row(range(20, 29))
    assert state.head_page_table[1].tolist() == _row(range(20, 27))
    assert state.page_table[3].tolist() == _row(range(40, 44))
    assert state.head_page_table[3].tolist() == _row(range(40, 41))
    state.clear([1])
    assert not state.page_table[1].any()
    assert not state.head_page_table[1].any()
    state.place({1: _sequence(2, 3, 60)})
    assert state.page_table[1].tolist() == _row(range(60, 62))
    assert state.head_page_table[1].tolist() == _row(range(60, 63))
    assert state.page_table[3].tolist() == _row(range(40, 44))
    assert state.lengths[1] == state.lengths[3] == 5


def test_pages_that_rounds_do_not_reach_are_left_out() -> None:
    state = ROOM.emptied()
    state.place({0: _sequence(NUM_PAGES + 5, 3, 1)})
    assert state.page_table[0].tolist() == _row(range(1, 1 + NUM_PAGES))
