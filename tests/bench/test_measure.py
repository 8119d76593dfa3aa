"""How the passes of a benchmark reduce to its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.measure import Pass, summarise
from tests.load.chat import ChatResult
from tests.load.prompts import load_prompts


def _result(text: str, num_tokens: int, rounds: int | None) -> ChatResult:
    return ChatResult(text, 1.0, (0.5, 1.0), num_tokens, rounds)


def test_accepted_length_counts_the_bonus_token() -> None:
    measured = Pass((_result("a", 12, 4), _result("b", 6, 2)), duration_s=3.0)
    assert measured.accepted_length == 3.0
    assert measured.tokens_per_s == 6.0


def test_accepted_length_is_unknown_when_one_answer_does_not_report_it() -> None:
    assert Pass((_result("a", 12, 4), _result("b", 6, None)), 3.0).accepted_length is None


def test_answers_are_compared_with_the_plain_ones() -> None:
    passes = [Pass((_result("a", 4, 2), _result("b", 4, 2)), 2.0)]
    measurement = summarise("tree", passes, plain_texts=("a", "x"))
    assert (measurement.num_identical, measurement.num_prompts) == (1, 2)


def test_prompts_are_read_from_the_usual_formats(tmp_path: Path) -> None:
    records = [
        {"prompt": "one"},
        {"turns": ["two", "later"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"question": "four"},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n")
    assert load_prompts(file) == ("one", "two", "three", "four")


def test_a_record_without_a_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "?"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1 has none of"):
        load_prompts(file)
