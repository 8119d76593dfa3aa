"""The device takes the tree that was prepared for how a round ends, and no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shared.models.decoder import Decoder
from shared.runtime.prepared_trees import MAX_PREPARED, Ending, PreparedTree
from shared.runtime.selection_shapes import MAX_TREE_ROWS, covering_shape
from shared.tokens import EMPTY_TREE, SamplingParams, TokenTree, TreeShape
from tests.helpers.engines import VOCAB_SIZE, tiny_decoder
from tests.helpers.selected_rounds import SelectedRounds, plain_answers

PROMPTS = ([1, 2, 3, 4, 5], [7], [3] * 13, [11, 3, 8, 8])
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SamplingParams(seed=7),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    SamplingParams(temperature=0.7, seed=2**63 + 9),
)
STARTS = [len(prompt) + 1 for prompt in PROMPTS]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def answers(decoder: Decoder) -> list[list[int]]:
    return plain_answers(decoder, PROMPTS, SAMPLINGS, 70)


def _rounds(decoder: Decoder, answers: Sequence[Sequence[int]], count: int = 4) -> SelectedRounds:
    rounds = SelectedRounds(decoder, answers)
    for number in range(count):
        rounds.place(number, STARTS[number], SAMPLINGS[number])
    return rounds


def _sure(rounds: SelectedRounds, number: int, tree: TokenTree) -> PreparedTree:
    return PreparedTree(rounds.committed[number], tree)


def _bushy(
    rounds: SelectedRounds, number: int, start: int, num_nodes: int, source: random.Random
) -> TokenTree:
    """The right chain hidden among wrong nodes, some of which repeat a sibling's token."""
    right, parents, tokens = rounds.answers[number], [], []
    path: int | None = None
    for place in range(start, start + num_nodes):
        for _ in range(source.randrange(3)):
            parents.append(path)
            tokens.append(source.randrange(VOCAB_SIZE))
        parents.append(path)
        tokens.append(right[place])
        path = len(tokens) - 1
    return TokenTree(tuple(tokens), tuple(parents))


@pytest.mark.interpreter
def test_the_tree_for_the_right_ending_is_verified_next(
    decoder: Decoder, answers: list[list[int]]
) -> None:
    rounds = _rounds(decoder, answers)
    trees = {number: rounds.right(number, number) for number in range(4)}
    rounds.launch({number: [_sure(rounds, number, tree)] for number, tree in trees.items()})
    prepared = {}
    for number, tree in trees.items():
        count, ending = rounds.after(number, tree)
        wrong = PreparedTree(count, TokenTree.chain([0, 0]), replace(ending, row=ending.row + 1))
        other = replace(wrong, ending=replace(ending, bonus_token_id=ending.bonus_token_id + 1))
        right = PreparedTree(count, rounds.right(number, 3, count), ending)
        prepared[number] = [wrong, other, right]
    rounds.launch(prepared)  # before the first round is read
    assert rounds.runner.num_pending == 2
    first, second = rounds.result(), rounds.result()
    assert [len(first[number].token_ids) for number in range(4)] == [1, 2, 3, 4]
    assert [each.num_drafted for each in second.values()] == [3] * 4
    assert [len(each.token_ids) for each in second.values()] == [4] * 4


@pytest.mark.interpreter
def test_a_slot_that_nothing_fits_sits_out_and_goes_on_later(
    decoder: Decoder, answers: list[list[int]]
) -> None:
    rounds = _rounds(decoder, answers)
    trees = {number: rounds.right(number, 2) for number in range(4)}
    rounds.launch({number: [_sure(rounds, number, tree)] for number, tree in trees.items()})
    count, ending = rounds.after(0, trees[0])
    next_tree = rounds.right(0, 3, count)
    stale, _ = rounds.after(2, trees[2])
    rounds.launch(
        {
            0: [PreparedTree(count, next_tree, ending)],
            # Made for a sequence one token shorter; for another ending; not at all.
            2: [PreparedTree(stale - 1, EMPTY_TREE)],
            1: [PreparedTree(count, next_tree, Ending(0, 0))],
        }
    )
    rounds.result()
    second = rounds.result()
    assert [len(second[number].token_ids) for number in range(4)] == [4, 0, 0, 0]
    for _ in range(3):  # as if nothing had been in between
        rounds.launch(
            {number: [_sure(rounds, number, rounds.right(number, 4))] for number in range(4)}
        )
        assert [len(each.token_ids) for each in rounds.result().values()] == [5] * 4


def test_the_host_can_ask_whether_anyone_takes_part_before_it_launches(
    decoder: Decoder, answers: list[list[int]]
) -> None:
    rounds = _rounds(decoder, answers, 2)
    tree = rounds.right(0, 2)
    rounds.launch({0: [_sure(rounds, 0, tree)]})
    count, ending = rounds.after(0, tree)
    wrong = replace(ending, bonus_token_id=ending.bonus_token_id + 1)
    rounds.prepare({0: [PreparedTree(count, tree, wrong)]})
    assert not rounds.runner.has_chosen()
    rounds.prepare({0: [PreparedTree(count, rounds.right(0, 3, count), ending)]})
    assert rounds.runner.has_chosen()
    rounds.runner.launch()
    assert len(rounds.result()[0].token_ids) == 3
    assert len(rounds.result()[0].token_ids) == 4


@pytest.mark.parametrize("seed", range(6))
def test_trees_of_any_shape_in_any_order_commit_what_plain_decoding_does(
    decoder: Decoder, answers: list[list[int]], seed: int
) -> None:
    """Shapes change from round to round, and results are read late or at once."""
    source = random.Random(seed)
    rounds = _rounds(decoder, answers)
    while max(rounds.committed[n] - STARTS[n] for n in range(4)) < 45:
        in_flight = {}
        for number in range(4):
            if source.random() < 0.8:
                size = source.randrange(8)
                in_flight[number] = _bushy(rounds, number, rounds.committed[number], size, source)
        if not in_flight:
            continue
        rounds.launch({n: [_sure(rounds, n, tree)] for n, tree in in_flight.items()})
        if source.random() < 0.5:
            rounds.result()
            continue
        prepared = {}
        for number, tree in in_flight.items():
            count, ending = rounds.after(number, tree)
            right = _bushy(rounds, number, count, source.randrange(5), source)
            others = [
                PreparedTree(count, EMPTY_TREE, Ending(source.randrange(9), VOCAB_SIZE))
                for _ in range(source.randrange(MAX_PREPARED))
            ]
            prepared[number] = [*others, PreparedTree(count, right, ending)]
        rounds.launch(prepared)
        rounds.result()
        second = rounds.result()
        assert {n for n, each in second.items() if each.token_ids} == set(in_flight)


def test_sequences_come_and_go(decoder: Decoder, answers: list[list[int]]) -> None:
    rounds = _rounds(decoder, answers, 3)
    rounds.launch({n: [_sure(rounds, n, rounds.right(n, 3))] for n in range(3)})
    rounds.runner.remove([1])
    found = rounds.result()
    assert len(found[1].token_ids) == 4
    rounds.place(3, STARTS[3], SAMPLINGS[3])
    assert rounds.runner.sequence_ids == {0, 2, 3}
    rounds.launch({n: [_sure(rounds, n, rounds.right(n, 2))] for n in (0, 2, 3)})
    assert all(len(each.token_ids) == 3 for each in rounds.result().values())
    rounds.place(1, rounds.committed[1], SAMPLINGS[1])
    rounds.launch({1: [_sure(rounds, 1, rounds.right(1, 5))]})
    found = rounds.result()
    assert {n for n, each in found.items() if each.token_ids} == {1}


def test_shapes_cover_their_trees() -> None:
    chain, bushy = TokenTree.chain([1, 2, 3]), TokenTree((1, 2, 3, 4, 5), (None, None, 0, 2, 3))
    assert covering_shape([EMPTY_TREE]) == TreeShape(1, 1, 2)
    assert covering_shape([EMPTY_TREE, chain]) == TreeShape(3, 1, 4)
    assert covering_shape([chain, bushy]) == TreeShape(4, 2, 6)
    assert covering_shape([TokenTree((1, 2), (None, None))]) == TreeShape(2, 2, 4)
    assert covering_shape([TokenTree.chain(range(32))]) is not None
    assert covering_shape([TokenTree.chain(range(33))]) is None
    assert covering_shape([TokenTree((1,) * MAX_TREE_ROWS, (None,) * MAX_TREE_ROWS)]) is None
