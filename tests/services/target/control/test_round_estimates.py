"""What is learnt of rounds on the device: their acceptance and their times."""

from __future__ import annotations

import pytest

from services.target.control.acceptance import FIRST_RATE
from services.target.control.round_acceptance import RoundAcceptance
from services.target.control.round_times import RoundSize, RoundTimes
from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.rounds.round_meter import RoundMeter
from services.target.sequence import Sequence
from shared.tokens import SamplingParams, StopParams, TreeShape

TREE, CHAIN, SHORT = TreeShape(3, 4, 13), TreeShape(3, 1, 4), TreeShape(1, 1, 2)
SIZE, OTHER_KIND = RoundSize(4, 0), RoundSize(4, 1)
LIMITS = ModelLimits(100, 1000, 1000, frozenset())


def _sequence(number: int, temperature: float = 0.0) -> Sequence:
    sampling = SamplingParams(temperature=temperature)
    request = GenerationRequest("r", (1,), sampling, StopParams(100), 0.0)
    return Sequence.of(number, request, LIMITS)


def _learnt(shape: TreeShape, counts: list[int], num_rounds: int = 60) -> RoundAcceptance:
    """Of one sequence a count, round after round."""
    acceptance = RoundAcceptance(0.9)
    sequences = [_sequence(number) for number in range(len(counts))]
    for _ in range(num_rounds):
        acceptance.observe(shape, list(zip(sequences, counts, strict=True)))
    return acceptance


def test_what_was_never_tried_promises_much() -> None:
    rate = FIRST_RATE
    found = RoundAcceptance(0.9).tokens(_sequence(0), [TREE, SHORT])
    assert found == pytest.approx([1 + rate + rate**2 + rate**3, 1 + rate])


def test_each_sequence_has_its_own_rates_and_newcomers_those_of_all() -> None:
    acceptance = _learnt(CHAIN, [3, 0])
    lucky, unlucky, new = (acceptance.tokens(_sequence(number), [CHAIN])[0] for number in (0, 1, 9))
    assert lucky > 3.0 > new > 2.0 > unlucky


def test_chains_of_any_depth_share_their_levels() -> None:
    short, deep = _learnt(CHAIN, [1]).tokens(_sequence(0), [SHORT, CHAIN])
    assert short == pytest.approx(2.0, abs=0.05)
    assert deep == pytest.approx(2.0, abs=0.1), "the second level always fails"


def test_chains_that_were_not_tried_promise_what_trees_do() -> None:
    tree, chain = _learnt(TREE, [0]).tokens(_sequence(5), [TREE, CHAIN])
    assert tree == pytest.approx(chain)
    assert tree < 1.2


def test_trees_that_were_not_tried_are_not_judged_by_chains() -> None:
    tree, chain = _learnt(CHAIN, [0]).tokens(_sequence(5), [TREE, CHAIN])
    assert chain < 1.2
    assert tree == pytest.approx(RoundAcceptance(0.9).tokens(_sequence(5), [TREE])[0])


def test_temperatures_are_apart() -> None:
    acceptance = _learnt(CHAIN, [0])
    [hot] = acceptance.tokens(_sequence(5, temperature=1.0), [CHAIN])
    assert hot == pytest.approx(RoundAcceptance(0.9).tokens(_sequence(5), [CHAIN])[0])


def test_an_ended_sequence_is_forgotten_and_a_change_is_followed() -> None:
    acceptance, sequence = _learnt(CHAIN, [3]), _sequence(0)
    before = acceptance.tokens(sequence, [CHAIN])[0]
    for _ in range(30):
        acceptance.observe(CHAIN, [(sequence, 0)])
    [after] = acceptance.tokens(sequence, [CHAIN])
    assert before > 3.5
    assert after < 1.7
    acceptance.forget(sequence)
    assert acceptance.tokens(sequence, [CHAIN]) == acceptance.tokens(_sequence(7), [CHAIN])


def test_rounds_are_known_by_shape_size_and_kind_after_a_few() -> None:
    times = RoundTimes()
    for count in range(3):
        assert not times.is_known(TREE, SIZE), count
        times.observe(TREE, SIZE, 0.01)
    assert times.is_known(TREE, SIZE)
    assert times.round_s(TREE, SIZE) == pytest.approx(0.01)
    assert not times.is_known(TREE, OTHER_KIND)
    assert not times.is_known(CHAIN, SIZE)
    assert times.round_s(CHAIN, SIZE) == 0.0
    assert times.measured() == {(TREE, 4): pytest.approx(0.01)}


def test_the_beginning_of_a_run_is_spread_over_it() -> None:
    times = RoundTimes()
    for _ in range(3):
        times.observe(TREE, SIZE, 0.01)
    times.observe_entry(TREE, SIZE, 0.05)
    assert times.entry_s(SIZE, 1) == 0.0, "nobody knows how long runs are"
    times.observe_run(8)
    assert times.entry_s(SIZE, 1) == pytest.approx(0.04 / 8)
    assert times.entry_s(SIZE, 80) == pytest.approx(0.04 / 80)
    assert times.entry_s(RoundSize(8, 0), 1) == 0.0


def test_where_runs_are_short_first_rounds_count() -> None:
    times = RoundTimes()
    for _ in range(3):
        times.observe_entry(TREE, SIZE, 0.05)
    assert times.round_s(TREE, SIZE) == pytest.approx(0.05)


def test_the_meter_measures_from_result_to_result() -> None:
    times = RoundTimes()
    meter = RoundMeter(times)
    for start_s in (0.0, 100.0, 200.0):
        meter.enter(start_s)
        for count in range(1, 5):
            meter.read(TREE, SIZE, start_s + 5.0 + 0.01 * count)
        meter.interrupt()
    assert times.round_s(TREE, SIZE) == pytest.approx(0.01)
    times.observe_run(1)
    assert times.entry_s(SIZE, 1) == pytest.approx(5.0)


def test_a_round_after_an_interruption_is_not_measured() -> None:
    """As when graphs are captured: neither that round nor the one before it tells anything."""
    times = RoundTimes()
    meter = RoundMeter(times)
    meter.enter(0.0)
    meter.interrupt()
    meter.read(TREE, SIZE, 3.0)
    assert times.measured() == {}
    meter.read(TREE, SIZE, 3.01)
    assert times.measured() == {(TREE, 4): pytest.approx(0.01)}
