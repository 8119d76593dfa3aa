"""The device takes the tree that was prepared for how a round ends, and no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from shared.models.decoder import Decoder
from shared.runtime.round_selection import Ending, PreparedTree
from shared.runtime.selection_runner import (
    MAX_TREE_ROWS,
    PLAIN_SHAPE,
    closest_shape,
    covering_shape,
)
from shared.tokens import EMPTY_TREE, TokenTree, TreeShape
from tests.helpers.engines import tiny_decoder
from tests.helpers.selected_rounds import SAMPLINGS, SelectedRounds, plain_answers, play

PROMPTS = ([1, 2, 3, 4, 5], [7], [3] * 13, [11, 3, 8, 8])
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
    rounds = _rounds(decoder, answers)
    play(rounds, random.Random(seed), num_tokens=45)
    assert min(rounds.committed[number] - STARTS[number] for number in range(4)) > 8


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
    assert covering_shape([EMPTY_TREE]) == PLAIN_SHAPE == TreeShape(0, 1, 1)
    assert covering_shape([EMPTY_TREE, chain]) == TreeShape(3, 1, 4)
    assert covering_shape([chain, bushy]) == TreeShape(4, 2, 6)
    assert covering_shape([TokenTree((1, 2), (None, None))]) == TreeShape(2, 2, 4)
    assert covering_shape([TokenTree.chain(range(32))]) is not None
    wanted = TreeShape(3, 1, 4)
    assert closest_shape(wanted, []) == wanted
    assert closest_shape(wanted, [TreeShape(5, 1, 6), TreeShape(4, 2, 6)]) == TreeShape(5, 1, 6)
    assert closest_shape(wanted, [TreeShape(1, 1, 2), TreeShape(7, 1, 8)]) == wanted
    assert closest_shape(TreeShape(2, 2, 4), [TreeShape(5, 1, 6)]) == TreeShape(2, 2, 4)
    assert covering_shape([TokenTree.chain(range(33))]) is None
    assert covering_shape([TokenTree((1,) * MAX_TREE_ROWS, (None,) * MAX_TREE_ROWS)]) is None
