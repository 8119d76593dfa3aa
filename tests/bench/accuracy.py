"""What fewer bits cost: perplexity and logits of a target, against the same target in full.

    python -m tests.bench.accuracy [--model-path DIR] [--text FILE] [--device cuda]

The text is cut into windows that are scored on their own. The default is this project's licence,
which no model here was trained to recite, and which never changes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from services.target.settings import DEMO_MODEL
from shared.kv.batch import SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.model_options import Dtype, KvDtype, ModelOptions, Quantisation
from shared.models.kv_scales import kv_scales
from shared.models.loader import load_decoder
from shared.runtime.device import device_named, dtype_named, kv_dtype_named
from shared.runtime.runner import ModelRunner
from tests.load.figures import table

PAGE_SIZE = 16
LICENCE = Path(__file__).parents[2] / "LICENSE"
FULL = (Quantisation.UNQUANT, KvDtype.AUTO)
MODES = (
    FULL,
    (Quantisation.INT8, KvDtype.AUTO),
    (Quantisation.FP8, KvDtype.AUTO),
    (Quantisation.UNQUANT, KvDtype.FP8_E4M3),
    (Quantisation.INT8, KvDtype.FP8_E4M3),
    (Quantisation.FP8, KvDtype.FP8_E4M3),
)


@dataclass(frozen=True, slots=True)
class Scores:
    """What one mode makes of the text.

    Attributes:
        perplexity: per token.
        largest_error: of any logit, against the full mode.
        mean_divergence: Kullback-Leibler, from the full mode, in nats a token.
        agreement: share of positions whose most probable token is the full mode's.
    """

    perplexity: float
    largest_error: float
    mean_divergence: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Subject:
    """The model and where it runs."""

    folder: Path
    dtype: torch.dtype
    device: torch.device

    def runner(self, mode: tuple[Quantisation, KvDtype], num_tokens: int) -> ModelRunner:
        """Returns a runner in `mode` whose pool holds one window."""
        decoder = load_decoder(
            self.folder,
            dtype=self.dtype,
            device=self.device,
            options=ModelOptions(quantisation=mode[0]),
        )
        layout = decoder.kv_layout(PAGE_SIZE, kv_dtype_named(mode[1], self.dtype))
        scales = kv_scales(decoder) if layout.is_e4m3 else None
        num_pages = 2 + num_tokens // PAGE_SIZE
        return ModelRunner(decoder, KvPool(layout, num_pages, self.device, scales))


def window_logits(runner: ModelRunner, token_ids: Sequence[int]) -> Tensor:
    """Returns `[T, V]` float32 of one window, on the CPU."""
    num_rows = len(token_ids)
    rows = SequenceRows.causal(
        token_ids, 0, range(1, 2 + (num_rows - 1) // PAGE_SIZE), range(num_rows)
    )
    batch = build_batch([rows], page_size=PAGE_SIZE, device=runner.device)
    return runner.run(batch).logits.cpu()


def score(runner: ModelRunner, windows: Sequence[Sequence[int]], exact: Sequence[Tensor]) -> Scores:
    """Compares with the logits of the full mode, window by window."""
    loss = divergence = largest = 0.0
    num_agreeing = num_scored = 0
    for token_ids, full in zip(windows, exact, strict=True):
        logits = window_logits(runner, token_ids)
        log_probs, full_log_probs = logits.log_softmax(-1), full.log_softmax(-1)
        targets = torch.tensor(token_ids[1:]).unsqueeze(1)
        loss -= float(log_probs[:-1].gather(1, targets).sum())
        divergence += float((full_log_probs.exp() * (full_log_probs - log_probs)).sum())
        largest = max(largest, float((logits - full).abs().max()))
        num_agreeing += int((logits.argmax(-1) == full.argmax(-1)).sum())
        num_scored += len(token_ids) - 1
    num_rows = num_scored + len(windows)
    return Scores(
        math.exp(loss / num_scored), largest, divergence / num_rows, num_agreeing / num_rows
    )


def compare(subject: Subject, windows: Sequence[Sequence[int]]) -> dict[str, Scores]:
    """Returns the scores of each mode, the full one first."""
    size = max(map(len, windows))
    full = subject.runner(FULL, size)
    exact = [window_logits(full, token_ids) for token_ids in windows]
    return {
        f"weights {mode[0].value}, KV {mode[1].value}": score(
            subject.runner(mode, size), windows, exact
        )
        for mode in MODES
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="accuracy", description=__doc__)
    parser.add_argument("--model-path", type=Path, default=DEMO_MODEL)
    parser.add_argument("--text", type=Path, default=LICENCE)
    parser.add_argument("--window", type=int, default=512, help="tokens scored together")
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    device = device_named(flags.device)
    subject = Subject(flags.model_path, dtype_named(Dtype.AUTO, None, device), device)
    tokenizer = Tokenizer.from_file(str(flags.model_path / "tokenizer.json"))
    ids = tokenizer.encode(flags.text.read_text(encoding="utf-8")).ids
    windows = [ids[i : i + flags.window] for i in range(0, len(ids) - 1, flags.window)]
    header = ("mode", "perplexity", "largest logit error", "KL, nats", "same best token")
    rows = [
        (
            name,
            f"{scores.perplexity:.3f}",
            f"{scores.largest_error:.3f}",
            f"{scores.mean_divergence:.5f}",
            f"{scores.agreement:.2%}",
        )
        for name, scores in compare(subject, windows).items()
    ]
    print(f"{len(ids):,} tokens of {flags.text.name}, {subject.dtype} on {device}")
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
