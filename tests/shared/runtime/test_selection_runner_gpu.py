"""Selected rounds as CUDA graphs commit what plain decoding does, and wait for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from shared.models.decoder import Decoder
from shared.runtime.round_selection import PreparedTree
from tests.helpers.engines import tiny_decoder
from tests.helpers.selected_rounds import SAMPLINGS, SelectedRounds, plain_answers, play

pytestmark = pytest.mark.gpu
PROMPTS = ([1, 2, 3, 4, 5], [7], [3] * 13, [11, 3, 8, 8])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), torch.device("cuda"))


@pytest.fixture(scope="module")
def answers(decoder: Decoder) -> list[list[int]]:
    return plain_answers(decoder, PROMPTS, SAMPLINGS, 70)


def _rounds(decoder: Decoder, answers: Sequence[Sequence[int]]) -> SelectedRounds:
    rounds = SelectedRounds(decoder, answers)
    for number, prompt in enumerate(PROMPTS):
        rounds.place(number, len(prompt) + 1, SAMPLINGS[number])
    return rounds


@pytest.mark.parametrize("seed", range(6))
def test_trees_of_any_shape_in_any_order_commit_what_plain_decoding_does(
    decoder: Decoder, answers: list[list[int]], seed: int
) -> None:
    play(_rounds(decoder, answers), random.Random(seed), num_tokens=45)


# torch says of the mode itself that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_round_is_prepared_and_launched_without_waiting(
    decoder: Decoder, answers: list[list[int]]
) -> None:
    rounds = _rounds(decoder, answers)

    def launch_two() -> None:
        trees = {number: rounds.right(number, 3) for number in range(4)}
        rounds.launch({n: [PreparedTree(rounds.committed[n], tree)] for n, tree in trees.items()})
        prepared = {}
        for number, tree in trees.items():
            count, ending = rounds.after(number, tree)
            prepared[number] = [PreparedTree(count, rounds.right(number, 3, count), ending)]
        rounds.launch(prepared)

    launch_two()  # captures the graphs
    rounds.result()
    rounds.result()
    try:
        torch.cuda.set_sync_debug_mode("error")
        launch_two()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        assert all(len(each.token_ids) == 4 for each in rounds.result().values())
