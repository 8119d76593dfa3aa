"""Predicted text is verified in long runs, found again after changes, and changes no output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.target.sequence import Prediction
from services.target.verifier import VerificationMode
from shared.errors import InvalidArgument
from shared.generation import Delta
from shared.models.decoder import Decoder
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import (
    Collector,
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    tiny_decoder,
)

PROMPT = [1, 2, 3, 4, 5]
TEXT = tuple(range(100, 180))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _rounds(output: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """Returns the tokens that each round commits, where the target draws `output`."""
    prediction, done, rounds = Prediction(predicted), 0, []
    while done < len(output) and not prediction.is_over:
        tree = prediction.tree()
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(
                zip(tree.parent_indices, tree.token_ids, strict=True)
            )
        }
        node: int | None = None
        count = 1
        while done + count < len(output):
            child = children.get((node, output[done + count - 1]))
            if child is None:
                break
            node, count = child, count + 1
        for token_id in output[done : done + count]:
            prediction.advance(token_id)
        rounds.append(count)
        done += count
    return rounds


def test_the_longer_it_goes_as_predicted_the_longer_the_trees() -> None:
    assert _rounds(TEXT, TEXT) == [17, 33, 30]


@pytest.mark.parametrize(
    "output",
    [
        (*TEXT[:20], 7, *TEXT[21:]),
        (*TEXT[:20], 7, 8, *TEXT[22:]),
        (*TEXT[:20], 7, *TEXT[20:]),
        (*TEXT[:20], *TEXT[24:]),
        (7, *TEXT),
        (*range(30), *TEXT),
    ],
    ids=["replaced", "two replaced", "put in", "left out", "before", "after thirty others"],
)
def test_a_changed_text_is_found_again(output: tuple[int, ...]) -> None:
    rounds = _rounds(output, TEXT)
    assert sum(rounds) == len(output)
    assert max(rounds[-3:]) > 8


def test_a_text_that_does_not_come_is_given_up() -> None:
    prediction = Prediction(TEXT)
    for token_id in range(64):
        assert not prediction.is_over
        prediction.advance(token_id)
    assert not prediction.is_over
    prediction.advance(64)
    assert prediction.is_over


def _serve(
    decoder: Decoder, predicted: Sequence[int], sampling: SamplingParams, **options: object
) -> Collector:
    engine = build_engine(decoder, **options)  # type: ignore[arg-type]
    asked = request(PROMPT, sampling, StopParams(90))
    asked = replace(asked, predicted_token_ids=tuple(predicted))
    other = request([9, 8, 7], sampling, StopParams(40))
    if options.get("mode") is None:
        ScriptedDraft(engine, random_trees(4)).attach()
    return run(engine, [asked, other])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_that_without_a_prediction(decoder: Decoder, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, seed=4)
    plain = _serve(decoder, (), sampling)
    right = plain.token_ids(0)
    wrong = [*right[:30], 3, *right[31:50], 5, 6, *right[50:]]
    for predicted in (right, wrong, [5] * 40):
        found = _serve(decoder, predicted, sampling)
        assert found.token_ids(0) == right
        assert found.token_ids(1) == plain.token_ids(1)
        stats = found.finished(0).stats
        if predicted is right:
            assert stats.num_rounds <= 8
            assert stats.num_accepted >= 80
        if predicted is wrong:
            assert stats.num_accepted / stats.num_rounds > 4


@pytest.mark.parametrize(("num_draft_tokens", "largest"), [(None, 32), (3, 2), (1, 0)])
def test_trees_of_predicted_text_have_no_more_rows_than_requested(
    decoder: Decoder, num_draft_tokens: int | None, largest: int
) -> None:
    asked = request(PROMPT, SamplingParams(seed=4), StopParams(90))
    right = run(build_engine(decoder), [asked]).token_ids(0)
    asked = replace(asked, predicted_token_ids=tuple(right), num_draft_tokens=num_draft_tokens)
    found = run(build_engine(decoder), [asked])
    assert found.token_ids(0) == right
    drafted = [event.num_drafted for event in found.events[0] if isinstance(event, Delta)]
    assert max(drafted) == largest


def test_fresh_randomness_takes_predicted_text_too(decoder: Decoder) -> None:
    greedy = SamplingParams(temperature=0.0)
    right = _serve(decoder, (), greedy).token_ids(0)
    found = _serve(decoder, right, greedy, mode=VerificationMode.POINT_MASS)
    assert found.token_ids(0) == right
    assert found.finished(0).stats.num_rounds <= 8


def test_drafts_take_over_when_the_text_does_not_come(decoder: Decoder) -> None:
    engine = build_engine(decoder, max_context_tokens=200)
    draft = ScriptedDraft(engine, random_trees(4))
    draft.attach()
    asked = replace(
        request(PROMPT, SamplingParams(seed=4), StopParams(150)), predicted_token_ids=(23, 22, 21)
    )
    opened: list[int] = []
    run(engine, [asked], each_step=lambda step: opened.extend(draft.committed))
    assert opened


def test_a_prediction_outside_the_vocabulary_is_refused(decoder: Decoder) -> None:
    limits = build_engine(decoder).limits
    for wrong in ((24,), (1,) * 201):
        with pytest.raises(InvalidArgument, match="prediction"):
            limits.check(replace(request(PROMPT), predicted_token_ids=wrong))
