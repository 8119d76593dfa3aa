"""Speed of mixtures of experts, each forward beside the floor of the same run.

    python -m tests.bench.experts [--shapes qwen3-30b-a3b glm-4.5-air deepseek-v3
        qwen3-next-80b-a3b] [--no-kernels] [--rounds | --tp-size N [--ep] [--enable-dp-attention]]

On one GPU, or on several that share the matrices (`--tp-size`), have experts of their own (`--ep`)
or sequences of their own (`--enable-dp-attention`), which are dealt out in turn; floors are then
those of the first GPU's part. Four shapes with random weights, made on the
device; no checkpoint is read. Each has a process of its own, with a time limit, so that one which
fails leaves the others; all of them take less than five minutes on an H200. As many layers are
built as fit.

The floor of a step is the bytes of the weights that it reads, of experts those that are hit, and of
recurrent states over the bandwidth of a large copy, and beside them the larger of the bytes of the
cache and the arithmetic of attention over them, at the rate of a large product. That of a prompt is
its arithmetic. Experts are hit as random weights have it: about evenly. Where the device's time
goes is printed below each shape, by kernel.

`--rounds` adds a table of speculative rounds with the shape's own next-token layer, see
`expert_rounds`, for shapes that have a published one.
"""

from __future__ import annotations

import argparse
import math
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

import torch

from services.followers import Followers, Seat, check_shard, rank_devices
from services.ranks import Ranks
from shared.kernels.routing import Routing
from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.layers.experts import Experts
from shared.layers.tensor_group import TensorGroup
from shared.model_options import ModelOptions
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.models.decoder_weights import decoder_parts
from shared.models.heads.head import DraftHead
from shared.models.shard import WHOLE, Shard
from shared.models.weights import WeightPart
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.lockstep import Leader, follow
from shared.runtime.runner import ModelRunner
from shared.telemetry.logs import LogFormat
from tests.bench.aims import shape_name
from tests.bench.device_clock import copy_bandwidth, device_ms, product_rate
from tests.bench.expert_floors import (
    StepFloor,
    attention_weights,
    expected_hits,
    experts_hit,
    tensors_of,
    weight_bytes,
    weights_a_row,
)
from tests.bench.expert_rounds import (
    BATCHES,
    CHAIN,
    HEADER,
    ROOM_TOKENS,
    TOKENS_A_ROUND,
    ExpertRounds,
    RoundsLine,
    pages_each,
)
from tests.bench.expert_shapes import SHAPES, ExpertShape
from tests.bench.forward_line import Line
from tests.bench.random_weights import mtp_parts_of, random_decoder, random_mtp
from tests.helpers.attention_batches import chunk, tree, with_pages

PAGE_SIZE = 16
LIMIT_S, ROUNDS_LIMIT_S = 120.0, 100.0
# Of the device's memory; the rest is for activations, graphs and what a layer is made from.
_WEIGHTS_SHARE = 0.7
_KERNELS_SHOWN = 9


@dataclass(frozen=True, slots=True)
class Rates:
    """What the hardware does at best, a ms."""

    bandwidth: float
    operations: float

    def __str__(self) -> str:
        return f"copy {self.bandwidth / 1e9:.2f} TB/s, product {self.operations / 1e9:.0f} TFLOP/s"

    @classmethod
    def of(cls, device: torch.device) -> Rates:
        """Measures them; those of a CPU are 1."""
        return cls(copy_bandwidth(), product_rate()) if device.type == "cuda" else cls(1.0, 1.0)


def num_layers(
    shape: ExpertShape, device: torch.device, shard: Shard = WHOLE, *, has_rounds: bool = False
) -> int:
    """Returns as many layers as fit on the devices, and no more than are asked for.

    Args:
        has_rounds: there is a next-token layer, too.
    """
    if device.type != "cuda":
        return shape.layers_most
    # A first dense layer is none of those that are counted.
    period = shape.period
    counts = (2 * period, 3 * period)
    sizes = [_num_weights(shape.config(count), shard) for count in counts]
    a_period = sizes[1] - sizes[0]
    itemsize = 2 if shape.quantisation.value == "unquant" else 1
    outside = 2 * (sizes[0] - 2 * a_period)
    config = shape.config(period)
    batch = -(-max(shape.batches) // _num_ranks(shard))
    tokens = batch * (shape.context + (ROOM_TOKENS if has_rounds else 0) + PAGE_SIZE)
    cache = tokens * _cache_bytes(config, shard)
    if config.delta is not None:
        cache += batch * config.delta.state_bytes
    room = torch.cuda.mem_get_info(device)[0] * _WEIGHTS_SHARE - outside
    if has_rounds:
        own = sum(map(_size_of, mtp_parts_of(*shape.mtp_layers(period))))
        # The layer, its cache, and the hidden states that it reads.
        room -= own * itemsize + cache / period + 2 * tokens * config.hidden_size
    most = int(room / (a_period * itemsize + cache)) * period
    return max(period, min(shape.layers_most, most))


def _num_ranks(shard: Shard) -> int:
    """Returns how many processes have sequences of their own."""
    return shard.size if shard.spreads_sequences else 1


def _num_weights(config: ModelConfig, shard: Shard) -> int:
    return sum(map(_size_of, decoder_parts(config, shard)))


def _size_of(part: WeightPart) -> int:
    return part.num_rows * math.prod(part.read_shape[1:])


def _cache_bytes(config: ModelConfig, shard: Shard) -> int:
    """Of a token."""
    planes, num_heads = 2, shard.of_attention.num_kv_heads(config)
    if config.latent is not None:
        planes = num_heads = 1
    return 2 * planes * config.num_cache_layers * num_heads * config.head_dim


class ShapeBench:
    """One shape on one device, or this process's part of it.

    Args:
        count: layers that are built.
        group: processes that share the model.
        leader: of rank 0.
        has_rounds: rounds are measured, too.

    Attributes:
        head: the next-token layer; None without rounds.
    """

    def __init__(
        self,
        shape: ExpertShape,
        count: int,
        device: torch.device,
        clock: Callable[..., float],
        group: TensorGroup | None = None,
        leader: Leader | None = None,
        *,
        has_rounds: bool = False,
    ) -> None:
        self.shape = shape
        self._device, self._clock = device, clock
        self.rates = Rates.of(device)
        options = ModelOptions(quantisation=shape.quantisation)
        self.decoder = decoder = random_decoder(
            shape.config(count), device, options, group, shape.block
        )
        self.head: DraftHead | None = None
        if has_rounds:
            self.head = random_mtp(*shape.mtp_layers(count), decoder, options, shape.block)
        self.runner = ModelRunner(*self._room(decoder), leader=leader)

    def _room(self, decoder: Decoder) -> tuple[Decoder, KvPool, ForwardGraphs | None]:
        shape, device, shard = self.shape, self._device, decoder.shard
        num_ranks = _num_ranks(shard)
        batch, num_prompts = (
            -(-count // num_ranks) for count in (max(shape.batches), shape.prompt.count)
        )
        most_tokens = max(
            batch * (shape.context + PAGE_SIZE),
            num_prompts * shape.prompt.num_tokens,
            shape.context + max(shape.trees),
        )
        if self.head is not None:
            num_tokens = PAGE_SIZE * pages_each(shape.context, PAGE_SIZE)
            most_tokens = max(most_tokens, max(BATCHES) * num_tokens)
        pool = KvPool(
            decoder.kv_layout(PAGE_SIZE),
            most_tokens // PAGE_SIZE + batch + 2,
            device,
            num_states=max(batch, num_prompts),
            rank=shard.rank if num_ranks > 1 else 0,
            num_ranks=num_ranks,
        )
        pool.storage.normal_()
        if device.type != "cuda":
            return decoder, pool, None
        # Routing is measured with the rows of all trees as so many sequences.
        most_rows = 64 if self.head is None else max(BATCHES) * CHAIN.num_draft_tokens
        limits = GraphLimits(
            max_rows=most_rows,
            max_sequences=most_rows,
            max_tail_width=72,
            max_context_tokens=2 * shape.context,
        )
        return decoder, pool, ForwardGraphs(decoder, pool, limits)

    def lines(self) -> Iterator[Line]:
        """Yields the rows of the table; those that fail say why."""
        rng, shape = random.Random(0), self.shape
        plain_ms: float | None = None
        for count in shape.batches:
            sequences = [chunk(shape.context, 1)] * count
            line = self._tried(f"plain decode, batch {count}", sequences, self._step)
            if line is not None:
                plain_ms = line.time_ms if count == 1 else plain_ms
                yield line
        for nodes in shape.trees:
            sequences = [tree(rng, start=shape.context, num_nodes=nodes)]
            line = self._tried(f"verify {nodes} nodes, batch 1", sequences, self._step)
            if line is not None:
                over = "" if plain_ms is None else f"{line.time_ms / plain_ms:.2f} × plain; "
                yield replace(line, note=over + line.note)
        prompt = shape.prompt
        name = f"prefill {prompt.count} × {prompt.num_tokens:,}"
        line = self._tried(name, [chunk(0, prompt.num_tokens)] * prompt.count, self._prefill)
        if line is not None:
            yield line

    def rounds(self) -> Iterator[RoundsLine | str]:
        """Yields the rows of the table of rounds; those that fail say why."""
        assert self.head is not None
        own = ExpertRounds(
            self.shape, self.runner, self.head, self._clock, self._floor, self.rates.bandwidth
        )
        yield from own.lines()

    def kernels(self) -> Iterator[str]:
        """Yields, for forwards of each kind, the kernels that take most of the device's time."""
        shape = self.shape
        kinds = [
            (f"batch {count}", [chunk(shape.context, 1)] * count)
            for count in (min(shape.batches), max(shape.batches))
        ]
        kinds.append(("prefill", [chunk(0, shape.prompt.num_tokens)] * shape.prompt.count))
        for name, sequences in kinds:
            try:
                work = self._repeated(self._batch(sequences), sequences)
                yield f"{name}: {_kernel_times(work)}"
            except Exception as error:
                yield f"{name}: failed: {error}"

    def _tried(
        self,
        name: str,
        sequences: Sequence[SequenceRows],
        measure: Callable[[str, ForwardBatch, Sequence[SequenceRows]], Line],
    ) -> Line | None:
        try:
            return measure(name, self._batch(sequences), sequences)
        except Exception:
            print(f"| {name} | failed | | | {traceback.format_exc(limit=-3)!r} |", flush=True)
            return None

    def _step(self, name: str, batch: ForwardBatch, sequences: Sequence[SequenceRows]) -> Line:
        count, floor = len(self.decoder.layers), self._floor(batch, sequences)
        time_ms = self._clock(self._repeated(batch, sequences))
        note = f"experts hit {floor.hits:.1f}, {floor.expected_hits:.1f} expected; "
        head = sum(tensor.nbytes for tensor in tensors_of(self.decoder.lm_head))
        head_ms = head / self.rates.bandwidth
        own_ms, own_floor_ms = (time_ms - head_ms) / count, (floor.ms - head_ms) / count
        note += f"a layer {1e3 * own_ms:.0f} of {1e3 * own_floor_ms:.0f} us, "
        return Line(name, time_ms, floor.ms, f"{note}{own_ms / own_floor_ms:.2f} ×")

    def _floor(self, batch: ForwardBatch, sequences: Sequence[SequenceRows]) -> StepFloor:
        routing, num_rows = self._routing(), len(batch.token_ids)
        expected = expected_hits(routing.num_experts, routing.num_chosen, num_rows)
        if self.decoder.group is None:
            hits: list[float] = [*experts_hit(self.decoder, self.runner.pool, batch)]
        else:
            hits = [
                expected * layer.mlp.gate_up.num_experts / routing.num_experts
                for layer in self.decoder.layers
                if isinstance(layer.mlp, Experts)
            ]
        floor_ms = weight_bytes(self.decoder, hits) / self.rates.bandwidth
        floor_ms += self._attention_ms(sequences) + self._states_ms(sequences)
        return StepFloor(floor_ms, sum(hits) / len(hits), expected)

    def _prefill(self, name: str, batch: ForwardBatch, sequences: Sequence[SequenceRows]) -> Line:
        config, rate = self.decoder.config, self.rates.operations
        width = 2 * config.head_dim
        if config.latent is not None:
            width = config.latent.query_dim + config.latent.value_dim
        own = self._own(sequences)
        pairs = sum(len(rows.token_ids) ** 2 / 2 for rows in own)
        operations = 2.0 * self._num_attention_layers * self._num_heads * width * pairs
        num_rows, num_own = len(batch.token_ids), sum(len(rows.token_ids) for rows in own)
        projections = attention_weights(self.decoder)
        operations += 2 * num_rows * (weights_a_row(self.decoder) - projections)
        operations += 2 * num_own * projections
        time_ms = self._clock(lambda: self.runner.run(batch), repeats=3, inner=1)
        note = f"{operations / time_ms / 1e9:.0f} of {rate / 1e9:.0f} TFLOP/s"
        return Line(name, time_ms, operations / rate, note)

    def _attention_ms(self, sequences: Sequence[SequenceRows]) -> float:
        """Returns the floor of reading the cache, or of the arithmetic over it."""
        config, sequences = self.decoder.config, self._own(sequences)
        layout, num_layers = self.runner.pool.layout, self._num_attention_layers
        token_bytes = layout.token_size_bytes / layout.num_layers * num_layers
        read_bytes = token_bytes * sum(rows.kv_start + len(rows.token_ids) for rows in sequences)
        width = 2 * config.head_dim
        if config.latent is not None:
            width = config.latent.row_dim + config.latent.latent_dim
        pairs = sum(rows.kv_start * len(rows.token_ids) for rows in sequences)
        operations = 2 * num_layers * self._num_heads * width * pairs
        return max(read_bytes / self.rates.bandwidth, operations / self.rates.operations)

    def _states_ms(self, sequences: Sequence[SequenceRows]) -> float:
        """Returns the floor of reading recurrent states, and of writing those that are kept."""
        states = self.runner.pool.layout.states
        times = sum(2 if rows.tail_mask is None else 1 for rows in sequences)
        return 0.0 if states is None else times * states.size_bytes / self.rates.bandwidth

    def _repeated(
        self, batch: ForwardBatch, sequences: Sequence[SequenceRows]
    ) -> Callable[[], object]:
        """Returns a step that can be run again, as if its sequences had not moved on: the states
        behind their contexts are found each time, with other numbers."""
        states = self.runner.pool.states
        if states is None:
            return lambda: self.runner.run(batch)
        for rows in self._placed(sequences):
            if not rows.kv_start:
                continue
            context = SequenceRows.causal([1] * rows.kv_start, 0, rows.pages)
            self.runner.run(build_batch([context], page_size=PAGE_SIZE, device=self._device))
        known = states._lengths.copy(), states._stamps.copy()

        def again() -> object:
            states._lengths[:], states._stamps[:] = known
            return self.runner.run(batch)

        return again

    @property
    def _num_attention_layers(self) -> int:
        config = self.decoder.config
        return config.num_layers - (0 if config.delta is None else len(config.delta.layers))

    @property
    def _num_heads(self) -> int:
        """Query heads of this process."""
        return self.decoder.shard.of_attention.num_heads(self.decoder.config)

    def _own(self, sequences: Sequence[SequenceRows]) -> Sequence[SequenceRows]:
        """Returns those that the first process attends from, no other one more."""
        return sequences[:: self.runner.pool.num_ranks]

    def _routing(self) -> Routing:
        experts = self.decoder.config.experts
        assert experts is not None
        return experts.routing

    def _placed(self, sequences: Sequence[SequenceRows]) -> list[SequenceRows]:
        """Returns the sequences with pages, the same each time."""
        placed, pool = list(sequences), self.runner.pool
        for rank in range(pool.num_ranks):
            own, _ = with_pages(random.Random(1), placed[rank :: pool.num_ranks], PAGE_SIZE)
            first = rank * pool.num_pages
            placed[rank :: pool.num_ranks] = [
                replace(rows, pages=[first + page for page in rows.pages]) for rows in own
            ]
        return placed

    def _batch(self, sequences: Sequence[SequenceRows]) -> ForwardBatch:
        rng, vocab_size = random.Random(2), self.decoder.config.vocab_size
        filled = [
            replace(
                rows,
                token_ids=[rng.randrange(vocab_size) for _ in rows.token_ids],
                logit_rows=range(len(rows.token_ids)) if len(rows.token_ids) <= 64
                else [len(rows.token_ids) - 1],
            )
            for rows in self._placed(sequences)
        ]  # fmt: skip
        return build_batch(filled, page_size=PAGE_SIZE, device=self._device)


def _kernel_times(work: Callable[[], object]) -> str:
    """Returns the kernels of one forward with their times in us and how often they run."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    found = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in found)
    shown = ", ".join(
        f"{each.key[:48]} {each.self_device_time_total:,.0f} ({each.count})"
        for each in found[:_KERNELS_SHOWN]
    )
    return f"{total:,.0f} us: {shown}"


@dataclass(frozen=True, slots=True)
class _Logging:
    """See `FollowerSettings`."""

    log_level: str = "warning"
    log_format: LogFormat = LogFormat.TEXT
    num_threads: int = 1


def follow_rank_0(
    shape: ExpertShape,
    count: int,
    clock: Callable[..., float],
    shard: Shard,
    seat: Seat,
    pipe: Connection,
) -> None:
    """Computes another process's part of what rank 0, which has `shard`, measures."""
    group = shared_as(shard, seat.join(_Logging()))
    follow(ShapeBench(shape, count, seat.device, clock, group).runner, group, pipe)


def shared_as(shard: Shard, group: TensorGroup) -> TensorGroup:
    """Returns the group with what rank 0's shard says of all of its processes."""
    return group.spreading(experts=shard.spreads_experts, sequences=shard.spreads_sequences)


def measure(
    shape: ExpertShape, shard: Shard, *, has_kernels: bool, has_rounds: bool = False
) -> None:
    """Prints the table of one shape.

    Args:
        shard: rank 0's.
        has_rounds: adds a table of rounds, where the shape has a next-token layer.

    Raises:
        SettingsError: the model cannot be cut so, or there are not as many GPUs.
    """
    device, start_s = torch.device("cuda"), time.perf_counter()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    check_shard(shard, shape.config(shape.period))
    if has_rounds and shape.mtp is None:
        print(f"{shape.name}: no next-token layer, so no rounds", flush=True)
        has_rounds = False
    count = num_layers(shape, device, shard, has_rounds=has_rounds)
    if shard.size == 1:
        bench = ShapeBench(shape, count, device, device_ms, has_rounds=has_rounds)
        _report(bench, start_s, has_kernels=has_kernels)
        if has_rounds:
            report_rounds(bench, start_s)
        return
    ranks = Ranks(shard.size)
    devices = rank_devices(device.type, ranks)
    work = partial(follow_rank_0, shape, count, device_ms, shard)
    followers = Followers(work, ranks, devices, service="bench")
    try:
        group = shared_as(shard, followers.group)
        bench = ShapeBench(shape, count, devices[0], device_ms, group, followers.leader)
        _report(bench, start_s, has_kernels=False)
    finally:
        followers.stop()


def _report(bench: ShapeBench, start_s: float, *, has_kernels: bool) -> None:
    shape, held = bench.shape, torch.cuda.memory_allocated() / 2**30
    shard = bench.decoder.shard
    spread = ", experts spread" if shard.spreads_experts else ""
    spread += ", sequences spread" if shard.spreads_sequences else ""
    print(
        f"\n{shape.name}, --tp-size {shard.size}{spread}, "
        f"{len(bench.decoder.layers)} of {shape.layers_most} layers, "
        f"{shape.quantisation.value}, {held:.0f} GiB, context {shape.context:,}; {bench.rates}; "
        f"made in {time.perf_counter() - start_s:.0f} s\n"
        "| forward | ms | floor ms | of floor | |\n|---|---|---|---|---|",
        flush=True,
    )
    for line in bench.lines():
        print(line, flush=True)
    if has_kernels:
        for text in bench.kernels():
            print(text, flush=True)
    print(f"{shape.name}: {time.perf_counter() - start_s:.0f} s", flush=True)


def report_rounds(bench: ShapeBench, start_s: float) -> None:
    """Prints the table of rounds of one shape."""
    shape, num_built = bench.shape, len(bench.decoder.layers)
    print(
        f"\n{shape.name}, rounds with its own next-token layer: {shape_name(CHAIN)}, greedy, "
        f"{TOKENS_A_ROUND} tokens a round simulated, {num_built} of {shape.layers_most} layers, "
        f"context {shape.context:,}, beside plain steps of the same batch; {bench.rates}\n"
        f"| {' | '.join(HEADER)} |\n{'|---' * len(HEADER)}|",
        flush=True,
    )
    for line in bench.rounds():
        print(line, flush=True)
    print(f"{shape.name}, with rounds: {time.perf_counter() - start_s:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench-experts", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--no-kernels", action="store_true", help="do not say where time goes")
    parser.add_argument("--tp-size", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--ep", action="store_true", help="each of them has experts of its own")
    parser.add_argument(
        "--enable-dp-attention", action="store_true", help="each of them has sequences of its own"
    )
    parser.add_argument(
        "--rounds", action="store_true", help="measure rounds with the next-token layer, too"
    )
    flags = parser.parse_args()
    if flags.rounds and flags.tp_size > 1:
        parser.error("--rounds are measured on one GPU")
    if len(flags.shapes) == 1:
        shard = Shard(0, flags.tp_size, flags.ep, flags.enable_dp_attention)
        has_kernels = not flags.no_kernels
        measure(SHAPES[flags.shapes[0]], shard, has_kernels=has_kernels, has_rounds=flags.rounds)
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    failed = 0
    for name in flags.shapes:
        words = [sys.executable, "-m", "tests.bench.experts", "--shapes", name]
        words += ["--no-kernels"] * flags.no_kernels + ["--ep"] * flags.ep
        words += ["--enable-dp-attention"] * flags.enable_dp_attention
        words += [f"--tp-size={flags.tp_size}", *["--rounds"] * flags.rounds]
        limit_s = LIMIT_S + ROUNDS_LIMIT_S * flags.rounds
        try:
            failed |= subprocess.run(words, timeout=limit_s, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: not done after {limit_s:.0f} s", flush=True)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
