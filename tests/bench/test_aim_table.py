"""The table of aims: what is reached, what is not, and what was not measured."""

from __future__ import annotations

import pytest

from tests.bench.aim_table import aim_table
from tests.bench.aims import AIMS, figure


def _cells(table: str, name: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_every_aim_has_a_row_and_a_reason_where_nothing_was_measured() -> None:
    table = aim_table([], lambda program: f"no {program}")
    rows = table.splitlines()[2 : 2 + len(AIMS)]
    assert [row.split("|")[1].strip() for row in rows] == list(AIMS)
    for aim in AIMS.values():
        assert _cells(table, aim.name) == [
            *("–", "–", "–", str(aim), f"not measured: no {aim.program}")
        ]
    num_wanted = sum(str(aim) != "–" for aim in AIMS.values())
    assert table.endswith(f"\n0 of {num_wanted} aims reached, {len(AIMS)} figures not measured")


@pytest.mark.parametrize(
    ("name", "measured", "floor", "expected"),
    [
        (  # A share of the floor, of a rate.
            "plain decode, batch 1",
            241.0,
            256.0,
            ["241 tokens/s", "256 tokens/s", "94%", "≥ 90% of the floor", "yes, 1.046"],
        ),
        (  # … and of a time.
            "prefill of 8 × 2,048 tokens",
            1398.0,
            301.0,
            ["1,398 ms", "301 ms", "22%", "≥ 55% of the floor", "no, 0.391"],
        ),
        (  # Just missed: three digits say so.
            "verification of 32 nodes over a plain step, batch 1",
            1.104,
            0.98,
            ["1.10 ×", "0.98 ×", "89%", "≤ 1.1 ×", "no, 0.996"],
        ),
        (
            "adaptive over plain, batch 64",
            1.0,
            None,
            ["1.00 ×", "–", "–", "≥ 1 ×", "yes, 1.000"],
        ),
        (  # A difference of two times can be below nothing.
            "host between rounds, chain of 5, batch 1",
            -12.0,
            None,
            ["-12.0 µs", "–", "–", "≤ 50 µs", "yes"],
        ),
        ("start to the first token", 8.48, None, ["8.48 s", "–", "–", "–", "–"]),
        (
            "plain decode, batch 64",
            9000.0,
            None,
            ["9,000 tokens/s", "–", "–", "≥ 85% of the floor", "not measured: no floor"],
        ),
    ],
)
def test_a_figure_stands_beside_its_floor_and_its_aim(
    name: str, measured: float, floor: float | None, expected: list[str]
) -> None:
    table = aim_table([figure(name, measured, floor)], lambda program: program)
    assert _cells(table, name) == expected
    num_reached = expected[-1].startswith("yes")
    assert table.splitlines()[-1].startswith(f"{num_reached:d} of ")


def test_notes_stand_behind_what_was_measured() -> None:
    found = figure("TP 2 over one GPU, batch 1", 1.59, 2.4, "2.68 ms")
    table = aim_table([found], lambda program: program)
    assert _cells(table, found.name)[0] == "1.59 × (2.68 ms)"


def test_a_figure_without_an_aim_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        figure("plain decode, batch 3", 1.0)
