"""The tokenizer's special tokens in Lark notation: matched by id, never by their spelling."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens by the text that spells them."""

    ids: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer_json: str) -> SpecialTokens:
        """Reads the content of a `tokenizer.json`."""
        added = json.loads(tokenizer_json).get("added_tokens") or []
        return cls({entry["content"]: entry["id"] for entry in added if entry.get("special")})

    def literal(self, text: str) -> str:
        """Returns the Lark expression that matches `text`; empty for no text."""
        return " ".join(
            special(self.ids[part]) if part in self.ids else quoted(part)
            for part in self.split(text)
        )

    def split(self, text: str) -> list[str]:
        """Returns the special tokens in `text` and the plain texts between them, in order."""
        if not self.ids:
            return [text] if text else []
        names = sorted(self.ids, key=len, reverse=True)
        pattern = "(" + "|".join(map(re.escape, names)) + ")"
        return [part for part in re.split(pattern, text) if part]


def quoted(text: str) -> str:
    """Returns the Lark string of a text without special tokens."""
    return json.dumps(text, ensure_ascii=False)


def special(token_id: int) -> str:
    """Returns the Lark name of a token."""
    return f"<[{token_id}]>"
