"""Several shapes of rounds: who takes how many sequences, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from services.target.rounds.round_shapes import RoundShapes, RoundSource
from shared.kv.pool import KvPool
from shared.runtime.memory import Shortage
from shared.runtime.round_head import OwnHead
from shared.runtime.round_runner import RoundRunner
from shared.runtime.runner import ModelRunner
from shared.runtime.tree_model import HeadModel
from shared.tokens import TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import PAGE_SIZE

CPU = torch.device("cpu")
TREE, CHAIN, SHORT = TreeShape(3, 3, 9), TreeShape(3, 1, 4), TreeShape(1, 1, 2)


OTHERS = {CHAIN: 12, SHORT: 32}


def _shapes(pair: Pair, others: Mapping[TreeShape, int] = OTHERS) -> RoundShapes:
    pool = KvPool(pair.decoder.kv_layout(PAGE_SIZE), 20, CPU)
    source = RoundSource(
        head=OwnHead(HeadModel(pair.head, KvPool(pair.head.kv_layout(PAGE_SIZE), 20, CPU))),
        pages=range(1, 20),
        trees={TREE: 5, **others},
        max_context_tokens=60,
    )
    rows = torch.zeros((20 * PAGE_SIZE, pair.head.feature_spec.width))
    return RoundShapes(source, ModelRunner(pair.decoder, pool), rows)


def test_each_shape_takes_so_many_sequences(pair: Pair) -> None:
    shapes = _shapes(pair)
    assert shapes.shapes_for(5) == (TREE, CHAIN, SHORT)
    assert shapes.shapes_for(6) == (CHAIN, SHORT)
    assert shapes.shapes_for(13) == (SHORT,)
    assert shapes.shapes_for(33) == ()
    assert shapes.max_sequences == 32
    assert [shapes.runner.num_computed(count) for count in (1, 3, 9, 32)] == [1, 4, 12, 32]
    assert shapes.shape == TREE
    shapes.turn_to(SHORT)
    assert shapes.runner.shape.tree == shapes.shape == SHORT


def test_what_does_not_fit_at_some_size_goes_on_below_it(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = _shapes(pair)
    shapes.turn_to(CHAIN)
    shapes.limit(3, Shortage())
    assert shapes.shapes_for(2) == (TREE, CHAIN, SHORT)
    assert shapes.shapes_for(3) == (TREE, SHORT)
    assert "no memory for rounds of 3 sequences with trees of 3 steps, 1 wide" in caplog.text


def _refuse(shape: TreeShape | None, most: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has memory for graphs of a shape, or of every shape, for so many sequences; returns what is
    asked for."""
    asked = []

    def capture(runner: RoundRunner, num_sequences: int, sampling: object) -> None:
        if shape in (None, runner.shape.tree):
            asked.append(num_sequences)
            if num_sequences > most:
                raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(RoundRunner, "capture", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return asked


@pytest.mark.parametrize(("most", "fits"), [(0, 0), (3, 2), (8, 8)])
def test_a_shape_whose_graphs_do_not_fit_is_left_out(
    pair: Pair,
    most: int,
    fits: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = _refuse(CHAIN, most, monkeypatch)
    shapes = _shapes(pair)
    for count in range(1, 13):
        assert (CHAIN in shapes.shapes_for(count)) == (count <= fits)
        assert SHORT in shapes.shapes_for(count)
    assert max(asked) <= 12
    told = f"trees of 3 steps, 1 wide, 4 rows and more than {fits} sequences: left out"
    assert told in caplog.text


def test_without_memory_for_any_round_there_are_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(None, 1, monkeypatch)
    assert _shapes(pair).max_sequences == 1
    _refuse(None, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        _shapes(pair)


def test_every_graph_is_there_at_the_start(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _refuse(TREE, 8, monkeypatch)
    _shapes(pair)
    assert asked[::2] == [5, 4, 2, 1]  # of each kind, the largest first


def test_times_are_measured_for_each_shape(pair: Pair) -> None:
    costs = _shapes(pair).costs()
    assert set(costs.rounds) == {TREE, *OTHERS}
    assert set(costs.rounds[TREE]) == {1, 4, 5}
    assert all(seconds > 0 for times in costs.rounds.values() for seconds in times.values())
    assert set(costs.plain) == {1, 4, 16}
