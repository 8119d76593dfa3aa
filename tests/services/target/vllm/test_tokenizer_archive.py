"""The archive holds what a gateway needs, and never weights."""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from pathlib import Path

import pytest

from services.target.vllm.vllm_engine_service import tokenizer_archive
from shared.errors import CheckpointError


def _write(folder: Path, **texts: str) -> Path:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_the_first_folder_hides_the_second_and_weights_stay(tmp_path: Path) -> None:
    own = _write(tmp_path / "own", tokenizer__json="own", chat_template__jinja="{{ x }}")
    model = _write(
        tmp_path / "model", tokenizer__json="model", config__json="{}", model__safetensors="weights"
    )
    data, sha256 = tokenizer_archive((own, model))
    assert sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as packed:
        texts = {name: packed.read(name).decode() for name in packed.namelist()}
    assert texts == {
        "chat_template.jinja": "{{ x }}",
        "config.json": "{}",
        "tokenizer.json": "own",
    }


def test_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    folder = _write(tmp_path / "own", tokenizer__json="own")
    first = tokenizer_archive((folder,))
    os.utime(folder / "tokenizer.json", (0, 0))
    assert tokenizer_archive((folder,)) == first


def test_nothing_to_send_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no files of a tokenizer"):
        tokenizer_archive((_write(tmp_path / "own", model__safetensors="weights"),))
