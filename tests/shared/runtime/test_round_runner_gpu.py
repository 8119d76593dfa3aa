"""Rounds as CUDA graphs equal rounds through the host on the same device, in float32."""

from __future__ import annotations

import itertools

import pytest
import torch

from shared.runtime.kernel_compiler import compile_kernels
from shared.runtime.round_head import CatchUp
from shared.runtime.round_state import RoundSampling
from shared.tokens import TreeShape
from tests.helpers.device_rounds import DeviceRounds, Pair
from tests.helpers.round_cases import (
    CHAINS,
    GREEDY,
    HEADS,
    LAYERED,
    MTP,
    NUM_ROUNDS,
    PAGE_SIZE,
    SAMPLINGS,
    SHAPES,
    TREE,
    check_changing,
    check_reading,
    host_rounds,
    load_pairs,
    prompts,
    texts_for,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CASES = [
    *itertools.product(["eagle3"], SHAPES, ["greedy", "sampled", "mixed"]),
    *itertools.product(["dflash", *LAYERED], CHAINS, ["greedy", "sampled"]),
    *itertools.product(
        ["eagle", "eagle3.1", "recurrent", *MTP], [TreeShape(5, 1, 6), TREE], ["mixed"]
    ),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return load_pairs(tmp_path_factory, CUDA)


@pytest.mark.parametrize(("name", "shape", "sampling"), CASES, ids=str)
def test_rounds_equal_those_of_the_host(
    pairs: dict[str, Pair], name: str, shape: TreeShape, sampling: str
) -> None:
    pair, samplings = pairs[name], SAMPLINGS[sampling]
    starts, expected = host_rounds(pair, shape, texts_for(name), samplings)
    rounds = DeviceRounds(pair, shape, PAGE_SIZE, is_recorded=False)
    # As at a start; what is captured there must not be read here.
    compile_kernels([rounds.runner.empty_round(len(starts), RoundSampling.DRAWN)], CUDA)
    for number, token_ids in enumerate(starts):
        rounds.add(number, token_ids, samplings[number % len(samplings)])
    tokens: list[list[int]] = [[] for _ in starts]
    num_drafted: list[list[int]] = [[] for _ in starts]
    rounds.launch()
    for _ in range(NUM_ROUNDS):
        rounds.launch()
        for found in rounds.runner.result():
            tokens[found.sequence_id] += found.token_ids
            num_drafted[found.sequence_id].append(found.num_drafted)
    for number, host in enumerate(expected):
        committed = [token for each in host for token in each.token_ids]
        if samplings[number % len(samplings)].top_k:
            # Cuts do not reach the draft here, so it proposes other trees for the same tokens.
            shortest = min(len(committed), len(tokens[number]))
            assert tokens[number][:shortest] == committed[:shortest]
        else:
            assert tokens[number] == committed
            assert num_drafted[number] == [len(each.tree) for each in host]


@pytest.mark.parametrize("name", ["eagle3", "dflash", *LAYERED])
def test_missing_rows_are_computed_by_graphs(
    monkeypatch: pytest.MonkeyPatch, pairs: dict[str, Pair], name: str
) -> None:
    pair, shape, samplings = pairs[name], CHAINS[0], SAMPLINGS["greedy"]
    starts, expected = host_rounds(pair, shape, texts_for(name), samplings)
    rounds = DeviceRounds(pair, shape, PAGE_SIZE, is_recorded=False)
    rounds.runner.capture_prompts()
    monkeypatch.setattr(CatchUp, "_forward", None)
    for number, token_ids in enumerate(starts):
        rounds.add(number, token_ids, samplings[number % len(samplings)])
    trees = rounds.runner.captured(len(starts), RoundSampling.GREEDY).tree.rows
    for round_number in range(NUM_ROUNDS):
        rounds.launch()
        rounds.runner.result()
        grown = trees.token_ids[: len(starts), 1:].tolist()
        assert grown == [list(host[round_number].tree.token_ids) for host in expected]


@pytest.mark.parametrize("shape", [TreeShape(5, 1, 6), TreeShape(1, 1, 2), TREE], ids=str)
def test_first_round_may_read_the_end_of_a_prompt(pairs: dict[str, Pair], shape: TreeShape) -> None:
    check_reading(pairs["eagle3"], shape, is_recorded=False)


# torch says of the mode itself that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", ["eagle3", "mtp", "recurrent", "dflash", "mtp 3"])
def test_a_launch_waits_for_nothing(pairs: dict[str, Pair], name: str) -> None:
    shape = CHAINS[0] if name in LAYERED else TREE
    rounds = DeviceRounds(pairs[name], shape, PAGE_SIZE, is_recorded=False)
    for number, token_ids in enumerate(prompts(3)):
        rounds.add(number, [*token_ids, 1], GREEDY)
    rounds.runner.capture(4, RoundSampling.GREEDY)
    try:
        torch.cuda.set_sync_debug_mode("error")
        rounds.launch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(each.token_ids for each in rounds.runner.result())


@pytest.mark.parametrize("name", [*HEADS, "recurrent"])
def test_lanes_stay_when_the_shape_changes(pairs: dict[str, Pair], name: str) -> None:
    check_changing(pairs[name], is_recorded=False)


@pytest.mark.parametrize("name", ["dflash", *LAYERED])
def test_lanes_of_chains_stay_when_the_shape_changes(pairs: dict[str, Pair], name: str) -> None:
    check_changing(pairs[name], is_recorded=False, changing=CHAINS, name=name)
