"""Figures survive the file between two programs, and the program that wrote them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.bench.figure import Figure, FigureFile, add_figures_flag, read_figures

FIGURES = [Figure("first", 1.25, "ms", 1.0, "two µs"), Figure("second", -3.0, "×")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_figures_flag(parser)
    return parser


def test_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    path.write_text("of an earlier run\n")
    file = _parser().parse_args(["--figures", str(path)]).figures
    for each in FIGURES:
        file.add([each])
    assert read_figures(path) == FIGURES


def test_what_a_killed_program_was_writing_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    FigureFile(path).add(FIGURES)
    path.write_text(path.read_text()[:-5])
    assert read_figures(path) == FIGURES[:1]


def test_a_program_that_wrote_nothing_has_no_figures(tmp_path: Path) -> None:
    assert read_figures(tmp_path / "figures") == []


def test_without_the_flag_nothing_is_written() -> None:
    _parser().parse_args([]).figures.add(FIGURES)


def test_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "figures"
    with pytest.raises(SystemExit):
        _parser().parse_args(["--figures", str(path)])
    assert f"cannot write {path}: No such file or directory" in capsys.readouterr().err
