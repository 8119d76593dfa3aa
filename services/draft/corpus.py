"""Texts the n-gram drafter knows before the first request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.errors import SettingsError

Encode = Callable[[str], list[int]]


def read_corpus(path: Path, encode: Encode | None) -> Iterator[list[int]]:
    """Yields the token ids of each text: a `.txt` file is one, a `.jsonl` file has one a line,
    either a JSON string or a list of token ids.

    Args:
        encode: the tokenizer; None when there is none.

    Raises:
        SettingsError: the file is missing or malformed, or holds text and there is no tokenizer;
            names the line.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _problem(str(error)) from error
    if path.suffix != ".jsonl":
        yield _encoded(content, encode, str(path))
        return
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip():
            yield _parsed(line, encode, f"{path}:{number}")


def load_encode(folder: Path) -> Encode:
    """Returns the tokenizer of a folder without special tokens.

    Raises:
        SettingsError: the folder has no `tokenizer.json`.
    """
    from tokenizers import Tokenizer  # only where a corpus is read

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise _problem(f"{folder} has no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _parsed(line: str, encode: Encode | None, place: str) -> list[int]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise _problem(f"{place}: {error}") from error
    if isinstance(value, str):
        return _encoded(value, encode, place)
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return value
    raise _problem(f"{place}: neither a string nor a list of token ids")


def _encoded(text: str, encode: Encode | None, place: str) -> list[int]:
    if encode is None:
        raise _problem(f"{place} holds text; name its tokenizer with --tokenizer")
    return encode(text)


def _problem(message: str) -> SettingsError:
    return SettingsError((f"--speculative-ngram-corpus-path: {message}",))
