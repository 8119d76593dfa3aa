"""Speed of the engine's forwards on one GPU, each beside its floor measured in the same run.

The model has the shape of Llama-3.1-8B in bfloat16 and random weights, which cost what trained
ones cost. Times are device times, medians of repeats, unless the column says otherwise.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kernels.linear import LinearWeight
from shared.kv.batch import ForwardBatch, SequenceRows, build_batch
from shared.kv.pool import KvPool
from shared.layers.attention import Attention
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.layers.rotary import RopeConfig, RopeScaling
from shared.models.config import ModelConfig
from shared.models.decoder import Decoder
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner
from tests.bench.device_clock import copy_bandwidth, device_ms, product_rate
from tests.bench.figure import add_figures_flag
from tests.bench.forward_line import (
    Company,
    Line,
    prefill_figure,
    same_bits_figure,
    steady_figure,
    verification_figure,
)
from tests.bench.gpu_round import round_lines
from tests.bench.random_weights import random_decoder
from tests.bench.round_line import HEADER
from tests.helpers.attention_batches import chunk, tree, with_pages

CUDA = torch.device("cuda")
PAGE_SIZE = 16
CONTEXT = 512
LIMITS = GraphLimits(max_rows=512, max_sequences=64, max_tail_width=72, max_context_tokens=131_072)
LLAMA_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    vocab_size=128_256,
    rms_norm_eps=1e-5,
    rope=RopeConfig(500_000.0, RopeScaling.LLAMA3, 8.0, 8192, 1.0, 4.0),
    sliding_windows=(None,) * 32,
    has_qkv_bias=False,
    has_output_bias=False,
    has_mlp_bias=False,
    has_qk_norm=False,
    tie_word_embeddings=False,
    max_position_embeddings=131_072,
    eos_token_ids=frozenset(),
    dtype=torch.bfloat16,
)


def product_floor_ms(decoder: Decoder, num_rows: int) -> float:
    """Returns the time of the step's matrix products alone, in one CUDA graph."""
    config = decoder.config
    hidden = torch.randn(num_rows, config.hidden_size, device=CUDA).to(torch.bfloat16)
    wide = torch.randn(num_rows, config.intermediate_size, device=CUDA).to(torch.bfloat16)

    def products() -> None:
        for layer in decoder.layers:
            F.linear(hidden, layer.attention.qkv.weight.values)
            F.linear(hidden, layer.attention.output.weight.values)
            F.linear(hidden, layer.mlp.gate_up.weight.values)
            F.linear(wide, layer.mlp.down.weight.values)
        F.linear(hidden, decoder.lm_head.weight.values)

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    return device_ms(graph.replay)


def with_tokens(sequences: Sequence[SequenceRows]) -> list[SequenceRows]:
    """Gives sequences pages, random tokens and the logits a step asks for."""
    rng = random.Random(1)
    placed, _ = with_pages(rng, list(sequences), PAGE_SIZE)
    return [
        replace(
            rows,
            token_ids=[rng.randrange(LLAMA_8B.vocab_size) for _ in rows.token_ids],
            logit_rows=range(len(rows.token_ids)) if len(rows.token_ids) < 300
            else [len(rows.token_ids) - 1],
        )
        for rows in placed
    ]  # fmt: skip


def batch_of(sequences: Sequence[SequenceRows]) -> ForwardBatch:
    return build_batch(with_tokens(sequences), page_size=PAGE_SIZE, device=CUDA)


def kv_bytes(sequences: Sequence[SequenceRows]) -> int:
    """Returns the bytes of keys and values that a forward must read."""
    a_token = 2 * LLAMA_8B.num_layers * LLAMA_8B.num_kv_heads * LLAMA_8B.head_dim * 2
    return a_token * sum(rows.kv_start + len(rows.token_ids) for rows in sequences)


def step_line(
    runner: ModelRunner, name: str, sequences: Sequence[SequenceRows], bandwidth: float
) -> Line:
    batch = batch_of(sequences)
    floor = product_floor_ms(runner.decoder, len(batch.token_ids))
    floor += kv_bytes(sequences) / bandwidth
    time_ms = device_ms(lambda: runner.run(batch))
    return Line(
        name, time_ms, floor, f"{1e3 * len(sequences) / time_ms:,.0f} steps of a sequence/s"
    )


def host_gap_ms(runner: ModelRunner, num_sequences: int) -> float:
    """Returns what a step takes beyond its device time when the host waits for its tokens."""
    rows = with_tokens([chunk(CONTEXT, 1)] * num_sequences)
    batch = build_batch(rows, page_size=PAGE_SIZE, device=CUDA)
    on_device_ms = device_ms(lambda: runner.run(batch).logits.argmax(-1))
    times_ms = []
    for _ in range(50):
        start_s = time.perf_counter()
        batch = build_batch(rows, page_size=PAGE_SIZE, device=CUDA)
        runner.run(batch).logits.argmax(-1).tolist()
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return statistics.median(times_ms) - on_device_ms


def prefill_line(runner: ModelRunner, rate: float) -> Line:
    sequences = [chunk(0, 2048)] * 8
    batch, config = batch_of(sequences), LLAMA_8B
    heads = config.num_heads + 2 * config.num_kv_heads
    weights = config.num_layers * config.hidden_size * (
        config.head_dim * (heads + config.num_heads) + 3 * config.intermediate_size
    )  # fmt: skip
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * 2048 / 2
    operations = len(batch.token_ids) * (2 * weights + attention)
    time_ms = device_ms(lambda: runner.run(batch), repeats=5, inner=1)
    note = f"{operations / time_ms / 1e9:.0f} of {rate / 1e9:.0f} TFLOP/s"
    return Line("prefill 8 × 2,048", time_ms, operations / rate, note)


def same_bits(runner: ModelRunner) -> list[Company]:
    """Says whether a row's logits depend on its company and on being the root of a tree."""
    rng = random.Random(2)
    alone = with_tokens([chunk(CONTEXT, 1)])[0]
    found = []
    expected = _first_logits(runner, [alone])
    for count in (2, 8, 32, 64):
        others = with_tokens([chunk(CONTEXT + 50, 1)] * count)
        moved = [replace(rows, pages=[page + 40 for page in rows.pages]) for rows in others]
        same = torch.equal(_first_logits(runner, [alone, *moved[1:]]), expected)
        found.append(Company(f"batch {count}", same))
    for nodes in (8, 32, 48, 64):
        rows = with_tokens([tree(rng, start=CONTEXT, num_nodes=nodes)])[0]
        root = replace(rows, token_ids=[alone.token_ids[0], *rows.token_ids[1:]],
                       pages=[*alone.pages, *range(900, 910)])  # fmt: skip
        same = torch.equal(_first_logits(runner, [root]), expected)
        found.append(Company(f"root of {nodes} nodes", same))
    return found


def _first_logits(runner: ModelRunner, sequences: Sequence[SequenceRows]) -> Tensor:
    batch = build_batch(sequences, page_size=PAGE_SIZE, device=CUDA)
    return runner.run(batch).logits[0].clone()


def library_decoder(decoder: Decoder) -> Decoder:
    """Returns the same decoder with the library's products."""

    def plain(layer: Linear) -> Linear:
        assert isinstance(layer.weight, LinearWeight)
        return replace(layer, weight=replace(layer.weight, counters=None))

    layers = []
    for layer in decoder.layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        qkv, output = plain(attention.qkv), plain(attention.output)
        attention = replace(attention, qkv=qkv, output=output)
        mlp = replace(mlp, gate_up=plain(mlp.gate_up), down=plain(mlp.down))
        layers.append(replace(layer, attention=attention, mlp=mlp))
    return replace(decoder, layers=tuple(layers), lm_head=plain(decoder.lm_head))


def steady_lines(runner: ModelRunner, bandwidth: float) -> list[Line]:
    """Measures forwards of many rows, whose products keep a row's bits, beside the library's."""
    decoder = library_decoder(runner.decoder)
    library = ModelRunner(decoder, runner.pool, ForwardGraphs(decoder, runner.pool, LIMITS))
    rng = random.Random(0)
    lines = []
    for nodes in (12, 16, 24, 32, 64):
        sequences = [tree(rng, start=CONTEXT, num_nodes=nodes) for _ in range(8)]
        free, line = (
            step_line(each, f"steady, {nodes} rows, batch 8", sequences, bandwidth)
            for each in (library, runner)
        )
        note = f"{line.time_ms / free.time_ms - 1:+.0%} to the library's {free.time_ms:.2f} ms"
        lines.append(replace(line, note=note, free_ms=free.time_ms))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench-gpu", description=__doc__)
    add_figures_flag(parser)
    figures = parser.parse_args().figures
    torch.cuda.init()
    bandwidth, rate = copy_bandwidth(), product_rate()
    decoder = random_decoder(LLAMA_8B, CUDA)
    pool = KvPool(decoder.kv_layout(PAGE_SIZE), 4200, CUDA)
    for cache in (*pool.keys, *pool.values):
        cache.normal_()
    runner = ModelRunner(decoder, pool, ForwardGraphs(decoder, pool, LIMITS))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"copy {bandwidth / 1e9:.2f} TB/s, product {rate / 1e9:.0f} TFLOP/s")
    print("| forward | ms | floor ms | of floor | |\n|---|---|---|---|---|")
    rng = random.Random(0)
    lines: dict[tuple[int, int], Line] = {}
    for count in (1, 8, 64):
        sequences = [chunk(CONTEXT, 1)] * count
        line = step_line(runner, f"plain decode, batch {count}", sequences, bandwidth)
        lines[count, 1] = line
        print(line, flush=True)
    for count in (1, 8):
        for nodes in (8, 32, 64):
            sequences = [tree(rng, start=CONTEXT, num_nodes=nodes) for _ in range(count)]
            name = f"verify {nodes} rows, batch {count}"
            lines[count, nodes] = line = step_line(runner, name, sequences, bandwidth)
            print(line, flush=True)
    figures.add([verification_figure(lines[1, 1], lines[1, 32])])
    prefill = prefill_line(runner, rate)
    print(prefill, flush=True)
    figures.add([prefill_figure(prefill)])
    steady = steady_lines(runner, bandwidth)
    print("\n".join(map(str, steady)), flush=True)
    figures.add([steady_figure(steady)])
    for count in (1, 64):
        print(f"host gap, batch {count}: {host_gap_ms(runner, count) * 1e3:.0f} us")
    found = same_bits(runner)
    print("; ".join(map(str, found)))
    figures.add([same_bits_figure(found)])
    print(HEADER)
    for each in round_lines(decoder, pool):
        print(each, flush=True)
        figures.add(each.figures())


if __name__ == "__main__":
    main()
