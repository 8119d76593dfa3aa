"""What the n-gram index costs on the host: to take a prompt in, and a step's trees.

    python -m tests.bench.ngram

Texts are of chance, over few words, so there are always several continuations to choose from; half
of the sequences repeat a text that was seen before.
"""

from __future__ import annotations

import random
import statistics
import time

from shared.ngram import Cursor, NgramIndex, NgramOptions
from shared.tokens import TreeShape
from tests.load.figures import table

PROMPT_TOKENS, ROUND_TOKENS, NUM_STEPS = 512, 3, 100
SHAPE = TreeShape(17, 10, 12)


def _text(source: random.Random, num_tokens: int) -> list[int]:
    return [min(int(source.expovariate(0.01)), 50_000) for _ in range(num_tokens)]


def _row(num_sequences: int) -> list[str]:
    """Returns the medians over steps of so many sequences."""
    source, index = random.Random(0), NgramIndex(NgramOptions())
    length = PROMPT_TOKENS + NUM_STEPS * ROUND_TOKENS
    whole = [_text(source, length) for _ in range(num_sequences)]
    index.take_in([(Cursor(), text) for text in whole[::2]])
    sequences = [(Cursor(), text[:PROMPT_TOKENS]) for text in whole]
    start_s = time.thread_time()
    index.take_in(sequences)
    prompts_s, steps = time.thread_time() - start_s, list[float]()
    for end in range(PROMPT_TOKENS, length, ROUND_TOKENS):
        for (_, seen), text in zip(sequences, whole, strict=True):
            seen += text[end : end + ROUND_TOKENS]
        start_s = time.thread_time()
        index.grow(sequences, SHAPE)
        steps.append(time.thread_time() - start_s)
    prompt_us, step_us = 1e6 * prompts_s / num_sequences, 1e6 * statistics.median(steps)
    return [
        str(num_sequences),
        f"{prompt_us:.0f}",
        f"{step_us:.0f}",
        f"{step_us / num_sequences:.1f}",
    ]


def main() -> None:
    header = "sequences", f"µs a prompt of {PROMPT_TOKENS}", "µs a step", "µs a tree"
    print(table(header, [_row(number) for number in (1, 8, 64)]))


if __name__ == "__main__":
    main()
