"""`python -m tests.bench.adaptive`: what the policy makes of hardware, text and load.

Serves each scenario by the clock of its cost model, plainly, with shapes that are pinned, and with
the policy, and prints tokens a second over plain decoding. Takes no notice of the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.target.adaptive_config import DEFAULT_CONFIG
from shared.models.decoder import Decoder
from shared.tokens import TreeShape
from tests.helpers.engines import tiny_decoder
from tests.helpers.modelled_split import Kind, Served, Split, serve
from tests.load.figures import table

DEPTHS = (1, 3, 5, 7)


def cpu_step(rows: int) -> float:
    """The demo on a CPU: a plain step of 12 ms, 4 rows 1.25 times that."""
    return 0.012 + 0.001 * (min(rows, 64) - 1) + 0.0003 * max(rows - 64, 0)


def cpu_tree(steps: int, size: int) -> float:
    """The demo's draft on a CPU: a chain of 3 in 10 ms."""
    return 0.001 + steps * (0.003 + 0.0006 * (size - 1))


def gpu_step(rows: int) -> float:
    """An 8B on a GPU: a plain step of 4.5 ms, 8 rows 4.6, dear beyond 64."""
    return 0.0045 + 0.0000125 * rows + 0.00005 * max(rows - 64, 0)


def gpu_tree(steps: int, size: int) -> float:
    """A 1B on a GPU: a chain of 3 in 1 ms."""
    return 0.0001 + steps * (0.0003 + 0.000005 * size)


def always(right: float) -> Callable[[float, int], float]:
    """Returns an acceptance that neither time nor text change."""
    return lambda now_s, sequence_id: right


def on_cpu(right: float, size: int = 1) -> Split:
    """The demo, with cold starts and noise."""
    draft = Kind(cpu_tree, always(right), hop_s=0.0005, prompt_s=0.01, num_cold=2)
    return Split(cpu_step, (draft,), lambda now_s: size, num_cold=2, noise=0.05)


def on_gpu(right: float, size: int = 1, hop_s: float = 0.0003) -> Split:
    """An 8B and a 1B on a GPU each, with cold starts and noise."""
    draft = Kind(gpu_tree, always(right), hop_s=hop_s, prompt_s=0.0015, num_cold=2)
    return Split(gpu_step, (draft,), lambda now_s: size, num_cold=2, noise=0.05)


def on_shared_cores(
    right: float, size: int = 1, beside: float = 1.5, num_prompt_tokens: int = 40
) -> Split:
    """The demo where target and draft share cores and slow each other down, and where each sequence
    at a draft costs the target's host a part of a millisecond a step."""
    split = on_cpu(right, size)
    return replace(split, beside=beside, attended_s=0.0002, num_prompt_tokens=num_prompt_tokens)


def pair_step(rows: int) -> float:
    """An 8B on one H200: a plain step of 4.6 ms, 4 rows 4.8."""
    return 0.00453 + 0.00006 * rows + 0.00005 * max(rows - 64, 0)


def pair_tree(steps: int, size: int) -> float:
    """A 1B on another: 1.05 ms a level, and what its host does before and after."""
    return 0.0008 + steps * (0.00105 + 0.00001 * size)


def pair_ahead(steps: int, num_outcomes: int) -> float:
    """The same draft at work on the verdicts to come."""
    return steps * (0.00105 + 0.00001 * num_outcomes)


def on_two_gpus(right: float, size: int = 1, capture_s: float = 0.3) -> Split:
    """An 8B and a 1B on an H200 each, as measured: the draft prepares for 8 verdicts and captures
    the graphs of a shape and size when it meets them; plain steps of sequences without a draft run
    ahead of the host, the others do not."""
    draft = Kind(
        pair_tree, always(right), hop_s=0.00065, prompt_s=0.005, budget=8, ahead_s=pair_ahead,
        hit_rate=0.92, capture_s=capture_s,
    )  # fmt: skip
    return Split(
        pair_step, (draft,), lambda now_s: size, num_tokens=128, attended_s=0.00004, noise=0.05
    )


@dataclass(frozen=True, slots=True)
class Scenario:
    """A split that is served for a while; neither its load nor its text changes.

    Attributes:
        learning_s: after which the choice must be good.
    """

    split: Split
    duration_s: float
    learning_s: float

    @property
    def fixed_s(self) -> float:
        """How long fixed choices are served: they learn nothing, so a part tells their speed."""
        return 0.4 * self.duration_s


_ON_CPU = ((1, 0.0), (1, 0.6), (1, 0.8), (4, 0.3), (4, 0.8), (16, 0.8))
_ON_SHARED_CORES = ((1, 0.4), (1, 0.8), (4, 0.3), (4, 0.6), (4, 0.8), (16, 0.6), (16, 0.8))
_ON_GPU = ((1, 0.0), (1, 0.6), (1, 0.8), (16, 0.8), (64, 0.6))
_ON_TWO_GPUS = ((1, 0.9), (1, 0.5), (1, 0.0), (8, 0.9), (32, 0.9))

SCENARIOS: Mapping[str, Scenario] = {
    **{
        f"CPU, {size} at a time, {right:.0%} right": Scenario(on_cpu(right, size), 20.0, 5.0)
        for size, right in _ON_CPU
    },
    **{
        f"GPU, {size} at a time, {right:.0%} right": Scenario(on_gpu(right, size), 8.0, 2.0)
        for size, right in _ON_GPU
    },
    **{
        f"GPU, round trip {2000 * hop_s:.0f} ms, 80% right": Scenario(
            on_gpu(0.8, hop_s=hop_s), 8.0, 2.0
        )
        for hop_s in (0.0025, 0.01)
    },
    **{
        f"shared cores, {size} at a time, {right:.0%} right": Scenario(
            on_shared_cores(right, size), 40.0, 10.0
        )
        for size, right in _ON_SHARED_CORES
    },
    **{
        f"two GPUs, drafts ahead, {size} at a time, {right:.0%} right": Scenario(
            on_two_gpus(right, size), 12.0, 4.0
        )
        for size, right in _ON_TWO_GPUS
    },
    "shared cores, 4 at a time, prompts of 200": Scenario(
        on_shared_cores(0.7, 4, num_prompt_tokens=200), 40.0, 10.0
    ),
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One scenario, served in every way.

    Attributes:
        pinned: by depth of the chain.
    """

    scenario: Scenario
    plain: Served
    pinned: Mapping[int, Served]
    adaptive: Served

    @property
    def over_plain(self) -> float:
        """Tokens a second over those of plain decoding, all of the learning included."""
        return self.adaptive.rate(0.0, self.scenario.duration_s) / self.plain_rate

    @property
    def late_over_plain(self) -> float:
        """Tokens a second over those of plain decoding, after the learning."""
        return self._late_rate / self.plain_rate

    @property
    def over_best(self) -> float:
        """Tokens a second after the learning, over those of the best of plain and pinned."""
        return self._late_rate / max([self.plain_rate, *self.pinned_rates.values()])

    @property
    def plain_rate(self) -> float:
        """Tokens a second of plain decoding."""
        return self._fixed(self.plain)

    @property
    def pinned_rates(self) -> dict[int, float]:
        """Tokens a second of each pinned depth."""
        return {depth: self._fixed(served) for depth, served in self.pinned.items()}

    @property
    def best(self) -> tuple[str, float]:
        """The best fixed choice, and its speed over plain decoding."""
        plain = self.plain_rate
        depth, rate = max(self.pinned_rates.items(), key=lambda each: each[1])
        return (f"{depth} steps", rate / plain) if rate > plain else ("plain", 1.0)

    @property
    def _late_rate(self) -> float:
        return self.adaptive.rate(self.scenario.learning_s, self.scenario.duration_s)

    def _fixed(self, served: Served) -> float:
        """Without the first answer or so, in which not all is warm."""
        end_s = self.scenario.fixed_s
        return served.rate(0.2 * end_s, end_s)


def compare(
    decoder: Decoder, scenario: Scenario, depths: Sequence[int] = DEPTHS, seed: int = 0
) -> Comparison:
    """Serves a scenario in every way."""
    split, fixed_s = scenario.split, scenario.fixed_s
    return Comparison(
        scenario,
        serve(decoder, split, fixed_s, None, is_plain=True, seed=seed),
        {
            depth: serve(
                decoder,
                split,
                fixed_s,
                None,
                pinned=TreeShape(depth, 1, depth + 1),
                seed=seed,
            )
            for depth in depths
        },
        serve(decoder, split, scenario.duration_s, DEFAULT_CONFIG, seed=seed),
    )


def main(arguments: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="adaptive", description=__doc__)
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    flags = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        decoder = tiny_decoder(Path(folder))
        rows: list[tuple[str, ...]] = []
        for name, scenario in SCENARIOS.items():
            if flags.only in name:
                rows.append(_row(name, compare(decoder, scenario)))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    header = (
        "scenario",
        "plain tok/s",
        "best fixed",
        "over plain",
        "adaptive over plain",
        "after learning",
        "of best",
    )
    print(table(header, rows))
    print("adaptive over plain: whole run, learning included; of best fixed: after learning")
    return 0


def _row(name: str, found: Comparison) -> tuple[str, ...]:
    best, gain = found.best
    return (
        name,
        f"{found.plain_rate:.1f}",
        best,
        f"{gain:.2f}",
        f"{found.over_plain:.2f}",
        f"{found.late_over_plain:.2f}",
        f"{found.over_best:.2f}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
