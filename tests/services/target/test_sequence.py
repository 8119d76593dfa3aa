"""What a commit keeps, and when a sequence ends."""

from __future__ import annotations

import pytest

from services.target.requests.request import GenerationRequest, ModelLimits
from services.target.sequence import Sequence
from shared.errors import InvalidArgument
from shared.tokens import FinishReason, SamplingParams, StopParams

LIMITS = ModelLimits(
    vocab_size=100, max_context_tokens=20, max_kv_tokens=1000, eos_token_ids=frozenset({9})
)


def _request(stop: StopParams, prompt: tuple[int, ...] = (1, 2, 3)) -> GenerationRequest:
    return GenerationRequest("r", prompt, SamplingParams(), stop, arrival_s=0.0)


def _sequence(stop: StopParams) -> Sequence:
    return Sequence(1, _request(stop), LIMITS)


def test_commit_appends_every_token_of_a_path() -> None:
    sequence = _sequence(StopParams(10))
    assert sequence.commit([4, 5]) == (4, 5)
    assert sequence.output_token_ids == [4, 5]
    assert sequence.round == 1
    assert sequence.finish_reason is None


def test_commit_ends_at_the_first_stop_token_inside_a_path() -> None:
    sequence = _sequence(StopParams(10, stop_token_ids=frozenset({5})))
    assert sequence.commit([4, 5, 6]) == (4, 5)
    assert sequence.finish_reason is FinishReason.STOP
    assert sequence.stop_token_id == 5


def test_model_end_token_ends_unless_ignored() -> None:
    ending, going_on = _sequence(StopParams(10)), _sequence(StopParams(10, ignore_eos=True))
    ending.commit([9])
    going_on.commit([9])
    assert ending.finish_reason is FinishReason.STOP
    assert going_on.finish_reason is None


def test_commit_ends_at_the_output_limit_inside_a_path() -> None:
    sequence = _sequence(StopParams(2))
    assert sequence.commit([4, 5, 6]) == (4, 5)
    assert sequence.finish_reason is FinishReason.LENGTH


def test_stop_token_at_the_limit_counts_as_stop() -> None:
    sequence = _sequence(StopParams(2))
    sequence.commit([4, 9])
    assert sequence.finish_reason is FinishReason.STOP


def test_output_limit_is_clamped_to_the_context() -> None:
    assert _sequence(StopParams(500)).max_output_tokens == 17


def test_stop_tokens_are_banned_until_the_minimum_at_each_depth() -> None:
    sequence = _sequence(StopParams(10, min_output_tokens=3, stop_token_ids=frozenset({5})))
    sequence.commit([4])
    assert sequence.banned_token_ids(0) == {5, 9}
    assert sequence.banned_token_ids(1) == {5, 9}
    assert sequence.banned_token_ids(2) == frozenset()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "no tokens"),
        (tuple(range(20)), "prompt has 20 tokens; it may have 19"),
        ((1, 100), r"token 100; ids must be in \[0, 100\)"),
        ((1, -3), "token -3"),
    ],
)
def test_prompt_that_cannot_be_served_is_named(prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        LIMITS.check(_request(StopParams(1), prompt))


def test_stop_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(InvalidArgument, match="stop_token_ids holds token 100; ids must be in"):
        LIMITS.check(_request(StopParams(1, stop_token_ids=frozenset({100}))))
