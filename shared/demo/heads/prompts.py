"""Writes the prompts that the demo target answers for the training of its heads.

``python -m shared.demo.heads.prompts --tokens tokens.npz --count 65536 --out prompts.npz``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from shared.demo.recipe.corpus import load
from shared.demo.recipe.prompts import prompts


def main() -> None:
    parser = argparse.ArgumentParser(description="Write training prompts as token ids.")
    parser.add_argument("--tokens", type=Path, required=True, help="output of recipe.corpus")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    rows = prompts(load(args.tokens, seed=args.seed), tokenizer, args.count, args.seed)
    starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    tokens = np.concatenate([np.array(row, dtype=np.uint16) for row in rows])
    np.savez(args.out, tokens=tokens, starts=starts)
    print(f"{len(rows)} prompts, {len(tokens)} tokens")


if __name__ == "__main__":
    main()
