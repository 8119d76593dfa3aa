"""Tokenizes the corpora and packs them into training windows.

``python -m shared.demo.recipe.corpus --data DIR --facts facts.jsonl --tokenizer tokenizer.json
--out tokens.npz`` writes uint16 ids; ``Packed`` turns them into windows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from shared.demo.recipe.tokenizer import END_OF_TEXT, TURN_END, TURN_START

Ids = NDArray[np.uint16]

# Characters taken of each plain text, evenly spread over its documents. The long technical texts
# are cut so that chat and prose keep their share.
PLAIN = {
    "peps/peps.txt": 3_000_000,
    "rust-rfcs/rust-rfcs.txt": 2_000_000,
    "rust-book/rust-book.txt": 2_000_000,
    "rust-by-example/rust-by-example.txt": 1_000_000,
    "tldr/pages.txt": 2_000_000,
    "tinyshakespeare/input.txt": 2_000_000,
    "wikitext2/valid.txt": 2_000_000,
}
BOOK_CHARACTERS = 700_000
HELD_OUT_EVERY = 50
"""Every 50th conversation of each chat corpus is kept for evaluation only."""


def chat_text(messages: list[dict[str, str]]) -> str:
    """A conversation in ChatML, closed by the document separator."""
    turns = (f"{TURN_START}{m['role']}\n{m['content']}{TURN_END}\n" for m in messages)
    return "".join(turns) + END_OF_TEXT


def chats(path: Path) -> Iterator[list[dict[str, str]]]:
    """Conversations of a JSON-lines file; a GSM8K row becomes one exchange."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "question" in row:
            yield gsm8k(row["question"], row["answer"])
        else:
            yield row["messages"]


def gsm8k(question: str, answer: str) -> list[dict[str, str]]:
    """Drops the ``<<48/2=24>>`` calculator marks and spells the final answer out."""
    while "<<" in answer:
        head, _, rest = answer.partition("<<")
        answer = head + rest.partition(">>")[2]
    steps, _, result = answer.partition("\n#### ")
    content = f"{steps}\nThe answer is {result.strip()}."
    return [{"role": "user", "content": question}, {"role": "assistant", "content": content}]


def documents(path: Path, characters: int) -> list[str]:
    """Documents of a plain text, thinned evenly to about ``characters``."""
    docs = [d.strip() for d in path.read_text(encoding="utf-8").split("<|doc|>") if d.strip()]
    total = sum(map(len, docs))
    if total <= characters:
        return docs
    if len(docs) == 1:
        return [docs[0][:characters]]
    step = total / characters
    return [docs[int(i * step)] for i in range(int(len(docs) / step))]


def training_texts(data: Path) -> tuple[list[str], list[str]]:
    """All general texts as (training, held-out chat), each closed by the separator."""
    train: list[str] = []
    held: list[str] = []
    for name in ("sgd/chat.jsonl", "taskmaster4/chat.jsonl", "tldr/qa.jsonl", "gsm8k/train.jsonl"):
        for i, messages in enumerate(chats(data / name)):
            (held if i % HELD_OUT_EVERY == 0 else train).append(chat_text(messages))
    for name, characters in PLAIN.items():
        train += [d + END_OF_TEXT for d in documents(data / name, characters)]
    for book in sorted((data / "standardebooks").glob("*.txt")):
        if book.name != "SOURCE.txt":
            train += [d + END_OF_TEXT for d in documents(book, BOOK_CHARACTERS)]
    for line in (data / "thealgorithms/python.jsonl").read_text(encoding="utf-8").splitlines():
        train.append(json.loads(line)["text"] + END_OF_TEXT)
    return train, held


def encode(tokenizer: Tokenizer, docs: list[str]) -> tuple[Ids, NDArray[np.int64]]:
    """All documents as one run of ids, and the offset at which each starts (plus the end)."""
    pieces = [np.array(e.ids, dtype=np.uint16) for e in tokenizer.encode_batch_fast(docs)]
    starts = np.concatenate([[0], np.cumsum([len(p) for p in pieces])]).astype(np.int64)
    return np.concatenate(pieces), starts


class Packed:
    """Documents packed into fixed windows, newly shuffled in every epoch.

    Every window starts with the start of a document (or of a slice of a long one), so a
    conversation is often seen at position 0, as it is when the model is served.
    """

    def __init__(self, tokens: Ids, starts: NDArray[np.int64], seed: int) -> None:
        self.tokens, self.starts = tokens, starts
        self.rng = np.random.default_rng(seed)

    def slices(self, window: int) -> NDArray[np.int64]:
        """[n, 2] begin and end of documents, long ones cut at multiples of ``window``."""
        begin, end = self.starts[:-1], self.starts[1:]
        counts = np.maximum(1, -(-(end - begin) // window))
        index = np.repeat(np.arange(len(begin)), counts)
        offset = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
        first = begin[index] + offset * window
        return np.stack([first, np.minimum(first + window, end[index])], axis=1)

    def epoch(self, window: int, share: float = 1.0) -> Ids:
        """[windows, window + 1] ids of a shuffled epoch; the last document of a row is cut."""
        spans = self.slices(window)
        self.rng.shuffle(spans)
        spans = spans[: int(len(spans) * share)]
        rows: list[Ids] = []
        parts: list[Ids] = []
        filled = 0
        for begin, end in spans:
            parts.append(self.tokens[begin:end])
            filled += int(end - begin)
            if filled > window:
                rows.append(np.concatenate(parts)[: window + 1])
                parts, filled = [], 0
        return np.stack(rows)


def load(path: Path, name: str = "train", seed: int = 0) -> Packed:
    """The run of documents called ``name`` in an archive written by ``main``."""
    archive = np.load(path)
    return Packed(archive[f"{name}_tokens"], archive[f"{name}_starts"], seed)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenize the training corpora.")
    parser.add_argument("--data", type=Path, required=True, help="folder of the unpacked corpora")
    parser.add_argument("--facts", type=Path, required=True, help="output of recipe.facts")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    train, held = training_texts(args.data)
    facts = [chat_text(messages) for messages in chats(args.facts)]
    wiki = [(args.data / "wikitext2/test.txt").read_text(encoding="utf-8")]
    arrays: dict[str, NDArray[np.generic]] = {}
    held_sets = {"train": train + facts, "chat": held, "wiki": wiki}
    for name, docs in held_sets.items():
        tokens, starts = encode(tokenizer, docs)
        size = sum(len(d.encode()) for d in docs)
        arrays |= {f"{name}_tokens": tokens, f"{name}_starts": starts}
        arrays[f"{name}_bytes"] = np.array(size)
        print(f"{name}: {len(docs)} documents, {len(tokens)} tokens, {size} bytes")
    np.savez(args.out, allow_pickle=False, **arrays)


if __name__ == "__main__":
    main()
