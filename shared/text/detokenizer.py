"""Incremental detokenizer: token ids to text, whole characters only."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable

from shared.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes the output of one generation.

    The bytes of an unfinished character are kept until the character is whole; bytes that can
    never become one turn into U+FFFD. The joined text is that of decoding all tokens at once.

    Args:
        kept: special tokens that are not skipped, by their text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept: Collection[str] = (),
    ) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skipped_ids = tokenizer.special_ids - tokenizer.ids_of(kept)
        self._unfinished = b""

    def push(self, token_ids: Iterable[int]) -> str:
        """Returns the text that these tokens complete."""
        table, skipped = self._token_bytes, self._skipped_ids
        pieces = [table.get(i, b"") for i in token_ids if i not in skipped]
        data = self._unfinished + b"".join(pieces)
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._unfinished = data[num_read:]
        return text

    def flush(self) -> str:
        """Returns the rest at the end: U+FFFD for an unfinished character."""
        text, self._unfinished = self._unfinished.decode("utf-8", "replace"), b""
        return text
