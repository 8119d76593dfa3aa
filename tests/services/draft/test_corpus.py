"""Reading the n-gram corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.draft.drafter_factory import load_encode, read_corpus
from shared.errors import SettingsError
from tests.helpers.checkpoints import write_byte_tokenizer


def test_json_lines_hold_token_ids_or_texts(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('[1, 2, 3]\n\n"ab"\n')
    encode = load_encode(write_byte_tokenizer(tmp_path))
    assert list(read_corpus(path, encode)) == [[1, 2, 3], [97, 98]]


def test_any_other_file_is_one_text(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("a\nb")
    encode = load_encode(write_byte_tokenizer(tmp_path))
    assert list(read_corpus(path, encode)) == [[97, 10, 98]]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ('[1]\n{"a": 1}\n', "corpus.jsonl:2: neither a string nor a list of token ids"),
        ("[1, -2]\n", "corpus.jsonl:1: neither"),
        ("[1, true]\n", "corpus.jsonl:1: neither"),
        ("[1\n", "corpus.jsonl:1: "),
        ('"text"\n', "corpus.jsonl:1 holds text; name its tokenizer"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(SettingsError) as caught:
        list(read_corpus(path, None))
    assert part in caught.value.message


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing\.txt"):
        list(read_corpus(tmp_path / "nothing.txt", None))
    with pytest.raises(SettingsError, match=r"has no tokenizer\.json"):
        load_encode(tmp_path)
