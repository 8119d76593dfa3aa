"""Files of a model folder: JSON objects, and the fingerprint of a tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError

_TOKENIZER_JSON = "tokenizer.json"
_VOCABULARY_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
# The parts of tokenizer.json that affect encoding or decoding.
_HASHED_KEYS = ("added_tokens", "normalizer", "pre_tokenizer", "model", "decoder")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object that a file holds.

    Raises:
        CheckpointError: the file is missing or holds no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must be an object")
    return content


def num_ids(folder: Path) -> int:
    """Returns the vocabulary size of the model in a folder; 0 if its config has none.

    Raises:
        CheckpointError: its config.json cannot be read.
    """
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else 0)
    return size if isinstance(size, int) else 0


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_TOKENIZER_JSON, *_VOCABULARY_FILES))


def tokenizer_sha256(folder: Path) -> str:
    """Returns the SHA-256, lower-case hexadecimal, of the files that determine a tokenizer's ids.
    By it two processes check that they have the same tokenizer.

    It is that of `tokenizer.json` without padding, truncation and formatting, which tools rewrite;
    in folders without that file, that of the vocabulary files.

    Raises:
        CheckpointError: the folder holds no tokenizer, or one that cannot be read.
    """
    path = folder / _TOKENIZER_JSON
    if path.is_file():
        content = read_json(path)
        hashed = {key: content.get(key) for key in _HASHED_KEYS}
        text = json.dumps(hashed, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()
    present = [folder / name for name in _VOCABULARY_FILES if (folder / name).is_file()]
    if not present:
        names = ", ".join((_TOKENIZER_JSON, *_VOCABULARY_FILES))
        raise CheckpointError(f"{folder} holds no tokenizer: none of {names}")
    digest = hashlib.sha256()
    for file in present:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
