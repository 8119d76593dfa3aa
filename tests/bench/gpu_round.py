"""Speed of speculative rounds on one GPU, each beside its floor measured in the same run.

Target and EAGLE-3 head have the shapes of Llama-3.1-8B and its published head, in bfloat16 with
random weights. Random weights accept nothing, so acceptance is simulated: every round accepts
exactly three nodes and so commits four tokens, after all the work of a real decision.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.kv.pool import KvPool
from shared.layers.attention import Attention, AttentionShape
from shared.layers.decoder_layer import Mlp
from shared.layers.linear import Linear
from shared.layers.norm import RmsNorm
from shared.layers.rotary import RopeConfig, Rotary
from shared.models.decoder import Decoder
from shared.models.heads.config import HeadConfig, HeadKind
from shared.models.heads.feature_spec import FeatureSpec
from shared.models.heads.head import DraftHead, DraftVocabulary, Eagle3Layer
from shared.runtime.round_head import OwnHead
from shared.runtime.round_runner import RoundRunner
from shared.runtime.round_state import RoundSampling
from shared.runtime.tree_model import HeadModel
from shared.tokens import SamplingParams, TreeShape
from tests.bench.round_line import RoundLine
from tests.bench.simulated_rounds import (
    NUM_ROUNDS,
    SimulatedAcceptance,
    SimulatedVerification,
    place_all,
    round_ms,
)

CUDA = torch.device("cuda")
PAGE_SIZE = 16
CONTEXT = 512
NUM_ACCEPTED = 3
MAX_BATCH = 8
DRAFT_VOCAB_SIZE = 32_000
MAX_CONTEXT = 4096


def random_head(decoder: Decoder) -> DraftHead:
    """Returns an EAGLE-3 head of the published shape."""
    config = decoder.config
    hidden, generator = config.hidden_size, torch.Generator(CUDA).manual_seed(1)

    def weight(rows: int, columns: int, size: float = 0.02) -> Tensor:
        empty = torch.empty((rows, columns), dtype=torch.bfloat16, device=CUDA)
        return empty.normal_(0.0, size, generator=generator)

    def norm() -> RmsNorm:
        return RmsNorm(torch.ones(hidden, dtype=torch.bfloat16, device=CUDA), 1e-5)

    heads = config.num_heads * config.head_dim
    wide = heads + 2 * config.num_kv_heads * config.head_dim
    layer = Eagle3Layer(
        embedding_norm=norm(),
        hidden_norm=norm(),
        attention=Attention(
            AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim),
            Linear.of(weight(wide, 2 * hidden)),
            Linear.of(weight(hidden, heads)),
            None,
            0,
        ),
        mlp_norm=norm(),
        mlp=Mlp(
            Linear.of(weight(2 * config.intermediate_size, hidden)),
            Linear.of(weight(hidden, config.intermediate_size)),
        ),
        state_norm=None,
        norm_before_residual=False,
    )
    tokens = torch.randperm(config.vocab_size, generator=generator, device=CUDA)
    vocabulary = DraftVocabulary(
        norms=(norm(),),
        # Large logits make peaked distributions, whose trees are as deep as those of a trained
        # head.
        lm_head=Linear.of(weight(DRAFT_VOCAB_SIZE, hidden, 0.16)),
        token_ids=tokens[:DRAFT_VOCAB_SIZE].sort().values,
        vocab_size=config.vocab_size,
        size=DRAFT_VOCAB_SIZE,
    )
    layers = (2, config.num_layers // 2, config.num_layers - 3)
    return DraftHead(
        config=_head_config(decoder, layers),
        feature_spec=FeatureSpec(layers, torch.bfloat16, hidden, weight(hidden, 3 * hidden)),
        fusion=None,
        embedding=decoder.embedding,
        layers=(layer,),
        vocabulary=vocabulary,
        rotary=Rotary(config.rope, config.head_dim, CUDA),
    )


def _head_config(decoder: Decoder, layers: tuple[int, ...]) -> HeadConfig:
    rope = RopeConfig(500_000.0)
    sizes = replace(decoder.config, rope=rope, max_position_embeddings=MAX_CONTEXT)
    return HeadConfig(
        kind=HeadKind.EAGLE3,
        sizes=sizes,
        target_hidden_size=sizes.hidden_size,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        feature_layers=layers,
        fuses_features=True,
        norm_before_fc=False,
        feeds_back_norm=False,
        norm_before_residual=False,
    )


class RoundBench:
    """Runs rounds of any shape and batch over one target and one head."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        self._decoder, self._pool = decoder, pool
        self.head = random_head(decoder)
        self._head_pool = KvPool(self.head.kv_layout(PAGE_SIZE), pool.num_pages, CUDA)
        for cache in (*self._head_pool.keys, *self._head_pool.values):
            cache.normal_()
        num_slots = pool.num_pages * PAGE_SIZE
        self._features = torch.empty(
            (num_slots, decoder.config.hidden_size), dtype=torch.bfloat16, device=CUDA
        ).normal_()

    def runner(self, tree: TreeShape, batch: int, sampling: SamplingParams) -> RoundRunner:
        """Returns a runner with `batch` sequences placed."""
        runner = RoundRunner(
            decoder=self._decoder,
            pool=self._pool,
            head=OwnHead(HeadModel(self.head, self._head_pool), self._make_verification),
            feature_rows=self._features,
            shapes={tree: batch},
            max_context_tokens=MAX_CONTEXT,
        )
        self._place(runner, batch, sampling)
        runner.capture(batch, RoundSampling.of([sampling]))
        return runner

    def _make_verification(self, *parts: Any) -> SimulatedVerification:
        counts = [[NUM_ACCEPTED] * MAX_BATCH] * NUM_ROUNDS
        vocab_size = self._decoder.config.vocab_size
        acceptance = SimulatedAcceptance(counts, vocab_size, CUDA)
        self._verification = SimulatedVerification.over(acceptance)(*parts)
        return self._verification

    def _place(self, runner: RoundRunner, batch: int, sampling: SamplingParams) -> None:
        num_pages = MAX_CONTEXT // PAGE_SIZE // 4
        place_all(runner, batch, sampling, context=CONTEXT, num_pages=num_pages)

    def line(self, tree: TreeShape, batch: int, sampling: SamplingParams) -> RoundLine:
        """Measures one kind of round and returns its row of the table."""
        runner, kind = self.runner(tree, batch, sampling), RoundSampling.of([sampling])
        captured, draw = runner.captured(batch, kind), self._verification.draw

        @torch.inference_mode()
        def verify() -> None:
            captured.forward.replay()
            rows = captured.tree.rows
            captured.drawn.copy_(draw(captured.logits, captured.state, rows, kind))
            captured.commit.replay()

        time_ms, tokens = round_ms(runner)
        self._place(runner, batch, sampling)
        # Replayed alone, the draft leaves the state as it is; the verification moves on.
        draft_ms, verification_ms = _replay_ms(captured.draft.replay), _replay_ms(verify)
        self._place(runner, batch, sampling)
        gap_us = 1e3 * (time_ms - _replayed_rounds_ms(captured.draft.replay, verify))
        draft_floor_ms, verification_floor_ms = self._floors_ms(runner, batch)
        return RoundLine(
            tree=tree,
            batch=batch,
            temperature=sampling.temperature,
            round_ms=time_ms,
            draft_ms=draft_ms,
            draft_floor_ms=draft_floor_ms,
            verification_ms=verification_ms,
            verification_floor_ms=verification_floor_ms,
            gap_us=gap_us,
            num_tokens=tokens,
        )

    def _floors_ms(self, runner: RoundRunner, batch: int) -> tuple[float, float]:
        """Returns the times of the matrix products of draft and verification alone."""
        shape = runner.shape
        levels = [batch * shape.max_committed]
        levels += [batch * shape.tree.topk] * (shape.tree.num_steps - 1)
        draft = _graphed(lambda: [self._head_products(rows, batch) for rows in levels])
        rows, width = batch * shape.num_tree_rows, batch * shape.max_committed
        return draft, _graphed(lambda: self._target_products(rows, width))

    def _head_products(self, rows: int, batch: int) -> None:
        layer = self.head.layers[0]
        assert isinstance(layer, Eagle3Layer)
        hidden = self._features[:rows]
        F.linear(torch.cat((hidden, hidden), -1), layer.attention.qkv.weight.values)
        F.linear(hidden, layer.attention.output.weight.values)
        wide = F.linear(hidden, layer.mlp.gate_up.weight.values)
        F.linear(wide[:, : wide.shape[1] // 2], layer.mlp.down.weight.values)
        scored = batch if rows > batch * 8 else rows
        F.linear(hidden[:scored], self.head.vocabulary.lm_head.weight.values)

    def _target_products(self, rows: int, num_features: int) -> None:
        hidden = self._features[:rows]
        for layer in self._decoder.layers:
            F.linear(hidden, layer.attention.qkv.weight.values)
            F.linear(hidden, layer.attention.output.weight.values)
            wide = F.linear(hidden, layer.mlp.gate_up.weight.values)
            F.linear(wide[:, : wide.shape[1] // 2], layer.mlp.down.weight.values)
        F.linear(hidden, self._decoder.lm_head.weight.values)
        joined = self._features[: 3 * num_features].view(num_features, -1)
        projection = self.head.feature_spec.projection
        assert projection is not None
        F.linear(joined, projection)


def _replayed_rounds_ms(draft: Callable[[], None], verify: Callable[[], None]) -> float:
    """Returns the time of a round when the device is handed rounds and nothing else."""

    def rounds() -> None:
        for _ in range(NUM_ROUNDS):
            draft()
            verify()

    return _replay_ms(rounds, repeats=3) / NUM_ROUNDS


def _replay_ms(replay: Callable[[], object], repeats: int = 15) -> float:
    """Returns the median device time of one replay."""
    times_ms = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(start.elapsed_time(end))
    return statistics.median(times_ms[2:])


def _graphed(work: Callable[[], object]) -> float:
    """Returns the time of work as one CUDA graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return _replay_ms(graph.replay)


def round_lines(decoder: Decoder, pool: KvPool) -> Iterator[RoundLine]:
    """Yields the rows of the table of rounds."""
    bench = RoundBench(decoder, pool)
    greedy, drawn = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=3)
    chain, tree = TreeShape(5, 1, 6), TreeShape(5, 8, 32)
    yield bench.line(chain, 1, greedy)
    yield bench.line(tree, 1, greedy)
    yield bench.line(tree, 1, drawn)
    yield bench.line(chain, 8, greedy)
    yield bench.line(tree, 8, greedy)
