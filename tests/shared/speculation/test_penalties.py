"""Counts of committed tokens and of each row's own path."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.token_counts import TokenHistory, count_tokens

CPU = torch.device("cpu")
VOCAB_SIZE = 6
IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6)
HISTORIES = st.builds(
    TokenHistory,
    prompt_ids=IDS,
    output_ids=IDS,
    row_paths=st.lists(IDS, min_size=1, max_size=4),
    has_penalties=st.booleans(),
)


@given(st.lists(HISTORIES, min_size=1, max_size=4))
def test_counts_are_those_of_output_and_path(histories: list[TokenHistory]) -> None:
    counts = count_tokens(histories, vocab_size=VOCAB_SIZE, device=CPU)
    if not any(history.has_penalties for history in histories):
        assert counts is None
        return
    assert counts is not None
    rows = [(history, path) for history in histories for path in history.row_paths]
    assert counts.output.shape == (len(rows), VOCAB_SIZE)
    for row, (history, path) in enumerate(rows):
        expected = Counter((*history.output_ids, *path) if history.has_penalties else ())
        present = {*history.prompt_ids, *expected} if history.has_penalties else set()
        for token in range(VOCAB_SIZE):
            assert counts.output[row, token] == expected[token]
            assert bool(counts.occurs[row, token]) == (token in present)
