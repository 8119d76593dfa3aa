"""The model's tokenizer, read from `tokenizer.json` without transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from pathlib import Path

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from shared.errors import CheckpointError, InvalidArgument
from shared.text.token_bytes import read_token_bytes

MAX_PROMPT_CHARACTERS = 4 * 2**20
_INLINE_CHARACTERS = 16_384
"""Encoding this much costs about 2 ms; longer texts go to a thread (the library drops the GIL)."""


class Tokenizer:
    """Text to token ids, and each token id to the bytes it stands for.

    Attributes:
        token_bytes: bytes of each token id; special tokens as they are spelled. A model may draw
            ids its tokenizer does not have (rows that pad the vocabulary): they have no bytes.
        special_ids: tokens that carry structure rather than text.
    """

    def __init__(
        self, tokenizer: FastTokenizer, max_characters: int = MAX_PROMPT_CHARACTERS
    ) -> None:
        """Args:
        max_characters: longest text that `encode` takes.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self.token_bytes = read_token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

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

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of `text`. Special tokens spelled out in it become their ids.

        Raises:
            InvalidArgument: the text has too many characters.
        """
        if len(text) > self._max_characters:
            message = (
                f"the prompt has {len(text):,} characters; at most "
                f"{self._max_characters:,} are accepted"
            )
            raise InvalidArgument.of("PROMPT_TOO_LARGE", "prompt", message)
        if len(text) <= _INLINE_CHARACTERS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            encoding = await asyncio.to_thread(self._encode, text, add_special_tokens)
        return list(encoding.ids)

    def _encode(self, text: str, add_special_tokens: bool) -> Encoding:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes.get(i, b"") for i in token_ids if i not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")
