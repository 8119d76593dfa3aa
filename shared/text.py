"""The model's tokenizer, read from `tokenizer.json` without transformers; its detokenizer and stop
strings.

The bytes of each token are in a table: detokenizing costs one look-up per token, an incremental
UTF-8 decoder joins characters that are split over tokens, and the `bytes` of log probabilities are
exact. Two families are supported: byte-level BPE, whose vocabulary spells each byte as a printable
character, and SentencePiece, whose vocabulary spells a space as `▁` and unknown bytes as `<0x0A>`.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer as FastTokenizer

from shared.errors import CheckpointError, DeadlineExceeded, InvalidArgument

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"
MAX_PROMPT_CHARACTERS = 4 * 2**20
_INLINE_CHARACTERS = 4_096
"""Longest text that is encoded inline, in about 1 ms; longer texts are encoded on a thread."""
_NUM_THREADS = 2
_ENCODE_TIMEOUT_S = 30.0


class StopStrings:
    """Finds the stop string that ends first in a text that arrives in pieces.

    Text is held back only while it may be the beginning of a stop string. Of several stop strings
    that end at the same character, the longest counts.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False) -> None:
        assert all(stop_strings), "an empty stop string would match everywhere"
        self._stop_strings = tuple(stop_strings)
        self._include_in_output = include_in_output
        self._held_back = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Returns the text that is safe to send; none may be pushed after a match."""
        assert self.matched is None, "no text comes after a stop string"
        if not self._stop_strings:
            return text
        text = self._held_back + text
        match = self._first_match(text)
        if match is not None:
            start, end = match
            self.matched, self._held_back = text[start:end], ""
            return text[: end if self._include_in_output else start]
        num_held = held_length(text, self._stop_strings)
        self._held_back = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def flush(self) -> str:
        """Returns the text held back, at the end of the output."""
        held, self._held_back = self._held_back, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        matches = (
            (start + len(stop), start)
            for stop in self._stop_strings
            if (start := text.find(stop)) >= 0
        )
        end, start = min(matches, default=(0, 0))
        return (start, end) if end else None


def held_length(text: str, strings: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of one of `strings`."""
    return max((_overlap(text, string) for string in strings), default=0)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `stop`. Looks only at
    occurrences of the first character of `stop`, of which most texts have none."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0


def read_token_bytes(tokenizer: tokenizers.Tokenizer) -> dict[int, bytes]:
    """Returns the bytes of every token id.

    Raises:
        ValueError: the tokenizer is of neither family.
    """
    spell = _speller(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {
        token_id: token.encode() if token_id in added else spell(token)
        for token, token_id in vocabulary.items()
    }


def _speller(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    decoder: dict[str, Any] = json.loads(tokenizer.to_str())["decoder"] or {"decoders": []}
    kinds = {step["type"] for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in kinds:
        return _byte_level_speller()
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes
    raise ValueError(f"decoder {sorted(kinds) or None} is neither byte-level nor SentencePiece")


def _byte_level_speller() -> Callable[[str], bytes]:
    byte_of = {character: byte for byte, character in _byte_characters()}

    def spell(token: str) -> bytes:
        try:
            return bytes(map(byte_of.__getitem__, token))
        except KeyError:  # a token that the vocabulary has as plain text
            return token.encode()

    return spell


def _byte_characters() -> Iterator[tuple[int, str]]:
    """Yields each byte with the character that spells it in a byte-level vocabulary.

    Printable Latin-1 bytes spell themselves; the other bytes are U+0100 and up, in order.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    num_moved = 0
    for byte in range(256):
        if byte in printable:
            yield byte, chr(byte)
        else:
            yield byte, chr(0x100 + num_moved)
            num_moved += 1


def _sentencepiece_bytes(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    if match:
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode()


class _CharacterTexts(dict[int, str]):
    """Texts of tokens that are whole characters, each decoded at its first use."""

    def __init__(self, token_bytes: Mapping[int, bytes], special_ids: Collection[int]) -> None:
        super().__init__()
        self._token_bytes = token_bytes
        self._special_ids = special_ids

    def __missing__(self, token_id: int) -> str:
        if token_id in self._special_ids:
            raise KeyError(token_id)
        try:
            text = self._token_bytes[token_id].decode()
        except UnicodeDecodeError as error:
            raise KeyError(token_id) from error
        self[token_id] = text
        return text


class Tokenizer:
    """Encodes text as token ids, and decodes token ids.

    Attributes:
        token_bytes: bytes of each token id; for special tokens, their spelling. Ids that only the
            model has (rows that pad the vocabulary) have no bytes.
        whole_texts: text of each token that is not special and consists of whole characters.
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
        max_characters: longest text that `encode` accepts.
        timeout_s: of one `encode`, the wait for a thread included.
        """
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self._max_characters = max_characters
        self._timeout_s = timeout_s
        # Its own threads: a call that has timed out still occupies its thread until it ends, which
        # must not delay users of a shared pool.
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "tokenizer")
        self.token_bytes = read_token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.whole_texts = _CharacterTexts(self.token_bytes, self.special_ids)
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
        """Returns the ids of special tokens by their text; unknown texts are left out."""
        wanted = {text.encode() for text in specials}
        return frozenset(i for i in self.special_ids if self.token_bytes.get(i) in wanted)

    async def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of `text`. Special tokens spelled out in it become their ids.

        Args:
            max_tokens: a text whose length in characters implies more tokens is refused unread.

        Raises:
            InvalidArgument: the text has too many characters.
            DeadlineExceeded: encoding takes too long.
        """
        if max_tokens is not None and len(text) > max_tokens * self.longest_token:
            num_tokens = -(-len(text) // self.longest_token)
            raise InvalidArgument.prompt_too_long(num_tokens, max_tokens, "at least ")
        if len(text) > self._max_characters:
            message = (
                f"the prompt has {len(text):,} characters; at most "
                f"{self._max_characters:,} are accepted"
            )
            raise InvalidArgument.of("PROMPT_TOO_LARGE", "prompt", message)
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
        assert len(word) <= _INLINE_CHARACTERS
        return self._encode(word, add_special_tokens=False)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Returns the token ids of each word; runs on all threads of the library."""
        encodings = self._tokenizer.encode_batch_fast(list(words), add_special_tokens=False)
        return [list(encoding.ids) for encoding in encodings]

    def entries(self, token_ids: Sequence[int]) -> list[str]:
        """Returns tokens as the vocabulary spells them; unknown ids are empty."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def fallback_ids(self) -> frozenset[int]:
        """Returns the byte-fallback tokens, which spell characters that have no token."""
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False).items()
        return frozenset(token_id for token, token_id in vocabulary if _BYTE_TOKEN.fullmatch(token))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one, because the library's `encode` does not release the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of `token_ids`; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        pieces = (self.token_bytes.get(i, b"") for i in token_ids if i not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")


class Detokenizer:
    """Decodes the output of one generation.

    The bytes of an unfinished character are kept until it is complete; bytes that cannot become a
    character turn into U+FFFD. The joined text equals that of decoding all tokens at once.

    Args:
        kept: texts of special tokens that are not skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept: Collection[str] = (),
    ) -> None:
        self._whole_text = tokenizer.whole_texts.__getitem__
        self._token_bytes = tokenizer.token_bytes
        self._skipped_ids: frozenset[int] = frozenset()
        if skip_special_tokens:
            self._skipped_ids = tokenizer.special_ids
            if kept:
                self._skipped_ids -= tokenizer.ids_of(kept)
        self._unfinished = b""

    def push(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        if not self._unfinished:
            try:
                return "".join(map(self._whole_text, token_ids))
            except KeyError:  # a token is special, or has a part of a character
                pass
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
