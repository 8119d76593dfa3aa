"""Each aim is measured by the program that it names, from the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from shared.tokens import TreeShape
from tests.bench.aims import AIMS
from tests.bench.choose import PROGRAMS
from tests.bench.decode_row import DecodeRow
from tests.bench.figure import Figure
from tests.bench.forward_line import (
    Company,
    Line,
    prefill_figure,
    same_bits_figure,
    steady_figure,
    verification_figure,
)
from tests.bench.mode_row import CHOSEN, ON_DEVICE, ModeRow
from tests.bench.products import COUNTS, SIZES, ProductRow, cost_figure
from tests.bench.round_line import RoundLine
from tests.bench.start_parts import FIRST_TOKEN, Part, first_token_figure
from tests.bench.tensor_parallel import speed_up

CHAIN, TREE = TreeShape(5, 1, 6), TreeShape(5, 8, 32)
MODE = ModeRow(
    mode="plain",
    shape=None,
    batch=1,
    tokens_per_s=240.0,
    over_plain=1.5,
    tokens_a_round=1.0,
    round_ms=4.0,
    floor_ms=3.0,
    num_same=1,
)
ROUND = RoundLine(
    tree=CHAIN,
    batch=1,
    temperature=0.0,
    round_ms=5.0,
    draft_ms=1.0,
    draft_floor_ms=0.9,
    verification_ms=4.2,
    verification_floor_ms=3.6,
    gap_us=4.0,
    num_tokens=4,
)
DECODE = DecodeRow(
    batch=64,
    overlaps=True,
    step_ms=6.4,
    device_ms=6.3,
    gap_us=0.0,
    floor_ms=5.0,
    whole_tokens_per_s=7000.0,
    num_same=64,
)
PLAIN, VERIFICATION = Line("plain", 4.0, 3.6), Line("verify 32 rows", 4.6, 4.0)
COMPANY = [Company("batch 2", True), Company("batch 8", True), Company("root", False)]
STEADY = [
    Line("steady, 16 rows", 8.5, 4.7, free_ms=6.8),
    Line("steady, 32 rows", 14.0, 7.0, free_ms=10.0),
]
PRODUCTS = [
    ProductRow(name, tuple(10.0 for _ in COUNTS), (9.0, 9.0, 11.0, 10.0), 8.0) for name in SIZES
]


def _rounds() -> list[RoundLine]:
    drawn = replace(ROUND, tree=TREE, temperature=1.0)
    kinds = [(tree, batch) for tree in (CHAIN, TREE) for batch in (1, 8)]
    return [*(replace(ROUND, tree=tree, batch=batch) for tree, batch in kinds), drawn]


def _modes() -> list[ModeRow]:
    kinds = [("plain", None), (ON_DEVICE, CHAIN), (ON_DEVICE, TREE), (CHOSEN, TREE)]
    kinds += [("EAGLE3, trees on the host", CHAIN)]
    return [
        replace(MODE, mode=mode, shape=shape, batch=batch)
        for mode, shape in kinds
        for batch in (1, 8, 32, 64)
    ]


def _gpu() -> list[Figure]:
    return [
        verification_figure(PLAIN, VERIFICATION),
        prefill_figure(Line("prefill", 398.0, 301.0)),
        same_bits_figure(COMPANY),
        steady_figure(STEADY),
        *(each for line in _rounds() for each in line.figures()),
    ]


def _decode() -> list[Figure]:
    rows = [
        replace(DECODE, batch=batch, overlaps=mode)
        for batch in (1, 8, 64)
        for mode in (True, False)
    ]
    return [each for row in rows for each in row.figures()]


def _parallel() -> list[Figure]:
    modes = [f"{size} × {name}" for size in (1, 2) for name in ("plain", "EAGLE3")]
    rows = [replace(MODE, mode=mode, batch=batch) for mode in modes for batch in (1, 8)]
    return [each for row in rows for each in speed_up(row, (1, 2))]


@pytest.mark.parametrize(
    ("program", "figures"),
    [
        ("engine_gpu", _decode()),
        ("gpu", _gpu()),
        ("products", [cost_figure(PRODUCTS)]),
        ("start", [first_token_figure([{FIRST_TOKEN: Part(22.0)}])]),
        ("tensor_parallel", _parallel()),
        ("wide", [each for row in _modes() for each in row.figures()]),
    ],
)
def test_rows_give_the_figures_that_are_aimed_at(program: str, figures: list[Figure]) -> None:
    wanted = {name for name, aim in AIMS.items() if aim.program == program}
    if program == "wide":
        # Counted before there are rows, see `test_wide`.
        wanted.remove("same answers, widened and small model")
    assert sorted(figure.name for figure in figures) == sorted(wanted)


def test_every_aim_has_a_program_that_make_bench_runs() -> None:
    assert {aim.program for aim in AIMS.values()} == {program.name for program in PROGRAMS}


def _only(figures: Iterable[Figure], name: str) -> tuple[float, float | None]:
    found = next(figure for figure in figures if figure.name == name)
    return found.measured, found.floor


def test_rates_and_their_floors_are_of_all_sequences() -> None:
    assert _only(_decode(), "plain decode, batch 64") == (10_000.0, 12_800.0)


def test_ratios_have_the_floor_of_what_is_above_the_line() -> None:
    name = "verification of 32 nodes over a plain step, batch 1"
    assert _only(_gpu(), name) == (4.6 / 4.0, 4.0 / 4.0)
    assert _only(_parallel(), "TP 2 over one GPU, batch 1") == (1.5, 1.5 * 4.0 / 3.0)
    modes = [each for row in _modes() for each in row.figures()]
    name = "accepted length × rounds over plain, tree of 32, batch 1"
    assert _only(modes, name) == (1.5, 1.5 * 4.0 / 3.0)
    assert _only(modes, "adaptive over plain, batch 8") == (1.5, None)


def test_rounds_have_the_floor_of_both_models() -> None:
    assert _only(_gpu(), "EAGLE-3 round alone, tree of 32, batch 8") == (5.0, 0.9 + 3.6)


def test_the_greatest_cost_of_the_same_bits_counts() -> None:
    assert _only(_gpu(), "cost of the same bits, steps of more rows") == (1.4, 0.7)
    measured, floor = _only([cost_figure(PRODUCTS)], cost_figure(PRODUCTS).name)
    assert (measured, floor) == pytest.approx((1.1, 0.8))
    assert cost_figure(PRODUCTS).note == "32 rows"
    assert _only(_gpu(), "same bits, alone and in company")[0] == pytest.approx(200.0 / 3.0)


def test_two_gpus_are_held_against_one_only() -> None:
    row = replace(MODE, mode="2 × plain")
    assert list(speed_up(row, (1, 2)))
    assert not list(speed_up(row, (2,)))


def test_a_start_is_the_median_of_those_behind_the_first() -> None:
    starts = [{FIRST_TOKEN: Part(seconds)} for seconds in (22.0, 9.0, 8.0, 8.5)]
    assert first_token_figure(starts).measured == 8.5
    assert first_token_figure(starts).note == "first start 22.0 s"
