"""Prompts of a fixed length in token ids that the demo's drafts know, and that never repeat."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from tests.load.prompts import PROMPTS

DEMO = Path(__file__).parents[3] / "shared" / "demo"
_NONCE_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Turns:
    """The demo's answers to questions, and questions alone, in token ids."""

    answered: tuple[list[int], ...]
    open: tuple[list[int], ...]

    def conversation(self, num_tokens: int, source: random.Random) -> list[int]:
        """Returns a prompt of exactly that many tokens that ends where an answer begins.

        Its first tokens are of chance, so no prompt finds another's pages in the prefix cache.
        """
        parts = [source.choice(self.open)]
        length = len(parts[0])
        while length < num_tokens:
            parts.append(source.choice(self.answered))
            length += len(parts[-1])
        joined = [token for part in reversed(parts) for token in part]
        nonce = [source.choice(source.choice(self.answered)) for _ in range(_NONCE_TOKENS)]
        return (nonce + joined[-max(0, num_tokens - _NONCE_TOKENS) :])[:num_tokens]


@functools.cache
def demo_turns() -> Turns:
    """Returns the turns that the demo's drafts were trained on; a widened demo has its tokens."""
    tokenizer = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
    report = json.loads((DEMO / "training" / "evaluation.json").read_text(encoding="utf-8"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    answers = report["answers"].items()
    answered = (ids(_question(asked) + f"{answer}<|im_end|>\n") for asked, answer in answers)
    return Turns(tuple(answered), tuple(ids(_question(text)) for text in PROMPTS))


def _question(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def prompts(num_tokens: int, seed: int, num_repeated: int = 0) -> Iterator[list[int]]:
    """Yields prompts without end.

    Args:
        num_repeated: the same so many in turn, for every seed; 0 repeats none.
    """
    turns = demo_turns()
    if num_repeated:
        shared = random.Random(0)
        few = [turns.conversation(num_tokens, shared) for _ in range(num_repeated)]
        yield from itertools.islice(itertools.cycle(few), seed % num_repeated, None)
    source = random.Random(seed)
    while True:
        yield turns.conversation(num_tokens, source)
