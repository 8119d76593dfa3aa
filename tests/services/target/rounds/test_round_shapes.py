"""Several shapes of rounds: who takes how many sequences, and what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import pytest
import torch

from services.target.rounds import round_shapes
from services.target.rounds.round_shapes import RoundShapes, RoundSource, round_sizes
from shared.kv.pool import KvPool
from shared.runtime.graphs import round_graph_bytes
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
    told = f"rounds of more than {fits} sequences with trees of 3 steps, 1 wide, 4 rows"
    assert told in caplog.text


def test_without_memory_for_any_round_there_are_none(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _refuse(None, 1, monkeypatch)
    assert _shapes(pair).max_sequences == 1
    _refuse(None, 0, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        _shapes(pair)


class _Device:
    """A GPU whose graphs share memory: a larger one than all before takes what it needs anew.

    Attributes:
        asked: shapes and sizes, in the order of their captures.
    """

    def __init__(self, free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes, self._largest_bytes = free_bytes, 0
        self.asked: list[tuple[TreeShape, int]] = []
        monkeypatch.setattr(RoundShapes, "_is_cuda", True)
        monkeypatch.setattr(round_shapes, "free_memory_bytes", lambda device: self.free_bytes)
        monkeypatch.setattr(round_shapes, "step_memory_bytes", lambda decoder: STEP_BYTES)
        monkeypatch.setattr(round_shapes, "round_graph_bytes", self._graph_bytes)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(RoundRunner, "capture", self._capturing())

    def _capturing(self) -> Callable[[RoundRunner, int, object], None]:
        def capture(runner: RoundRunner, count: int, sampling: object) -> None:
            self.asked.append((runner.shape.tree, count))
            size_bytes = self._graph_bytes(None, count * runner.shape.num_tree_rows, count, 0)
            if size_bytes > self._largest_bytes:
                assert size_bytes <= self.free_bytes
                self.free_bytes -= size_bytes
                self._largest_bytes = size_bytes

        return capture

    def _graph_bytes(self, decoder: object, num_rows: int, count: int, context: int) -> int:
        return 2**20 * (num_rows + count)


STEP_BYTES = 100 * 2**20


def test_graphs_of_all_shapes_share_the_memory_of_the_largest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = _Device(STEP_BYTES + 96 * 2**20, monkeypatch)
    shapes = _shapes(pair)
    assert [device.asked[2 * k] for k in range(3)] == [(SHORT, 32), (SHORT, 24), (CHAIN, 12)]
    assert set(device.asked) == {
        (shape, count) for shape, most in {TREE: 5, **OTHERS}.items() for count in round_sizes(most)
    }
    assert device.free_bytes == STEP_BYTES
    assert shapes.shape == shapes.runner.shape.tree == TREE
    assert shapes.shapes_for(5) == (TREE, CHAIN, SHORT)
    assert shapes.max_sequences == 32
    assert "CUDA graphs of rounds take 96.00 MiB" in caplog.text
    assert "no memory" not in caplog.text


@pytest.mark.parametrize(
    ("free_mib", "fits"),
    [(95, (5, 12, 24)), (59, (5, 8, 16)), (49, (4, 8, 16)), (11, (1, 2, 2)), (3, (0, 0, 1))],
)
def test_shapes_keep_the_sizes_that_fit_beside_a_planned_step(
    pair: Pair,
    free_mib: int,
    fits: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    device = _Device(STEP_BYTES + free_mib * 2**20, monkeypatch)
    shapes = _shapes(pair)
    for shape, most in zip((TREE, CHAIN, SHORT), fits, strict=True):
        for count in range(1, 33):
            assert (shape in shapes.shapes_for(count)) == (count <= most), (shape, count)
    assert device.free_bytes >= STEP_BYTES
    told = (
        f"no memory for rounds of more than {fits[2]} sequences with trees of 1 steps, 1 wide, 2 "
        "rows and for planned steps beside them: "
    )
    assert told in caplog.text


def test_rounds_of_more_rows_or_sequences_take_more_memory(pair: Pair) -> None:
    sizes = [round_graph_bytes(pair.decoder, 8 * count, count, 2048) for count in round_sizes(256)]
    assert sizes == sorted(set(sizes))
    # Logits and attention's partial results alone take as much.
    config = pair.decoder.config
    assert sizes[-1] > 4 * 2048 * (config.vocab_size + 24 * config.num_heads * config.head_dim)
    assert sizes[-1] > round_graph_bytes(pair.decoder, 4 * 256, 256, 2048)
    assert sizes[-1] > round_graph_bytes(pair.decoder, 2048, 64, 2048)


def test_a_shortage_names_what_graphs_and_a_planned_step_take(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _Device(STEP_BYTES + 95 * 2**20, monkeypatch)
    _shapes(pair)
    assert "196.00 MiB more wanted, 195.00 MiB free" in caplog.text


def test_without_memory_for_planned_steps_there_are_no_rounds(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = _Device(STEP_BYTES, monkeypatch)
    with pytest.raises(torch.OutOfMemoryError):
        _shapes(pair)
    assert not device.asked


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
