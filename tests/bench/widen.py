"""Writes a wide copy of a model, and of heads for it, that computes what the small ones do.

    python -m tests.bench.widen --out DIR [--model DIR] [--shape 32b|8b|1b] [--head EAGLE3=DIR …]

See `widening` for how. Heads go to `DIR/heads/NAME`; `tests.bench.engine` needs no files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from services.target.settings import DEMO_MODEL
from shared.errors import CheckpointError
from shared.runtime.device import device_named
from tests.bench.wide_folders import is_written
from tests.bench.wide_head import WideHead, WideHeadShape
from tests.bench.wide_model import SHAPE_1B, SHAPE_8B, SHAPE_32B, SPARE_TOKEN, WideModel
from tests.bench.widening import CannotWiden

SHAPES = {"32b": SHAPE_32B, "8b": SHAPE_8B, "1b": SHAPE_1B}
DRAFT_VOCABULARY = 32_000


def _head(text: str) -> tuple[str, Path]:
    algorithm, _, folder = text.partition("=")
    if algorithm not in ("EAGLE", "EAGLE3", "MTP", "DFLASH") or not folder:
        raise argparse.ArgumentTypeError(f"{text} is not EAGLE|EAGLE3|MTP|DFLASH=DIR")
    return algorithm, Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="widen", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--head", type=_head, action="append", default=[], metavar="ALGORITHM=DIR")
    parser.add_argument("--keep", action="store_true", help="leave what is whole in --out as it is")
    parser.add_argument("--spare-token", type=int, default=SPARE_TOKEN)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--shard-gb", type=float, default=4.0)
    flags = parser.parse_args()
    dtype, device = getattr(torch, flags.dtype), device_named(flags.device)
    try:
        model = WideModel(
            flags.model, SHAPES[flags.shape], spare_token=flags.spare_token, device=device
        )
        if not (flags.keep and is_written(flags.out)):
            model.write(flags.out, dtype=dtype, shard_size_bytes=int(flags.shard_gb * 1e9))
        shape = WideHeadShape(model.config.intermediate_size, DRAFT_VOCABULARY)
        for algorithm, folder in flags.head:
            wide = flags.out / "heads" / algorithm.lower()
            if not (flags.keep and is_written(wide)):
                WideHead(folder, model, shape, algorithm=algorithm).write(wide, dtype=dtype)
            print(wide)
    except (CannotWiden, CheckpointError) as error:
        print(f"widen: {error}", file=sys.stderr)
        return 1
    print(flags.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
