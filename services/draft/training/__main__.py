"""`python -m services.draft.training`: trains a draft head for a target of your own.

    T="python -m services.draft.training"
    $T tokenize  --target MODEL --texts chats.jsonl --out data/chats.npz
    $T generate  --target MODEL --prompts prompts.jsonl --out data/own.npz
    $T token-map --target MODEL --data data/own.npz --size 32000 --out data/token_map.json
    $T train     --target MODEL --algorithm EAGLE3 --token-map data/token_map.json \\
                 --data data/own.npz=3 --data data/chats.npz=1 --out heads/eagle3
    $T average   --head heads/first=1 heads/eagle3=3 --out heads/both
    $T evaluate  --target MODEL --head heads/eagle3 --prompts question.jsonl

Several GPUs: `torchrun --nproc-per-node 8 -m services.draft.training train …`.
"""

from __future__ import annotations

import sys

from services.draft.training.commands import parser
from shared.errors import OutriderError


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    try:
        arguments.run(arguments)
    except OutriderError as error:
        sys.exit(f"training: {error.message}")


if __name__ == "__main__":
    main()
