"""Optimiser and learning-rate schedule shared by both trainings."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer


class Optimisers:
    """Muon for the matrices inside the blocks, AdamW for the embedding and the norms."""

    def __init__(self, model: nn.Module, rate: float, decay: float, fused: bool) -> None:
        named = list(model.named_parameters())
        inner = [p for n, p in named if p.dim() == 2 and "embed" not in n]
        rest = [p for n, p in named if p.dim() != 2 or "embed" in n]
        muon = Muon(inner, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        adam = AdamW(rest, lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        self.all: list[Optimizer] = [muon, adam]
        self.rate = rate

    def step(self, factor: float) -> None:
        """One update at ``rate * factor``; clears the gradients."""
        for optimiser in self.all:
            for group in optimiser.param_groups:
                group["lr"] = self.rate * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


def schedule(progress: float, warm: float = 0.02, cool: float = 0.5) -> float:
    """Warm-up, plateau, then a linear way down to zero over the last ``cool`` of the run."""
    if progress < warm:
        return max(progress, 1e-3) / warm
    return min(1.0, max(0.0, (1.0 - progress) / cool))


class Clock:
    """Progress of a run that ends after a number of seconds (or of steps, whichever is first)."""

    def __init__(self, seconds: float, steps: int) -> None:
        self.seconds, self.steps = seconds, steps
        self.begin = time.monotonic()

    def restart(self) -> None:
        """Starts counting now, for instance after compilation."""
        self.begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    def progress(self, step: int) -> float:
        """0 at the start, 1 or more at the end."""
        return max(self.elapsed / self.seconds, step / self.steps)


class Log:
    """A JSON-lines training log, also printed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file: IO[str] = path.open("w", encoding="utf-8")

    def write(self, **row: float | str) -> None:
        """One row; floats are rounded to five places."""
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()})
        self.file.write(line + "\n")
        self.file.flush()
        print(line, flush=True)


def autocast(device: str) -> torch.autocast:
    """bfloat16 where the device multiplies it fast."""
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")
