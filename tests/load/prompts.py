"""Prompts to measure with: twenty of our own, or a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROMPTS = (
    "What is the capital of Norway, and on which continent does it lie?",
    "List five countries that border the sea and name their capitals.",
    "Write a short paragraph about why rivers matter to cities.",
    "Explain to a ten-year-old why the sky is blue.",
    "What is 17 plus 26? Show how you get there.",
    "A train leaves at nine and arrives at half past eleven. How long does the trip take?",
    "Give me three synonyms and three antonyms of the word quick.",
    "Write a polite email that asks a colleague to move a meeting to Friday.",
    "Name the months of the year that have thirty days.",
    "How do I make a cup of tea? Answer in numbered steps.",
    "Describe a walk through a forest in autumn in four sentences.",
    "Write a Python function that returns the largest number of a list.",
    "Write a Python function that counts the words of a text.",
    "What are the advantages and disadvantages of working from home?",
    "Which planet is the largest, and which one is closest to the sun?",
    "You are a friendly librarian. Recommend a book to someone who likes the sea.",
    "Put these words in alphabetical order: pear, apple, lemon, cherry, fig.",
    "Summarise in one sentence what photosynthesis does.",
    "Who wrote Hamlet, and what is the play about?",
    "Tell me a short story about a cat that learns to open doors.",
)


def load_prompts(path: Path) -> tuple[str, ...]:
    """Reads JSON lines that hold `prompt`, `turns`, `messages` or `question` each.

    Raises:
        ValueError: a line has none of these keys; the message names file and line.
    """
    lines = path.read_text().splitlines()
    return tuple(
        _prompt(json.loads(line), f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    )


def _prompt(record: Mapping[str, Any], where: str) -> str:
    """Returns the first user turn of a record."""
    if "messages" in record:
        return str(next(m["content"] for m in record["messages"] if m["role"] == "user"))
    if "turns" in record:
        return str(record["turns"][0])
    for key in ("prompt", "question"):
        if key in record:
            return str(record[key])
    raise ValueError(f"{where} has none of prompt, turns, messages and question")
