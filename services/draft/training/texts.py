"""Reads files of texts, chats and prompts as token ids of the target's tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from services.draft.training.documents import Documents
from shared.errors import CheckpointError


class TextReader:
    """Encodes with the tokenizer and the chat template of a model's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} has no tokenizer: {error}") from error

    def documents(self, path: Path) -> list[list[int]]:
        """Returns the texts of a file, each with the end token behind it.

        A `.txt` file is one text. A line of a `.jsonl` file is a list of ids, a string, an object
        with `text`, or one with `messages`, which pass through the chat template.

        Raises:
            CheckpointError: names the line that is none of these.
        """
        if path.suffix != ".jsonl":
            return [self._text(path.read_text(encoding="utf-8"))]
        return [self._document(value, place) for value, place in _lines(path)]

    def prompts(self, path: Path) -> list[list[int]]:
        """Returns the prompts of a file, up to where the answer begins.

        A line of a `.jsonl` file is a list of ids, or an object with `messages` or with `turns`, of
        which the first is asked. An archive holds ids.

        Raises:
            CheckpointError: names the line that is none of these.
        """
        if path.suffix == ".npz":
            return Documents.load(path).rows()
        return [self._prompt(value, place) for value, place in _lines(path)]

    def _document(self, value: Any, place: str) -> list[int]:
        if _is_ids(value):
            return list(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, dict) and isinstance(value.get("text"), str):
            return self._text(value["text"])
        if isinstance(value, dict) and "messages" in value:
            return self._chat(value["messages"], is_prompt=False)
        raise CheckpointError(f"{place}: neither ids, nor a text, nor messages")

    def _prompt(self, value: Any, place: str) -> list[int]:
        if _is_ids(value):
            return list(value)
        if isinstance(value, dict) and "messages" in value:
            return self._chat(value["messages"], is_prompt=True)
        if isinstance(value, dict) and value.get("turns"):
            question = {"role": "user", "content": value["turns"][0]}
            return self._chat([question], is_prompt=True)
        raise CheckpointError(f"{place}: neither ids, nor messages, nor turns")

    def _text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        end = self._tokenizer.eos_token_id
        return ids if end is None else [*ids, end]

    def _chat(self, messages: list[dict[str, str]], *, is_prompt: bool) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=is_prompt, tokenize=False
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _lines(path: Path) -> Iterator[tuple[Any, str]]:
    """Yields the value of each line and where it stands."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line), f"{path}:{number}"
        except ValueError as error:
            raise CheckpointError(f"{path}:{number}: {error}") from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
