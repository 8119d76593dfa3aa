"""Token ids of many documents in one array, training windows over it, and readers of text files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from shared.errors import CheckpointError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Token ids of concatenated documents.

    Attributes:
        tokens: of all documents, in any integer type.
        starts: `[documents + 1]`, the start of each document, then the end of the last one.
    """

    tokens: NDArray[Any]
    starts: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Documents:
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        tokens = [np.asarray(row, dtype=np.int32) for row in rows]
        return cls(np.concatenate(tokens) if tokens else np.zeros(0, np.int32), starts)

    @classmethod
    def load(cls, path: Path) -> Documents:
        """Reads an archive with `tokens` and `starts`, or `train_tokens` and `train_starts`.

        Raises:
            CheckpointError: the file is not such an archive.
        """
        try:
            with np.load(path, allow_pickle=False) as archive:
                prefix = "" if "tokens" in archive else "train_"
                return cls(archive[f"{prefix}tokens"], archive[f"{prefix}starts"])
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is no archive of tokens and starts: {error}") from error

    def save(self, path: Path) -> None:
        """Writes an archive that `load` reads."""
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, tokens=self.tokens, starts=self.starts)

    def rows(self) -> list[list[int]]:
        return [
            self.tokens[begin:end].tolist()
            for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]

    def window_starts(self, window: int) -> Ids:
        """Returns where windows may begin: at the start of a document and every `window` tokens in
        it, if the array has a whole window there."""
        lengths = np.diff(self.starts)
        counts = np.maximum(1, -(-lengths // window))
        begins = np.repeat(self.starts[:-1], counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        starts: Ids = begins + (np.arange(len(begins)) - first) * window
        return starts[starts + window <= len(self.tokens)]

    def counts(self, vocab_size: int) -> Ids:
        """Returns the number of occurrences of each token, `[vocab_size]`.

        Raises:
            CheckpointError: a token is not in the vocabulary.
        """
        counts = np.bincount(self.tokens, minlength=vocab_size)
        if len(counts) > vocab_size:
            raise CheckpointError(f"token {len(counts) - 1} is not in [0, {vocab_size})")
        return counts.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Source:
    """Documents, and their share of the batches.

    Attributes:
        share: weight relative to the other sources.
    """

    documents: Documents
    share: float = 1.0


class Windows:
    """Batches of windows, a function of step and rank alone: a resumed run continues as if it had
    not been interrupted.

    Raises:
        CheckpointError: a source is shorter than a window.
    """

    def __init__(self, sources: Sequence[Source], *, window: int, seed: int) -> None:
        self._sources = sources
        self._starts = [source.documents.window_starts(window) for source in sources]
        self._window, self._seed = window, seed
        for source, starts in zip(sources, self._starts, strict=True):
            if len(starts) == 0:
                tokens = len(source.documents.tokens)
                raise CheckpointError(f"{tokens} tokens are too few for a window of {window}")

    def batch(self, step: int, *, size: int, rank: int = 0) -> Ids:
        """Returns `[size, window]` ids. All ranks draw from the same source in one step."""
        shares = np.array([source.share for source in self._sources])
        pick = np.random.default_rng((self._seed, step)).choice(
            len(shares), p=shares / shares.sum()
        )
        draw = np.random.default_rng((self._seed, step, rank))
        begins = draw.choice(self._starts[pick], size=size)
        columns = begins[:, None] + np.arange(self._window)
        windows: Ids = self._sources[pick].documents.tokens[columns].astype(np.int64)
        return windows


def frequent_tokens(
    sources: Sequence[Documents], *, size: int, vocab_size: int, always: Collection[int] = ()
) -> tuple[list[int], float]:
    """Returns a reduced draft vocabulary: `size` token ids, most frequent first, and the share of
    all text that they cover.

    Source: Zhao et al., FR-Spec, arXiv 2502.14856, section 3.2.

    Args:
        always: tokens that are kept although they are rare, such as those that end an answer.

    Raises:
        CheckpointError: `size` is larger than the vocabulary, or a token is outside it.
    """
    if not 1 <= size <= vocab_size:
        raise CheckpointError(f"token map of {size}; it must be in [1, {vocab_size}]")
    counts = np.sum([documents.counts(vocab_size) for documents in sources], axis=0)
    ranked = counts.copy()
    ranked[list(always)] = counts.max() + 1
    chosen = np.argsort(-ranked, kind="stable")[:size]
    return chosen.tolist(), float(counts[chosen].sum() / max(counts.sum(), 1))


def write_token_map(token_ids: Sequence[int], path: Path) -> None:
    """Writes the target's token ids as a list in the order of draft ids."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(token_ids)) + "\n", encoding="utf-8")


class TextReader:
    """Reads files of texts, chats and prompts as token ids, with the tokenizer and the chat
    template of a model's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} has no tokenizer: {error}") from error

    def documents(self, path: Path) -> list[list[int]]:
        """Returns the texts of a file, each followed by the end token.

        A `.txt` file is one text. A line of a `.jsonl` file is a list of ids, a string, an object
        with `text`, or an object with `messages`, to which the chat template is applied.

        Raises:
            CheckpointError: a line is none of these.
        """
        if path.suffix != ".jsonl":
            return [self._text(path.read_text(encoding="utf-8"))]
        return [self._document(value, place) for value, place in _lines(path)]

    def prompts(self, path: Path) -> list[list[int]]:
        """Returns the prompts of a file, which end where the answer begins.

        A line of a `.jsonl` file is a list of ids, or an object with `messages`, or with `turns`,
        of which the first is the prompt. An archive has ids.

        Raises:
            CheckpointError: a line is none of these.
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
    """Yields the value and the place `FILE:LINE` of each line."""
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
