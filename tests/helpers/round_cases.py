"""Heads, shapes, samplings and prompts that rounds on any device are held to the host's with."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair, load_pair
from tests.helpers.draft_heads import TinyHead
from tests.helpers.host_rounds import HostRound, HostRounds

VOCAB_SIZE = 10
DRAFT_VOCAB_SIZE = 8
PAGE_SIZE = 4
NUM_ROUNDS = 4
HEADS = {
    "eagle": TinyHead(vocab_size=VOCAB_SIZE),
    "eagle3": TinyHead(
        kind="EAGLE3",
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        has_embedding=False,
    ),
    "eagle3.1": TinyHead(
        kind="EAGLE3",
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        has_fc_norms=True,
        config={"norm_output": True},
    ),
}
TREE = TreeShape(3, 3, 9)
SHAPES = [
    TreeShape(1, 1, 2),
    TreeShape(5, 1, 6),
    TreeShape(6, 1, 3),
    TreeShape(18, 1, 19),
    TreeShape(1, 5, 4),
    TREE,
    TreeShape(5, 4, 16),
    TreeShape(2, 2, 30),
    TreeShape(3, 8, 80),  # too large for fused kernels
]
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = {
    "greedy": [GREEDY],
    "sampled": [SamplingParams(temperature=1.0, seed=1234)],
    "cut": [SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.02, seed=5)],
    "mixed": [GREEDY, SamplingParams(temperature=0.7, top_k=2, seed=2**63 + 9), GREEDY],
}


def load_pairs(factory: pytest.TempPathFactory, device: torch.device) -> dict[str, Pair]:
    """Returns one small target with each of `HEADS`, by its name."""
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=6)
    folder = write_checkpoint(factory.mktemp("target"), shape=shape)
    return {
        name: load_pair(folder, factory.mktemp("head"), head, device)
        for name, head in HEADS.items()
    }


def prompts(count: int) -> list[list[int]]:
    """Lengths around the edges of pages, so that rows of a round straddle them."""
    source = random.Random(count)
    lengths = [PAGE_SIZE * 2 - 1, 1, PAGE_SIZE * 4 + 1, PAGE_SIZE * 3][:count]
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def host_rounds(
    pair: Pair,
    shape: TreeShape,
    prompts: Sequence[Sequence[int]],
    samplings: list[SamplingParams],
    num_rounds: int = NUM_ROUNDS,
) -> tuple[list[list[int]], list[list[HostRound]]]:
    """Returns each sequence as it enters the rounds, and its rounds."""
    starts, rounds = [], []
    for number, prompt in enumerate(prompts):
        sampling = samplings[number % len(samplings)]
        host = HostRounds(pair.decoder, pair.head, prompt, sampling, PAGE_SIZE)
        starts.append(list(host.sequence.token_ids))
        rounds.append([host.round(shape) for _ in range(num_rounds)])
    return starts, rounds
