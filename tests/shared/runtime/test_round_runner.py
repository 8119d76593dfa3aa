"""Rounds on the device equal rounds through the host, node by node and token by token."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.runtime import round_head
from shared.runtime.round_state import SequenceRound
from shared.tokens import TreeShape
from tests.helpers.device_rounds import DeviceRounds, Pair, token_tree
from tests.helpers.host_rounds import HostRound
from tests.helpers.kernel_device import some_interpreted
from tests.helpers.round_cases import (
    CHAINS,
    GREEDY,
    HEADS,
    LAYERED,
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

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return load_pairs(tmp_path_factory, CPU)


def _assert_same(found: SequenceRound, expected: HostRound) -> None:
    assert found.token_ids == expected.token_ids
    assert found.num_drafted == len(expected.tree)


SMALL = TreeShape(2, 2, 6)  # the interpreter takes its time
CASES = [
    # Each shape greedily or mixed, and drawn, whole or cut.
    *(
        ("eagle3", shape, sampling)
        for number, shape in enumerate(SHAPES)
        for sampling in (("greedy", "cut"), ("mixed", "sampled"))[number % 2]
    ),
    ("eagle3", SMALL, "mixed"),
    *((head, TreeShape(5, 1, 6), "greedy") for head in ("eagle", "eagle3.1")),
    *((head, TREE, "mixed") for head in ("eagle", "eagle3.1", "recurrent")),
    *(("recurrent", shape, "sampled") for shape in (SMALL, TreeShape(5, 1, 6))),
    *(("mtp", shape, "mixed") for shape in (TREE, TreeShape(5, 1, 6))),
    *(("mtp mimo", shape, "sampled") for shape in (SMALL, TreeShape(3, 1, 4))),
    *(
        (name, shape, kind)
        for name in ("dflash", *LAYERED)
        for shape in CHAINS
        for kind in ("greedy", "sampled")
    ),
]


# What the fused kernels do with a chain and with a tree.
INTERPRETED = [
    ("eagle3", TreeShape(1, 1, 2), "cut"),
    ("eagle3", SMALL, "mixed"),
    ("recurrent", SMALL, "sampled"),
    ("mtp mimo", SMALL, "sampled"),
    ("dflash", CHAINS[1], "sampled"),
    ("mtp 2", CHAINS[1], "sampled"),
]


@pytest.mark.parametrize(
    ("name", "shape", "sampling"),
    some_interpreted(CASES, INTERPRETED),
    ids=str,
)
def test_rounds_equal_those_of_the_host(
    pairs: dict[str, Pair], name: str, shape: TreeShape, sampling: str
) -> None:
    pair, samplings = pairs[name], SAMPLINGS[sampling]
    texts = texts_for(name)[: 2 if IS_INTERPRETING else 4]
    starts, expected = host_rounds(pair, shape, texts, samplings)
    rounds = DeviceRounds(pair, shape, PAGE_SIZE)
    for number, token_ids in enumerate(starts):
        rounds.add(number, token_ids, samplings[number % len(samplings)])
    for index in range(NUM_ROUNDS):
        rounds.launch()
        tree = rounds.trees[-1]
        for number, found in enumerate(rounds.runner.result()):
            assert found.sequence_id == number
            host = expected[number][index].tree
            assert token_tree(tree, number).token_ids == host.token_ids
            assert token_tree(tree, number).parent_indices == host.parent_indices
            _assert_same(found, expected[number][index])


@pytest.mark.parametrize("name", some_interpreted([*HEADS, "recurrent"], ["eagle3"]))
def test_lanes_stay_when_the_shape_changes(pairs: dict[str, Pair], name: str) -> None:
    check_changing(pairs[name], is_recorded=not IS_INTERPRETING)


@pytest.mark.parametrize("name", some_interpreted(["dflash", *LAYERED], ["mtp 3"]))
def test_lanes_of_chains_stay_when_the_shape_changes(pairs: dict[str, Pair], name: str) -> None:
    check_changing(pairs[name], is_recorded=not IS_INTERPRETING, changing=CHAINS, name=name)


@pytest.mark.parametrize(
    ("name", "shape"), [("dflash", TREE), *itertools.product(LAYERED, CHAINS)], ids=str
)
def test_trees_that_are_not_the_hosts_change_no_token(
    pairs: dict[str, Pair], name: str, shape: TreeShape
) -> None:
    """Of blocks, siblings are nodes of one position. The host has no tree for a text that is too
    short for the deepest layer."""
    pair = pairs[name]
    starts, expected = host_rounds(pair, shape, prompts(4), SAMPLINGS["mixed"], num_rounds=8)
    rounds = DeviceRounds(pair, shape, PAGE_SIZE)
    samplings = SAMPLINGS["mixed"]
    for number, token_ids in enumerate(starts):
        rounds.add(number, token_ids, samplings[number % len(samplings)])
    tokens: list[list[int]] = [[] for _ in starts]
    for _ in range(NUM_ROUNDS):
        rounds.launch()
        for found in rounds.runner.result():
            tokens[found.sequence_id] += found.token_ids
    for own, host in zip(tokens, expected, strict=True):
        committed = [token for each in host for token in each.token_ids]
        shortest = min(len(committed), len(own))
        assert own[:shortest] == committed[:shortest]
    if shape.topk > 1:
        assert (rounds.trees[-1].parents == 0).sum(dim=1).min() > 2


def test_paths_of_several_nodes_move(pairs: dict[str, Pair]) -> None:
    """The comparison above covers what it should: paths that are no prefix of their tree."""
    accepted = [
        each.accepted
        for samplings in (SAMPLINGS["sampled"], SAMPLINGS["cut"])
        for rounds in host_rounds(pairs["eagle3"], TreeShape(5, 4, 16), prompts(4), samplings)[1]
        for each in rounds
    ]
    assert max(map(len, accepted)) >= 3
    assert any(len(path) >= 2 and path != tuple(range(len(path))) for path in accepted)


def test_results_may_be_read_one_round_late(pairs: dict[str, Pair]) -> None:
    pair = pairs["eagle3"]
    starts, expected = host_rounds(pair, TREE, prompts(3), [GREEDY])
    rounds = DeviceRounds(pair, TREE, PAGE_SIZE)
    for number, token_ids in enumerate(starts):
        rounds.add(number, token_ids, GREEDY)
    rounds.launch()
    for index in range(NUM_ROUNDS):
        rounds.launch()
        assert rounds.runner.num_pending == 2
        for number, found in enumerate(rounds.runner.result()):
            _assert_same(found, expected[number][index])


@pytest.mark.parametrize(
    ("name", "shape", "num_chunk_rows"),
    [
        *(("eagle3", TREE, count) for count in (1, 7, 2048)),
        *(("mtp 3", CHAINS[0], count) for count in (4, 7, 2048)),
    ],
    ids=str,
)
def test_sequences_that_come_together_are_drafted_for_as_alone(
    pairs: dict[str, Pair],
    name: str,
    shape: TreeShape,
    num_chunk_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their heads catch up in common forwards, which may end inside of a sequence."""
    monkeypatch.setattr(round_head, "MAX_PROMPT_ROWS", num_chunk_rows)
    pair, samplings = pairs[name], SAMPLINGS["mixed"]
    starts, expected = host_rounds(pair, shape, texts_for(name), samplings)
    rounds = DeviceRounds(pair, shape, PAGE_SIZE)
    rounds.runner.place(
        [
            rounds.new_lane(number, token_ids, samplings[number % len(samplings)])
            for number, token_ids in enumerate(starts)
        ]
    )
    for index in range(NUM_ROUNDS):
        rounds.launch()
        for number, found in enumerate(rounds.runner.result()):
            host = expected[number][index].tree
            assert token_tree(rounds.trees[-1], number).token_ids == host.token_ids
            _assert_same(found, expected[number][index])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *itertools.product(HEADS, [TreeShape(5, 1, 6), TreeShape(1, 1, 2), TREE]),
        *itertools.product(["dflash"], [*CHAINS, TREE]),
        *itertools.product(LAYERED, CHAINS),
    ],
    ids=str,
)
def test_first_round_may_read_the_end_of_a_prompt(
    pairs: dict[str, Pair], name: str, shape: TreeShape
) -> None:
    """It draws what comes next, and the rounds behind it are those of a prompt read before."""
    check_reading(pairs[name], shape, is_recorded=True)


def test_sequences_that_come_behind_a_reading_one_leave_it_its_slots(
    pairs: dict[str, Pair],
) -> None:
    short, _, _, even = prompts(4)
    together = DeviceRounds(pairs["eagle3"], TREE, PAGE_SIZE, max_sequences=40)
    apart = DeviceRounds(pairs["eagle3"], TREE, PAGE_SIZE, max_sequences=40)
    for rounds, turns in ((together, ((0, 1),)), (apart, ((0,), (1,)))):
        new_lanes = [
            rounds.new_lane(0, even, GREEDY, num_computed=1),
            rounds.new_lane(1, short, GREEDY, num_computed=1),
        ]
        for turn in turns:
            rounds.runner.place([new_lanes[number] for number in turn])
    assert apart.runner.num_taken == together.runner.num_taken > 2
    for _ in range(3):
        together.launch()
        apart.launch()
        assert together.runner.result() == apart.runner.result()


def test_end_of_a_prompt_is_forgotten_with_its_sequence(pairs: dict[str, Pair]) -> None:
    rounds = DeviceRounds(pairs["eagle3"], TREE, PAGE_SIZE, max_sequences=20)
    text = prompts(1)[0]
    rounds.add(0, text, GREEDY)
    rounds.runner.place([rounds.new_lane(1, text, GREEDY, num_computed=1)])
    rounds.remove(1)
    assert rounds.runner.num_slots == 1
    rounds.runner.place([rounds.new_lane(2, text, GREEDY, num_computed=1)])
    rounds.launch()
    rounds.remove(2)
    rounds.launch()
    assert [each.sequence_id for each in rounds.runner.result()] == [0, 2]
    assert [each.sequence_id for each in rounds.runner.result()] == [0]


def test_pages_that_no_round_reaches_are_left_out(pairs: dict[str, Pair]) -> None:
    """As of a sequence that had larger trees before."""
    pair, shape = pairs["eagle3"], TreeShape(1, 1, 2)
    starts, expected = host_rounds(pair, shape, prompts(2), [GREEDY])
    rounds = DeviceRounds(pair, shape, PAGE_SIZE)
    spare = list(range(1, 60))
    first, second = (
        rounds.new_lane(number, token_ids, GREEDY) for number, token_ids in enumerate(starts)
    )
    many = replace(first, pages=[*first.pages, *spare], head_pages=[*first.head_pages, *spare])
    rounds.runner.place([many, second])
    rounds.runner.set_pages(1, [*second.pages, *spare], [*second.head_pages, *spare])
    rounds.runner.launch()
    for number, found in enumerate(rounds.runner.result()):
        _assert_same(found, expected[number][0])


def test_sequences_come_and_go(pairs: dict[str, Pair]) -> None:
    """One leaves with a round under way, another takes its slot, a third comes back."""
    pair = pairs["eagle3"]
    samplings = SAMPLINGS["mixed"]
    starts, expected = host_rounds(pair, TREE, prompts(4), samplings, num_rounds=5)
    texts = [list(start) for start in starts]
    done = [0, 0, 0, 0]
    rounds = DeviceRounds(pair, TREE, PAGE_SIZE, max_sequences=3)

    def add(number: int, num_head_rows: int = 0) -> None:
        sampling = samplings[number % len(samplings)]
        rounds.add(number, texts[number], sampling, num_head_rows=num_head_rows)

    def take_in() -> None:
        for found in rounds.runner.result():
            number = found.sequence_id
            if number in rounds.runner.sequence_ids:
                _assert_same(found, expected[number][done[number]])
                texts[number] += found.token_ids
                done[number] += 1

    for number in range(3):
        add(number)
    rounds.launch()
    take_in()
    rounds.launch()
    rounds.remove(1)
    add(3)
    rounds.launch()
    take_in()
    take_in()
    rounds.remove(0)
    add(1, num_head_rows=len(starts[1]) - 2)
    rounds.launch()
    take_in()
    assert done == [3, 2, 4, 2]
    rounds.remove(1)
    add(0)
    rounds.launch()
    take_in()
    assert done == [4, 2, 5, 3]
