"""Several shapes of rounds: who takes how many sequences, and what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.target.rounds.round_runners import RoundRunners
from services.target.rounds.round_source import RoundSource
from shared.kv.pool import KvPool
from shared.runtime.round_runner import RoundRunner
from shared.runtime.runner import ModelRunner
from shared.tokens import TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair, load_pair
from tests.helpers.draft_heads import TinyHead
from tests.helpers.engines import PAGE_SIZE, VOCAB_SIZE

CPU = torch.device("cpu")
TREE, CHAIN, SHORT = TreeShape(3, 3, 9), TreeShape(3, 1, 4), TreeShape(1, 1, 2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=6)
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("target"), shape=shape, seed=3)
    head = TinyHead(kind="EAGLE3", vocab_size=VOCAB_SIZE, draft_vocab_size=20, has_embedding=False)
    return load_pair(folder, tmp_path_factory.mktemp("head"), head, CPU)


def _runners(pair: Pair) -> RoundRunners:
    pool = KvPool(pair.decoder.kv_layout(PAGE_SIZE), 20, CPU)
    source = RoundSource(
        head=pair.head,
        pool=KvPool(pair.head.kv_layout(PAGE_SIZE), 20, CPU),
        pages=range(1, 20),
        tree=TREE,
        max_context_tokens=60,
        max_sequences=5,
        other_trees={CHAIN: 12, SHORT: 32},
    )
    rows = torch.zeros((20 * PAGE_SIZE, pair.head.feature_spec.width))
    return RoundRunners(source, ModelRunner(pair.decoder, pool), rows)


def test_each_shape_takes_so_many_sequences(pair: Pair) -> None:
    runners = _runners(pair)
    assert runners.shapes_for(5) == (TREE, CHAIN, SHORT)
    assert runners.shapes_for(6) == (CHAIN, SHORT)
    assert runners.shapes_for(13) == (SHORT,)
    assert runners.shapes_for(33) == ()
    assert runners.max_sequences == 32
    assert [runners.num_computed(count) for count in (1, 3, 9, 32)] == [1, 4, 16, 32]
    assert runners.shape == TREE
    runners.turn_to(SHORT)
    assert runners.current.shape.tree == runners.shape == SHORT


def test_what_does_not_fit_at_some_size_goes_on_below_it(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    runners = _runners(pair)
    runners.turn_to(CHAIN)
    runners.confine(3)
    assert runners.shapes_for(2) == (TREE, CHAIN, SHORT)
    assert runners.shapes_for(3) == (TREE, SHORT)
    assert "no memory for rounds of 3 sequences with trees of 3 steps, 1 wide" in caplog.text


def _capturing(refused: TreeShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(runner: RoundRunner, num_sequences: int, sampling: object) -> None:
        if runner.shape.tree == refused:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RoundRunner, "capture", capture)


def test_a_shape_whose_graphs_do_not_fit_is_left_out(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _capturing(CHAIN, monkeypatch)
    assert _runners(pair).shapes_for(1) == (TREE, SHORT)
    assert "no memory for rounds with trees of 3 steps, 1 wide, 4 rows: left out" in caplog.text


def test_the_draft_s_own_shape_goes_on_with_what_fits(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _capturing(TREE, monkeypatch)
    assert _runners(pair).shapes_for(1) == (TREE, CHAIN, SHORT)
    assert "confined to what memory is left" in caplog.text
