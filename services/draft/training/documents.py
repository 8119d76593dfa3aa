"""Token ids of many documents in one array, and the training windows over it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import CheckpointError

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """Documents one behind the other.

    Attributes:
        tokens: of all documents, any unsigned or signed integer type.
        starts: `[documents + 1]`, where each begins; the last is the end.
    """

    tokens: NDArray[Any]
    starts: Ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Documents:
        """Joins lists of ids."""
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
        """Returns every document as a list."""
        return [
            self.tokens[begin:end].tolist()
            for begin, end in zip(self.starts[:-1], self.starts[1:], strict=True)
        ]

    def window_starts(self, window: int) -> Ids:
        """Returns where windows may begin: at a document, and every `window` tokens in a long one,
        but not so late that the run ends first."""
        lengths = np.diff(self.starts)
        counts = np.maximum(1, -(-lengths // window))
        begins = np.repeat(self.starts[:-1], counts)
        first = np.repeat(np.cumsum(counts) - counts, counts)
        found: Ids = begins + (np.arange(len(begins)) - first) * window
        return found[found + window <= len(self.tokens)]

    def counts(self, vocab_size: int) -> Ids:
        """Returns how often each token occurs, `[vocab_size]`.

        Raises:
            CheckpointError: a token is not in the vocabulary.
        """
        found = np.bincount(self.tokens, minlength=vocab_size)
        if len(found) > vocab_size:
            raise CheckpointError(f"token {len(found) - 1} is not in [0, {vocab_size})")
        return found.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Source:
    """Documents and how often a batch is taken from them.

    Attributes:
        share: weight against the other sources.
    """

    documents: Documents
    share: float = 1.0


class Windows:
    """Batches of windows as a function of the step alone, so that a resumed run goes on as if it
    had not been interrupted, on any number of processes.

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
        found: Ids = self._sources[pick].documents.tokens[columns].astype(np.int64)
        return found
