"""Logs of both ends become one picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.bench.round_svg import draw_rounds, picture, read_rounds

Record = Mapping[str, str | int | float]


def _write(path: Path, records: Sequence[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _step(start_s: float, **facts: int) -> Record:
    none = dict.fromkeys(
        ("hits", "late", "misses", "ahead", "drafted", "sequences", "committed"), 0
    )
    facts = none | facts
    return {"name": "step", "start_s": start_s, "end_s": start_s + 0.004, **facts}


def _instant(name: str, number: int, at_s: float) -> Record:
    return {
        "name": name, "stream": "a", "number": number, "at_s": at_s, "bytes": 99, "kind": "k",
    }  # fmt: skip


def test_messages_are_matched_by_their_number(tmp_path: Path) -> None:
    target = [
        _step(0.0, hits=1),
        _instant("sent", 0, 0.004),
        _instant("received", 0, 0.0075),
        _step(0.005, late=1),
        _instant("sent", 1, 0.009),
        _step(0.015),
    ]
    draft = [
        _instant("received", 0, 0.005),
        {"name": "ahead", "start_s": 0.005, "end_s": 0.006, "trees": 3},
        _instant("sent", 0, 0.0065),
    ]
    rounds = read_rounds(_write(tmp_path / "t", target), _write(tmp_path / "d", draft))
    assert [step.kind for step in rounds.steps] == ["hit", "late", "plain"]
    assert [(m.from_target, m.sent_s, m.received_s) for m in rounds.messages] == [
        (True, 0.004, 0.005),
        (False, 0.0065, 0.0075),
    ]
    assert round(rounds.idle_share, 3) == round(1 - 0.012 / 0.019, 3)


def test_rounds_on_the_device_have_trees_that_were_prepared_or_grew(tmp_path: Path) -> None:
    target = [
        _step(0.0, drafted=3, sequences=32, committed=40),
        _step(0.005, drafted=3, ahead=True),
        _step(0.01, ahead=True),
    ]
    draft = [
        {"name": name, "start_s": 0.001 * at, "end_s": 0.001 * at + 0.0005}
        for at, name in enumerate(("read", "propose", "ahead", "select"))
    ]
    rounds = read_rounds(_write(tmp_path / "t", target), _write(tmp_path / "d", draft))
    assert [step.kind for step in rounds.steps] == ["tree", "prepared", "plain"]
    assert [each.kind for each in rounds.drafts] == ["read", "propose", "ahead", "select"]
    drawn = picture(rounds, 3, 0)
    assert "1 verdicts prepared for in time" in drawn.title
    assert ", 32 sequences, 3 nodes, 40 tokens kept</title>" in drawn.svg


def test_picture_is_well_formed_and_shows_the_window(tmp_path: Path) -> None:
    target = [_step(0.005 * number, hits=1) for number in range(10)]
    draft = [
        {"name": "propose", "start_s": 0.001, "end_s": 0.002, "trees": 1},
        {"name": "read", "start_s": 0.011, "end_s": 0.012, "tokens": 9},
    ]
    rounds = read_rounds(_write(tmp_path / "t", target), _write(tmp_path / "d", draft))
    shown = rounds.window(2, 4)
    assert len(shown.steps) == 4
    assert [each.kind for each in shown.drafts] == ["read"]
    root = ElementTree.fromstring(draw_rounds(shown, "hits & misses"))
    titles = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert sum("prepared for" in title for title in titles) == 4


@pytest.mark.parametrize("line", ["serving", "3", "{}"])
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str) -> None:
    good = _write(tmp_path / "t", [_step(0.0)])
    (tmp_path / "d").write_text(f'{{"name": "sent"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"/d, line 2: "):
        read_rounds(good, tmp_path / "d")
