"""Targets that share a draft get equal shares of it, whatever they ask for."""

from __future__ import annotations

from collections import Counter

from services.draft.rounds import FairShares
from services.draft.sequence import DraftSequence, SequenceKey
from shared.tokens import SamplingParams


def _sequence(link: int, number: int, num_tokens: int = 10) -> DraftSequence:
    return DraftSequence(
        SequenceKey(link, number),
        [1] * num_tokens,
        num_tokens,
        SamplingParams(),
        0,
        mirrors_noise=True,
        vocab_size=100,
        max_nodes=8,
    )


def _cost(sequence: DraftSequence) -> int:
    return sequence.num_tokens


def test_a_busy_link_does_not_starve_a_quiet_one() -> None:
    share = FairShares()
    served: Counter[int] = Counter()
    for _ in range(50):
        waiting = [_sequence(1, number) for number in range(100)] + [_sequence(2, 0)]
        served.update(each.key.link for each in share.pick(waiting, _cost, 20))
    assert served[2] == 50
    assert served[1] == 50


def test_shares_are_of_tokens_not_of_sequences() -> None:
    share = FairShares()
    tokens: Counter[int] = Counter()
    for _ in range(200):
        waiting = [_sequence(1, n, 30) for n in range(9)] + [_sequence(2, n, 5) for n in range(90)]
        for each in share.pick(waiting, _cost, 40):
            tokens[each.key.link] += _cost(each)
    assert abs(tokens[1] / tokens[2] - 1) < 0.1


def test_all_is_taken_where_there_is_room_and_order_stays_within_a_link() -> None:
    waiting = [_sequence(1, 0), _sequence(2, 0), _sequence(1, 1), _sequence(2, 1)]
    picked = FairShares().pick(waiting, _cost, 1_000)
    assert len(picked) == 4
    for link in (1, 2):
        assert [each.key.sequence_id for each in picked if each.key.link == link] == [0, 1]


def test_a_link_without_work_saves_nothing_up() -> None:
    share = FairShares()
    for _ in range(20):
        share.pick([_sequence(1, n) for n in range(5)] + [_sequence(2, 0)], _cost, 1_000)
    waiting = [_sequence(1, n) for n in range(20)] + [_sequence(2, n) for n in range(20)]
    picked = Counter(each.key.link for each in share.pick(waiting, _cost, 100))
    assert picked == {1: 5, 2: 5}


def test_one_link_alone_gets_the_budget() -> None:
    picked = FairShares().pick([_sequence(1, n) for n in range(9)], _cost, 35)
    assert len(picked) == 4
    assert FairShares().pick([], _cost, 35) == []
