"""Percentiles and tables of the load and bench programs."""

from __future__ import annotations

import pytest

from tests.load.figures import percentile, table


@pytest.mark.parametrize(("percent", "expected"), [(1, 1.0), (50, 50.0), (99, 99.0), (100, 100.0)])
def test_percentiles_are_by_nearest_rank(percent: float, expected: float) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, percent) == expected


def test_one_value_is_every_percentile() -> None:
    assert [percentile([7.0], percent) for percent in (1, 50, 99)] == [7.0, 7.0, 7.0]


def test_columns_line_up() -> None:
    assert table(("mode", "tok/s"), [("plain", "9.5"), ("tree", "10.25")]) == (
        "mode   tok/s\nplain    9.5\ntree   10.25"
    )
