"""Same ids, same fingerprint; other ids, another one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import CheckpointError
from shared.model_files import tokenizer_sha256

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 2, "content": "<s>"}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"a": 0, "ü": 1}, "merges": []},
    "decoder": {"type": "ByteLevel"},
}


def folder(path: Path, text: str, name: str = "tokenizer.json") -> Path:
    path.mkdir(exist_ok=True)
    (path / name).write_text(text, encoding="utf-8")
    return path


def fingerprint(path: Path, tokenizer: dict[str, Any], **format_options: Any) -> str:
    return tokenizer_sha256(folder(path, json.dumps(tokenizer, **format_options)))


def test_fingerprint_is_lower_case_hexadecimal_sha256(tmp_path: Path) -> None:
    text = fingerprint(tmp_path, TOKENIZER)
    assert len(bytes.fromhex(text)) == hashlib.sha256().digest_size
    assert text == text.lower()


def test_how_tools_rewrite_the_file_does_not_count(tmp_path: Path) -> None:
    plain = fingerprint(tmp_path, TOKENIZER)
    assert fingerprint(tmp_path, TOKENIZER, indent=2, ensure_ascii=False) == plain
    assert fingerprint(tmp_path, TOKENIZER, sort_keys=True) == plain
    padded = TOKENIZER | {"padding": {"length": 8}, "truncation": {"max_length": 9}}
    assert fingerprint(tmp_path, padded) == plain


@pytest.mark.parametrize(
    "change",
    [
        {"model": TOKENIZER["model"] | {"vocab": {"a": 1, "ü": 0}}},
        {"model": TOKENIZER["model"] | {"merges": ["a ü"]}},
        {"added_tokens": []},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"decoder": None},
    ],
)
def test_what_decides_ids_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    assert fingerprint(tmp_path, TOKENIZER | change) != fingerprint(tmp_path, TOKENIZER)


def test_order_of_merges_counts(tmp_path: Path) -> None:
    def merged(*merges: str) -> dict[str, Any]:
        return TOKENIZER | {"model": TOKENIZER["model"] | {"merges": list(merges)}}

    assert fingerprint(tmp_path, merged("a b", "c d")) != fingerprint(
        tmp_path, merged("c d", "a b")
    )


def test_folder_without_tokenizer_json_is_told_by_its_vocabulary(tmp_path: Path) -> None:
    first = tokenizer_sha256(folder(tmp_path / "a", "one", "tokenizer.model"))
    assert tokenizer_sha256(folder(tmp_path / "b", "one", "tokenizer.model")) == first
    assert tokenizer_sha256(folder(tmp_path / "c", "two", "tokenizer.model")) != first
    assert tokenizer_sha256(folder(tmp_path / "d", "one", "vocab.json")) != first


def test_folder_without_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no tokenizer"):
        tokenizer_sha256(tmp_path)


@pytest.mark.parametrize("text", ["not json", "[]", '"text"'])
def test_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json (is not JSON|holds a)"):
        tokenizer_sha256(folder(tmp_path, text))
