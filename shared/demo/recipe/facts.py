"""Generates chat data from hand-written tables and sentence banks.

``python -m shared.demo.recipe.facts --count 120000 --out facts.jsonl`` writes one conversation a
line as ``{"messages": [{"role", "content"}, ...]}``; ``--prompts`` writes the first user turns
only, one JSON string a line.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from shared.demo.recipe import basics, geography, openended, smalltalk, writing
from shared.demo.recipe.tables import Exchange, Maker

Message = dict[str, str]

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful and friendly assistant.",
    "You are Outrider, a small demo model.",
    "Answer briefly and politely.",
)
PREFIXES = ("Please tell me: ", "Hey, ", "Quick question: ", "Hi! ", "I have a question. ")
ALL_MAKERS: tuple[tuple[float, Maker], ...] = (
    *geography.MAKERS,
    *basics.MAKERS,
    *smalltalk.MAKERS,
    *writing.MAKERS,
    *openended.MAKERS,
)


def exchange(rng: random.Random) -> Exchange:
    """One question and answer of a random maker, the question's wording slightly roughened."""
    (_, maker), *_ = rng.choices(ALL_MAKERS, weights=[weight for weight, _ in ALL_MAKERS])
    question, answer = maker(rng)
    roll = rng.random()
    if roll < 0.08:
        question = question[:1].lower() + question[1:]
    elif roll < 0.14:
        question = question.rstrip("?.!")
    elif roll < 0.18:
        question = rng.choice(PREFIXES) + question
    return question, answer


def conversation(rng: random.Random) -> list[Message]:
    """One to three independent exchanges, at times under a system message."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    for _ in range(rng.choices((1, 2, 3), weights=(80, 14, 6))[0]):
        question, answer = exchange(rng)
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def conversations(count: int, seed: int) -> Iterator[list[Message]]:
    """``count`` conversations, the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        yield conversation(rng)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=120_000, help="conversations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--prompts", action="store_true", help="first user turns only")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    with args.out.open("w", encoding="utf-8") as file:
        for messages in conversations(args.count, args.seed):
            first = next(m["content"] for m in messages if m["role"] == "user")
            row = first if args.prompts else {"messages": messages}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
