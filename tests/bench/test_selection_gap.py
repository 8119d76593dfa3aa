"""The bench of selected rounds runs, and its rounds are what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.kv.pool import KvPool
from shared.tokens import TokenTree
from tests.bench.selection_gap import CHAIN_3, CONTEXT, TREE_11, Rounds, round_ms
from tests.helpers.engines import tiny_decoder


@pytest.mark.parametrize("tree", [CHAIN_3, TREE_11], ids=["chain", "tree"])
def test_a_tree_fits_in_every_round(tmp_path: Path, tree: TokenTree) -> None:
    decoder = tiny_decoder(tmp_path)
    pool = KvPool(decoder.kv_layout(16), 200, decoder.device)
    rounds = Rounds(decoder, pool, 2, tree)
    for launch in (rounds.launch_early, rounds.launch_asked, rounds.launch_late):
        assert round_ms(rounds, launch, num_rounds=4, repeats=1) > 0.0
        # One to begin with, one to warm up, and those that were timed.
        assert all(length >= CONTEXT + 6 for length in rounds._lengths.values())
