"""Which token may follow: allowed ones, bad words, and the end of thoughts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from services.target.sequence import TokenRules
from shared.errors import InvalidArgument
from shared.models.decoder import Decoder
from shared.tokens import SamplingParams, StopParams, ThinkingBudget
from tests.helpers.engines import ScriptedDraft, build_engine, random_trees, request, run
from tests.helpers.engines import tiny_decoder as tiny

PROMPTS = ([1, 2, 3, 4, 5], [11, 3])
END, START = 20, 21


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny(tmp_path_factory.mktemp("decoder"))


def _outputs(decoder: Decoder, sampling: SamplingParams, *, trees: bool = False) -> list[list[int]]:
    engine = build_engine(decoder)
    if trees:
        ScriptedDraft(engine, random_trees(4)).attach()
    requests = [request(prompt, sampling, StopParams(40)) for prompt in PROMPTS]
    collector = run(engine, requests)
    return [collector.token_ids(key) for key in range(len(requests))]


def _rules(sampling: SamplingParams) -> TokenRules:
    rules = TokenRules.of(sampling)
    assert rules is not None
    return rules


PHRASES = SamplingParams(bad_words=((4,), (5, 6), (6, 5, 6)), seed=3)
THINKING = SamplingParams(thinking=ThinkingBudget(5, END), seed=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(allowed_token_ids=(3, 7, 9), seed=3),
        SamplingParams(bad_words=((12,), (14, 14), (11, 14, 11), (4,), (8, 5)), seed=3),
        THINKING,
        SamplingParams(allowed_token_ids=(5, 6, 7), bad_words=((5, 6), (7,)), seed=3),
        replace(THINKING, bad_words=((5, 6),), frequency_penalty=0.5, top_k=8),
    ],
)
def test_trees_change_nothing(
    decoder: Decoder, sampling: SamplingParams, temperature: float
) -> None:
    sampling = replace(sampling, temperature=temperature)
    plain = _outputs(decoder, sampling)
    assert _outputs(decoder, sampling, trees=True) == plain
    assert plain != _outputs(decoder, SamplingParams(temperature=temperature, seed=3))


def test_only_allowed_tokens_are_drawn(decoder: Decoder) -> None:
    for output in _outputs(decoder, SamplingParams(allowed_token_ids=(3, 7, 9), seed=3)):
        assert set(output) <= {3, 7, 9}


def test_bad_words_do_not_occur(decoder: Decoder) -> None:
    held = replace(PHRASES, temperature=1.5, allowed_token_ids=(4, 5, 6, 7))
    free = _outputs(decoder, replace(held, bad_words=()))
    assert all({4, 5, 6} <= set(output) for output in free)
    for output in _outputs(decoder, held, trees=True):
        assert 4 not in output
        assert (5, 6) not in set(itertools.pairwise(output))
        assert {5, 6} <= set(output)


def test_thoughts_end_after_their_budget(decoder: Decoder) -> None:
    for output in _outputs(decoder, THINKING, trees=True):
        assert output.index(END) <= 5
    for output in _outputs(decoder, replace(THINKING, thinking=ThinkingBudget(0, END))):
        assert output[0] == END


def test_thoughts_that_the_model_opens_are_bounded_from_there() -> None:
    rules = _rules(SamplingParams(thinking=ThinkingBudget(2, END, START)))
    assert rules.forced_after((1, 1, 1)) is None
    assert rules.forced_after((START, 1)) is None
    assert rules.forced_after((START, 1, 1)) == END
    assert rules.forced_after((START, END, 1, 1)) is None
    for token_id in (START, 1):
        rules.advance(token_id)
    assert rules.forced_after((1,)) == END
    rules.advance(END)
    assert rules.is_idle


def test_a_model_that_does_not_think_is_left_alone() -> None:
    rules = _rules(SamplingParams(thinking=ThinkingBudget(2, END, START)))
    for _ in range(16):
        assert not rules.is_idle
        rules.advance(1)
    assert rules.is_idle


def test_a_phrase_may_begin_in_the_output_and_end_in_a_tree() -> None:
    rules = _rules(SamplingParams(bad_words=((1, 2, 3), (8, 9))))
    rules.advance(1)
    assert rules.banned_after(()) == frozenset()
    assert rules.banned_after((2,)) == {3}
    assert rules.banned_after((2, 8)) == {9}
    rules.advance(2)
    assert rules.banned_after(()) == {3}
    assert TokenRules.of(SamplingParams(bad_words=((4,),))) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"bad_words": ((),)},
        {"bad_words": ((1,) * 65,)},
        {"bad_words": ((1,),) * 513},
        {"allowed_token_ids": (1,), "bad_words": ((1,),)},
    ],
)
def test_what_nothing_can_follow_is_refused(wrong: dict[str, tuple[tuple[int, ...], ...]]) -> None:
    with pytest.raises(InvalidArgument, match="bad_words"):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_only_stop_tokens_before_the_minimum_are_refused(decoder: Decoder) -> None:
    stop = StopParams(8, min_output_tokens=2, stop_token_ids=frozenset({3}))
    sampling = SamplingParams(allowed_token_ids=(3,))
    limits = build_engine(decoder).limits
    with pytest.raises(InvalidArgument, match="allowed_token_ids"):
        limits.check(request([1], sampling, stop))
    limits.check(request([1], replace(sampling, allowed_token_ids=(3, 4)), stop))
    with pytest.raises(InvalidArgument, match="bad_words holds token 24"):
        limits.check(request([1], SamplingParams(bad_words=((24,),))))
