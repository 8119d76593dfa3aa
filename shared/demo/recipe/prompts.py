"""Prompts for the text that the target writes for the distillation of the draft.

Half are contexts out of the training chats. The rest are instructions put together from openers,
subjects, constraints and passages of the corpora, so that the draft also sees what the target
does on long requests that it was never trained to answer.
"""

from __future__ import annotations

import random

import numpy as np
from tokenizers import Tokenizer

from shared.demo.recipe.corpus import Ids, Packed
from shared.demo.recipe.openended import request
from shared.demo.recipe.tables import capitalised, lists
from shared.demo.recipe.tokenizer import TURN_END, TURN_START

LONGEST = 224
"""Ids of a prompt at most, the generation prompt included."""

TASKS = (
    "Summarise the following text in {n} sentences.", "Rewrite this passage for a {role}.",
    "Find all names and numbers in the text below.", "Answer the question about this text.",
    "What is the main idea of the following passage?", "Correct the mistakes in this text.",
    "Translate the following into simple English.", "Continue the following text.",
    "Rate the following {product} review from 1 to 5 and say why.", "What does this code do?",
    "Give the text below a title and list its key points as JSON.",
)  # fmt: skip


def fill(rng: np.random.Generator, template: str) -> str:
    """The template with random topics and numbers in its slots."""
    topics = lists("topics")
    slots = {kind: str(rng.choice(words)) for kind, words in topics.items()}
    slots |= {f"{kind}2": str(rng.choice(topics[kind])) for kind in ("subject", "person")}
    slots |= {"n": str(rng.integers(2, 10)), "m": str(rng.integers(2, 100))}
    return capitalised(template.format(**slots))


def chat_contexts(rng: np.random.Generator, packed: Packed, marker: list[int], count: int) -> list[
    list[int]
]:  # fmt: skip
    """Beginnings of training chats up to (and with) the opening of an assistant turn."""
    begins = packed.starts[:-1][packed.tokens[packed.starts[:-1]] == marker[0]]
    found: list[list[int]] = []
    for begin in rng.choice(begins, size=2 * count):
        head = packed.tokens[begin : begin + LONGEST]
        turns = [i for i in np.flatnonzero(head == marker[0])
                 if list(head[i : i + len(marker)]) == marker]  # fmt: skip
        if turns:
            found.append(head[: rng.choice(turns) + len(marker)].tolist())
        if len(found) == count:
            break
    return found


def passage(rng: np.random.Generator, tokens: Ids) -> list[int]:
    """A few sentences' worth of ids from anywhere in the corpus, without special tokens."""
    begin = int(rng.integers(0, len(tokens) - 200))
    piece = tokens[begin : begin + int(rng.integers(20, 140))]
    return [int(i) for i in piece if i > 15]


def instructions(
    rng: np.random.Generator, packed: Packed, tokenizer: Tokenizer, count: int
) -> list[list[int]]:
    """Made-up requests, two in five with a passage of the corpus, as ChatML prompts."""
    made: list[list[int]] = []
    words = random.Random(int(rng.integers(1 << 30)))
    close = tokenizer.encode(f"{TURN_END}\n{TURN_START}assistant\n").ids
    for _ in range(count):
        if rng.random() < 0.4:
            task = fill(rng, str(rng.choice(TASKS)))
            body = tokenizer.encode(f"{TURN_START}user\n{task}\n\n").ids
            body += passage(rng, packed.tokens)
        else:
            text = request(words)[1]
            if rng.random() < 0.4:
                text += " " + request(words)[1]
            body = tokenizer.encode(f"{TURN_START}user\n{text}").ids
        made.append(body[: LONGEST - len(close)] + close)
    return made


def prompts(packed: Packed, tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    """``count`` prompts as ids, half of each kind, shuffled."""
    rng = np.random.default_rng(seed)
    marker = tokenizer.encode(f"{TURN_START}assistant\n").ids
    both = chat_contexts(rng, packed, marker, count // 2)
    both += instructions(rng, packed, tokenizer, count - len(both))
    return [both[i] for i in rng.permutation(len(both))]
