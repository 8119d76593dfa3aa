"""The model's tokenizer, read from `tokenizer.json` without transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer

from shared.errors import CheckpointError, DeadlineExceeded, InvalidArgument
from shared.text.token_bytes import read_token_bytes

MAX_PROMPT_CHARACTERS = 4 * 2**20
_INLINE_CHARACTERS = 4_096
"""Encoding this much costs about 1 ms; longer texts go to a thread."""
_NUM_THREADS = 2
_ENCODE_TIMEOUT_S = 30.0


class Tokenizer:
    """Text to token ids, and each token id to the bytes it stands for.

    Attributes:
        token_bytes: bytes of each token id; special tokens as they are spelled. A model may draw
            ids its tokenizer does not have (rows that pad the vocabulary): they have no bytes.
        special_ids: tokens that carry structure rather than text.
        longest_token: characters of the longest token.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        max_characters: int = MAX_PROMPT_CHARACTERS,
        *,
        timeout_s: float = _ENCODE_TIMEOUT_S,
    ) -> None:
        """Args:
        max_characters: longest text that `encode` takes.
        timeout_s: of one `encode`, its wait for a thread included.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._timeout_s = timeout_s
        # Threads of its own: what is given up on still runs to its end, and others must not wait.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        self.token_bytes = read_token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        spelled = (spelling.decode("utf-8", "replace") for spelling in self.token_bytes.values())
        self.longest_token = max(map(len, spelled), default=1)

    @classmethod
    def read(cls, folder: Path, max_characters: int = MAX_PROMPT_CHARACTERS) -> Tokenizer:
        """Raises:
        CheckpointError: the folder has no readable `tokenizer.json`.
        """
        path = folder / "tokenizer.json"
        try:
            return cls(FastTokenizer.from_str(path.read_text(encoding="utf-8")), max_characters)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except Exception as error:  # the library raises nothing more precise
            raise CheckpointError(f"{path} is not a tokenizer: {error}") from error

    def ids_of(self, specials: Collection[str]) -> frozenset[int]:
        """Returns the ids of special tokens by their text; those it does not have are left out."""
        wanted = {text.encode() for text in specials}
        return frozenset(i for i in self.special_ids if self.token_bytes.get(i) in wanted)

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of `text`. Special tokens spelled out in it become their ids.

        Args:
            max_tokens: a text that must have more is refused before it is looked at.

        Raises:
            InvalidArgument: the text has too many characters.
            DeadlineExceeded: it takes too long.
        """
        self._check_length(text, max_tokens)
        if len(text) <= _INLINE_CHARACTERS:
            return self._encode(text, add_special_tokens)
        loop = asyncio.get_running_loop()
        encoding = loop.run_in_executor(self._threads, self._encode, text, add_special_tokens)
        try:
            return await asyncio.wait_for(encoding, self._timeout_s)
        except TimeoutError as error:
            message = (
                f"the prompt has {len(text):,} characters; "
                f"they did not become tokens within {self._timeout_s:g} s"
            )
            raise DeadlineExceeded(message, reason="TOKENIZING_TOO_SLOW") from error

    def encode_word(self, word: str) -> list[int]:
        """Returns the token ids of a few characters."""
        assert len(word) <= _INLINE_CHARACTERS
        return self._encode(word, add_special_tokens=False)

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            num_tokens = -(-len(text) // self.longest_token)
            raise InvalidArgument.prompt_too_long(num_tokens, max_tokens, "at least ")
        if len(text) > self._max_characters:
            message = (
                f"the prompt has {len(text):,} characters; at most "
                f"{self._max_characters:,} are accepted"
            )
            raise InvalidArgument.of("PROMPT_TOO_LARGE", "prompt", message)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: unlike `encode`, it lets go of the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes.get(i, b"") for i in token_ids if i not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")
