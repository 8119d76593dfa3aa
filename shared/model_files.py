"""Files of a model folder: JSON objects, and the fingerprint of a tokenizer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from shared.errors import CheckpointError

_TOKENIZER_JSON = "tokenizer.json"
_OTHER_FILES = ("tokenizer.model", "vocab.json", "merges.txt")
# What of tokenizer.json decides which ids a text becomes and which text ids become.
_DECISIVE_KEYS = ("added_tokens", "normalizer", "pre_tokenizer", "model", "decoder")


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
    """Returns the ids of the model in a folder; 0 where there is none, or it does not say.

    Raises:
        CheckpointError: its config.json cannot be read.
    """
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else 0)
    return size if isinstance(size, int) else 0


def has_tokenizer(folder: Path) -> bool:
    """Whether a model's folder brings a tokenizer."""
    return any((folder / name).is_file() for name in (_TOKENIZER_JSON, *_OTHER_FILES))


def tokenizer_sha256(folder: Path) -> str:
    """Returns the SHA-256, lower-case hexadecimal, of the files that decide a tokenizer's ids, by
    which two processes check that they share them.

    Padding, truncation and formatting of `tokenizer.json` do not count, because tools rewrite
    them; for folders without that file, of their vocabulary files.

    Raises:
        CheckpointError: the folder holds no tokenizer, or one that cannot be read.
    """
    path = folder / _TOKENIZER_JSON
    if path.is_file():
        return hashlib.sha256(_decisive_json(path)).hexdigest()
    present = [folder / name for name in _OTHER_FILES if (folder / name).is_file()]
    if not present:
        names = ", ".join((_TOKENIZER_JSON, *_OTHER_FILES))
        raise CheckpointError(f"{folder} holds no tokenizer: none of {names}")
    digest = hashlib.sha256()
    for file in present:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _decisive_json(path: Path) -> bytes:
    content = read_json(path)
    decisive = {key: content.get(key) for key in _DECISIVE_KEYS}
    return json.dumps(decisive, sort_keys=True, ensure_ascii=False).encode()
