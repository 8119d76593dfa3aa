"""`make bench-tp`: one model on one GPU and on several, with the demo's acceptance.

Writes the widened target (16 GB), because every process reads its own part. Then plain decoding,
held against that of the first size, and rounds of EAGLE-3 chains, held against plain decoding of
their own size; the first GPU has the head. Floors are the matrix bytes of one GPU's part over the
copy bandwidth; what a step takes beyond that of one GPU's half is communication.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from services.target.engine_factory import build_runner
from services.target.settings import DraftNeeds, TargetSettings
from services.target.tensor_parallel import start_followers
from shared.kv.batch import SequenceRows, build_batch
from shared.layers.linear import linears
from shared.layers.tensor_group import TensorGroup
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner
from tests.bench.aims import AIMS, figure
from tests.bench.figure import Figure, add_figures_flag
from tests.bench.mode_row import HEADER, ModeRow
from tests.bench.wide import CHAIN, Plan, WideBench
from tests.bench.wide_engine import Drafting, Run, serve
from tests.bench.wide_folders import is_written, target_folder
from tests.load.figures import table

# Rounds have graphs of their own, so that planned steps verify no tree.
LANES = DraftNeeds(has_lanes=True)


def target_settings(folder: Path, plan: Plan, size: int) -> TargetSettings:
    """Returns the settings of a target of `size` processes that holds the largest batch."""
    tokens = plan.prompt_tokens + plan.output_tokens + 64
    return TargetSettings(
        model_path=folder,
        device=plan.device.type,
        tp_size=size,
        max_total_tokens=(1 + max(plan.batches)) * tokens,
        context_length=tokens,
        cuda_graph_max_bs=max(plan.batches),
        max_tree_nodes=64,
    )


class ParallelBench:
    """Runs the modes over targets of several sizes.

    Args:
        scratch: for a head, and for the target unless it has a folder of its own.
        folder: for the target, which may be there already.
        has_drafts: whether EAGLE-3 chains are measured, too.
    """

    def __init__(
        self, plan: Plan, scratch: Path, folder: Path | None = None, *, has_drafts: bool = True
    ) -> None:
        self.plan = plan
        self._wide = WideBench(plan, scratch)
        self._folder, self._scratch = target_folder(folder or scratch), scratch
        self._has_drafts = has_drafts
        self._plain: dict[int, Run] = {}
        target = self._wide.pair.target
        if not is_written(self._folder):
            target.write(self._folder, dtype=plan.dtype, shard_size_bytes=4 * 10**9)

    def rows(self, sizes: tuple[int, ...]) -> Iterator[ModeRow]:
        """Yields the rows of the table; answers are compared with plain ones of the same size."""
        drafting = self._drafting() if self._has_drafts else None
        for size in sizes:
            settings = target_settings(self._folder, self.plan, size)
            followers = start_followers(settings, LANES) if size > 1 else None
            try:
                shared = () if followers is None else (followers.group, followers.leader)
                runner = build_runner(settings, *shared, draft=LANES).runner
                if followers is not None:
                    print(announcement(followers.group, runner), flush=True)
                for batch in self.plan.batches:
                    prompts = self._wide.prompts[:batch]
                    plain = serve(runner, prompts, self.plan.output_tokens)
                    first = self._plain.setdefault(batch, plain)
                    yield self._row(plain_mode(size), plain, first, plain, runner.decoder)
                    if drafting is None:
                        continue
                    drafted = serve(runner, prompts, self.plan.output_tokens, drafting)
                    yield self._row(drafted_mode(size), drafted, plain, plain, runner.decoder)
                del runner
            finally:
                if followers is not None:
                    followers.stop()

    def _drafting(self) -> Drafting:
        head = self._wide.pair.eagle3(self._scratch, self.plan.dtype)
        return replace(self._wide.eagle3(head, CHAIN), is_on_device=True)

    def _row(self, mode: str, run: Run, base: Run, plain: Run, decoder: Decoder) -> ModeRow:
        """See `ModeRow.of`."""
        weight_bytes = sum(layer.dense().nbytes for layer in linears(decoder))
        bandwidth = self._wide.floors.bandwidth
        floor_ms = weight_bytes / bandwidth if bandwidth else 0.0
        return ModeRow.of(mode, None, run, floor_ms, base=base, plain=plain)


def plain_mode(size: int) -> str:
    """Returns what rows call plain decoding by so many processes."""
    return f"{size} × plain"


def drafted_mode(size: int) -> str:
    """Returns what rows call rounds of so many processes."""
    return f"{size} × EAGLE3"


def speed_up(row: ModeRow, sizes: tuple[int, ...]) -> Iterator[Figure]:
    """Yields how much faster two GPUs decode than one, and speculate than decode, from the rows
    that say so."""
    name = f"EAGLE-3 over plain, TP 2, batch {row.batch}"
    if row.mode == drafted_mode(2) and name in AIMS:
        yield figure(name, row.over_plain, None, f"{row.tokens_a_round:.2f} tokens a round")
    if sizes[0] == 1 and row.mode == plain_mode(2) and row.batch == 1:
        note = f"{row.round_ms:.2f} ms"
        yield figure("TP 2 over one GPU, batch 1", row.over_plain, row.over_plain_at_floor, note)


def announcement(group: TensorGroup, runner: ModelRunner) -> str:
    """Says how long rank 0 takes to announce a step of one row to its followers and to queue it."""
    padding = SequenceRows((0,), (0,), 0, (0,), 0, None, (0,))
    batch = build_batch([padding], page_size=runner.page_size, device=runner.device)
    times_us = []
    for _ in range(30):
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
        start_s = time.perf_counter()
        runner.run(batch)
        times_us.append((time.perf_counter() - start_s) * 1e6)
    median_us = statistics.median(times_us)
    return f"{group.size} processes: announcing and queueing a step takes {median_us:.0f} us"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-tp", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output-tokens", type=int, default=96)
    parser.add_argument("--plain", action="store_true", help="leave drafts out")
    parser.add_argument(
        "--widen", type=Path, metavar="DIR", help="folder for an 8B copy, 17 GB; unset, a new one"
    )
    add_figures_flag(parser)
    flags = parser.parse_args()
    if sum(size > 1 for size in flags.sizes) > 1:
        # See `open_peer_slots`.
        parser.error(f"--sizes is {flags.sizes}; a process can lead one group, so one size above 1")
    plan = replace(Plan(), batches=tuple(flags.batches), output_tokens=flags.output_tokens)
    print(f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}, {torch.__version__}")
    with tempfile.TemporaryDirectory() as scratch:
        bench = ParallelBench(plan, Path(scratch), flags.widen, has_drafts=not flags.plain)
        rows = []
        for row in bench.rows(tuple(flags.sizes)):
            print(" | ".join(row.cells()), flush=True)
            rows.append(row.cells())
            flags.figures.add(speed_up(row, tuple(flags.sizes)))
    print(table(("GPUs × mode", *HEADER[1:]), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
