"""Trains the byte-level BPE tokenizer and writes the files that go into both model folders.

``python -m shared.demo.recipe.tokenizer --texts FILE... --out DIR`` reads plain text or chat
JSON lines and writes ``tokenizer.json`` and ``tokenizer_config.json``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(13))
"""Never-used tokens: their rows are copied when the vocabulary is widened."""
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END, *RESERVED)
VOCABULARY = 8192

# One digit a token, so that sums are learnt digit by digit; otherwise GPT-4's splitting rule
# without the case-insensitive flag.
SPLIT = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": 2048,
    "pad_token": END_OF_TEXT,
    "eos_token": TURN_END,
    "additional_special_tokens": [TURN_START, *RESERVED],
    "clean_up_tokenization_spaces": False,
    "add_bos_token": False,
    "chat_template": CHAT_TEMPLATE,
}


def texts(paths: list[Path], seen: int = 30_000_000) -> Iterator[str]:
    """Training text: chat contents or pieces of plain files, at most ``seen`` characters each."""
    for path in paths:
        data = path.read_text(encoding="utf-8")[:seen]
        if path.suffix != ".jsonl":
            yield from data.split("<|doc|>")
            continue
        for line in data.splitlines()[:-1]:
            row = json.loads(line)
            for message in row.get("messages", ()):
                yield message["content"]
            yield from (row[key] for key in ("question", "answer", "text") if key in row)


def train(source: Iterator[str]) -> Tokenizer:
    """A byte-level BPE of exactly ``VOCABULARY`` entries, specials first (ids 0 to 15)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern=Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(source, trainer=trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"vocabulary of {tokenizer.get_vocab_size()}, wanted {VOCABULARY}")
    return tokenizer


def write(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes the two tokenizer files into a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo tokenizer.")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--out", type=Path, nargs="+", required=True, help="folders to write to")
    args = parser.parse_args()
    tokenizer = train(texts(args.texts))
    for folder in args.out:
        write(tokenizer, folder)


if __name__ == "__main__":
    main()
