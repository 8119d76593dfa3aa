"""Heads, shapes, samplings and prompts for comparing rounds on any device with the host's."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.tokens import SamplingParams, TreeShape
from tests.helpers.checkpoints import DELTA, TinyShape, write_checkpoint
from tests.helpers.device_rounds import (
    DeviceRounds,
    Pair,
    load_block_pair,
    load_mtp_pair,
    load_pair,
    token_tree,
)
from tests.helpers.dflash_heads import TinyDflash
from tests.helpers.draft_heads import TinyHead
from tests.helpers.host_rounds import HostRound, HostRounds
from tests.helpers.mtp_heads import TinyMtp

VOCAB_SIZE = 10
DRAFT_VOCAB_SIZE = 8
PAGE_SIZE = 4
NUM_ROUNDS = 2 if IS_INTERPRETING else 4
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
NUM_LAYERS = 4
BLOCKS = TinyDflash(
    vocab_size=VOCAB_SIZE,
    mask_token_id=VOCAB_SIZE - 1,
    target_layer_ids=(0, 1, 2),
    config={"num_target_layers": NUM_LAYERS},
)
_MTP_TARGET = TinyShape(vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS)
MTP = {"mtp": TinyMtp(shape=_MTP_TARGET), "mtp mimo": TinyMtp("mimo", shape=_MTP_TARGET)}
"""Heads of one next-token layer, which draft trees."""
LAYERED = {
    "mtp 2": TinyMtp(num_layers=2, shape=_MTP_TARGET),
    "mtp 3": TinyMtp("mimo", num_layers=3, shape=_MTP_TARGET),
}
"""Heads of several layers, which draft chains in rounds."""
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
    """Returns pairs by name: a small target with each of `HEADS`, `MTP` and `LAYERED`, with a head
    that drafts blocks ("dflash"), and a target with linear attention ("recurrent")."""
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS)
    folder = write_checkpoint(factory.mktemp("target"), shape=shape)
    pairs = {
        name: load_pair(folder, factory.mktemp("head"), head, device)
        for name, head in HEADS.items()
    }
    kinds = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    overrides = DELTA | {"layer_types": kinds}
    shape = TinyShape(
        vocab_size=VOCAB_SIZE, num_layers=NUM_LAYERS, head_dim=16, overrides=overrides
    )
    recurrent = write_checkpoint(factory.mktemp("recurrent"), "qwen3_5", shape)
    pair = load_pair(recurrent, factory.mktemp("head"), HEADS["eagle3"], device)
    blocks = load_block_pair(folder, factory.mktemp("head"), BLOCKS, device)
    layers = {
        name: load_mtp_pair(factory.mktemp(name), mtp, device)
        for name, mtp in (MTP | LAYERED).items()
    }
    return pairs | layers | {"recurrent": pair, "dflash": blocks}


def prompts(count: int) -> list[list[int]]:
    """Returns prompts that end near page boundaries, so that the rows of a round cross them."""
    source = random.Random(count)
    lengths = [PAGE_SIZE * 2 - 1, 1, PAGE_SIZE * 4 + 1, PAGE_SIZE * 3][:count]
    return [[source.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def texts_for(name: str) -> list[list[int]]:
    """Returns the prompts for which the host can draft with a pair."""
    return [text for text in prompts(4) if name not in LAYERED or len(text) > 1]


def host_rounds(
    pair: Pair,
    shape: TreeShape,
    prompts: Sequence[Sequence[int]],
    samplings: list[SamplingParams],
    num_rounds: int = NUM_ROUNDS,
) -> tuple[list[list[int]], list[list[HostRound]]]:
    """Returns the tokens of each sequence before its rounds, and its rounds."""
    starts, rounds = [], []
    for number, prompt in enumerate(prompts):
        sampling = samplings[number % len(samplings)]
        host = HostRounds(pair.decoder, pair.head, prompt, sampling, PAGE_SIZE)
        starts.append(list(host.sequence.token_ids))
        rounds.append([host.round(shape) for _ in range(num_rounds)])
    return starts, rounds


CHAINS = (TreeShape(4, 1, 5), TreeShape(2, 1, 3), TreeShape(1, 1, 2))
"""Chains drafted as blocks. A tree over block scores is grown differently by the host."""
CHANGING = (
    (TreeShape(2, 1, 3), TreeShape(2, 2, 6), TreeShape(1, 1, 2))
    if IS_INTERPRETING
    else (TreeShape(5, 1, 6), TREE, TreeShape(1, 1, 2), TREE, TreeShape(2, 2, 30))
)
"""Shapes of successive rounds: with fewer and with more open rows, in fused kernels and without."""


def check_changing(
    pair: Pair,
    *,
    is_recorded: bool,
    changing: Sequence[TreeShape] = CHANGING,
    name: str = "",
) -> None:
    """Compares rounds with the host's while their shape changes each time and one is unread.

    Args:
        is_recorded: see `DeviceRounds`; if true, trees are compared, too.
        name: see `texts_for`.
    """
    samplings = [*SAMPLINGS["greedy"], *SAMPLINGS["sampled"]]
    rounds = DeviceRounds(
        pair, changing[0], PAGE_SIZE, is_recorded=is_recorded, other_shapes=changing[1:]
    )
    hosts: list[HostRounds] = []
    for number, prompt in enumerate(texts_for(name)[: 2 if IS_INTERPRETING else 4]):
        sampling = samplings[number % len(samplings)]
        host = HostRounds(pair.decoder, pair.head, prompt, sampling, PAGE_SIZE)
        hosts.append(host)
        rounds.add(number, list(host.sequence.token_ids), sampling)
    pending: list[TreeShape] = []
    for shape in (*changing, *changing, None):
        if shape is not None:
            assert rounds.runner.takes(shape)
            rounds.runner.turn_to(shape)
            rounds.launch()
            pending.append(shape)
        if len(pending) < 2 and shape is not None:
            continue
        launched = pending.pop(0)
        for host, result in zip(hosts, rounds.runner.result(), strict=True):
            expected = host.round(launched)
            assert result.token_ids == expected.token_ids
            if is_recorded:
                tree = token_tree(rounds.trees[-1 - len(pending)], result.sequence_id)
                assert tree.token_ids == expected.tree.token_ids
                assert tree.parent_indices == expected.tree.parent_indices


def check_reading(pair: Pair, shape: TreeShape, *, is_recorded: bool) -> None:
    """Compares rounds that compute the ends of prompts with rounds after fully computed prompts.

    Args:
        is_recorded: see `DeviceRounds`; if true, trees are compared, too.
    """
    samplings = SAMPLINGS["mixed"]
    short, _, long, even = prompts(4)
    texts, num_computed = [short, even, long], [1, len(even) - 2, 3]
    rounds = DeviceRounds(pair, shape, PAGE_SIZE, max_sequences=40, is_recorded=is_recorded)
    begun = DeviceRounds(pair, shape, PAGE_SIZE, max_sequences=40, is_recorded=is_recorded)
    rounds.add(9, short, GREEDY)
    begun.add(9, short, GREEDY)
    rounds.launch()
    begun.launch()
    rounds.runner.place(
        [
            rounds.new_lane(number, text, samplings[number % 2], num_computed=num_computed[number])
            for number, text in enumerate(texts)
        ]
    )
    assert rounds.runner.num_slots > 1 + len(texts)
    rounds.launch()
    begun.launch()
    assert rounds.runner.num_slots == 1 + len(texts)
    for runner in (rounds.runner, begun.runner):
        runner.result()
    first = {result.sequence_id: result for result in rounds.runner.result()}
    begun.runner.result()
    for number, text in enumerate(texts):
        assert len(first[number].token_ids) == 1
        assert first[number].num_drafted == 0
        begun.add(number, [*text, *first[number].token_ids], samplings[number % 2])
    for _ in range(3):
        rounds.launch()
        begun.launch()
        if is_recorded:
            assert rounds.trees[-1].token_ids.equal(begun.trees[-1].token_ids)
        assert rounds.runner.result() == begun.runner.result()
