"""`python -m tests.bench.modelled_passes`: the passes of `bench-async --adaptive` in model time.

Serves plain decoding, one shape synchronously, the same shape drafted ahead, and what an adaptive
target chooses, in turn and several times over, by the clock of the cost model of two GPUs (see
`tests.bench.adaptive`). One target and one draft serve all of it, as there, so what is learnt and
captured in one pass is there in the next.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from services.target.adaptive_config import DEFAULT_CONFIG
from shared.models.decoder import Decoder
from tests.bench.adaptive import on_two_gpus
from tests.helpers.engines import build_engine, tiny_decoder
from tests.helpers.model_time import ModelClock
from tests.helpers.modelled_split import (
    KnownRunner,
    ModelledDraft,
    Sink,
    Split,
    World,
    plain_request,
)
from tests.load.figures import table

MODES = ("plain", "synchronous", "ahead", "as chosen")
WARM_UP_TOKENS = 24
_TELLING_S = 0.002


class ModelledPair:
    """A target and a draft that serve one pass after another."""

    def __init__(self, decoder: Decoder, split: Split, seed: int) -> None:
        self._clock = ModelClock()
        world = World(split, self._clock, seed)
        self._engine = build_engine(
            decoder,
            clock=self._clock,
            adaptive=DEFAULT_CONFIG,
            make_runner=lambda decoder, pool: KnownRunner(decoder, pool, self._clock, world),
            num_pages=4000,
            max_running=64,
            max_step_rows=2048,
            max_context_tokens=4096,
            prefix_cache=False,
            always_up_to=0,
        )
        [kind] = split.drafts
        self._draft = ModelledDraft(self._engine, self._clock, kind, seed, is_pinned=True)
        self._draft.attach()
        self._kind, world.drafts = kind, [self._draft]
        self._keys = itertools.count()

    def tokens_per_s(self, mode: str, num_requests: int, size: int, num_tokens: int) -> float:
        """Answers requests in a mode, so many at a time; returns their tokens a second."""
        self._set(mode)
        sink, start_s, num_left = Sink(self._clock), self._clock.now_s, num_requests
        while num_left or sink.num_open:
            while num_left and sink.num_open < size:
                asked = plain_request(num_tokens)
                self._engine.submit(
                    replace(asked, speculation_disabled=mode == "plain"), sink, next(self._keys)
                )
                sink.num_open, num_left = sink.num_open + 1, num_left - 1
            if not self._engine.step():
                self._clock.idle(self._engine)
        return sum(count for _, count in sink.tokens) / (self._clock.now_s - start_s)

    def _set(self, mode: str) -> None:
        if mode == "plain":
            return
        self._draft.is_pinned = mode != "as chosen"
        budget = 0 if mode == "synchronous" else self._kind.budget
        self._draft.kind = replace(self._kind, budget=budget)
        self._draft.announce()
        self._clock.advance(_TELLING_S)


def main(arguments: Sequence[str]) -> int:
    """Prints a table for each number of requests at a time."""
    parser = argparse.ArgumentParser(prog="modelled_passes", description=__doc__)
    parser.add_argument("--right", type=float, default=0.9, help="share of tokens drafted right")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--num-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        split = on_two_gpus(flags.right, max(flags.concurrency))
        pair = ModelledPair(tiny_decoder(Path(folder)), split, flags.seed)
        rows = [row for size in flags.concurrency for row in _rows(pair, flags, size)]
    print(table(("at a time", "mode", "tok/s of each pass", "over plain"), rows))
    return 0


def _rows(pair: ModelledPair, flags: argparse.Namespace, size: int) -> list[tuple[str, ...]]:
    num_requests = max(flags.num_prompts, size)
    for mode in MODES:
        pair.tokens_per_s(mode, num_requests, size, WARM_UP_TOKENS)
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(flags.repeats):
        for mode in MODES:
            speeds[mode].append(pair.tokens_per_s(mode, num_requests, size, flags.num_tokens))
    ratios = {
        mode: [own / plain for own, plain in zip(speeds[mode], speeds["plain"], strict=True)]
        for mode in MODES
    }
    return [
        (str(size), mode, _joined(speeds[mode], ".1f"), _joined(ratios[mode], ".2f"))
        for mode in MODES
    ]


def _joined(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
