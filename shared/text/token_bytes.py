"""Bytes of each token of a tokenizer.

With them a token costs one lookup, a character split over tokens is a byte decoder's problem, and
the `bytes` of log probabilities are exact. Both families in use are covered: byte-level BPE, whose
vocabulary spells each byte as a printable character, and SentencePiece, whose vocabulary spells a
space as `▁` and unknown bytes as `<0x0A>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"


def read_token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Returns the bytes of every token id.

    Raises:
        ValueError: the tokenizer's decoder is of neither family.
    """
    spell = _speller(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    return {
        token_id: token.encode() if token_id in added else spell(token)
        for token, token_id in vocabulary.items()
    }


def _speller(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    kinds = {step["type"]: step for step in _decoder_steps(tokenizer)}
    if "ByteLevel" in kinds:
        return _byte_level_speller()
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes
    raise ValueError(f"decoder {sorted(kinds) or None} is neither byte-level nor SentencePiece")


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if decoder is None:
        return []
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _byte_level_speller() -> Callable[[str], bytes]:
    byte_of = {character: byte for byte, character in _byte_characters()}

    def spell(token: str) -> bytes:
        try:
            return bytes(map(byte_of.__getitem__, token))
        except KeyError:  # a token that was put into the vocabulary as plain text
            return token.encode()

    return spell


def _byte_characters() -> Iterator[tuple[int, str]]:
    """Yields each byte with the character that spells it in a byte-level vocabulary.

    Printable Latin-1 bytes spell themselves; the others take U+0100 and up, in order.

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
