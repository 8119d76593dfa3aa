"""Log probabilities of tokens that a request names: at every position, whoever draws there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.target.requests.request import GenerationRequest
from services.target.rounds.lanes import can_be_round
from services.target.verifier import VerificationMode
from shared.errors import InvalidArgument
from shared.generation import PromptScoring
from shared.models.decoder import Decoder
from shared.tokens import SamplingParams, StopParams, TokenLogprobs
from tests.helpers.engines import (
    VOCAB_SIZE,
    ScriptedDraft,
    build_engine,
    random_trees,
    request,
    run,
    tiny_decoder,
)

NAMED = (3, 17, 9)
NUM_TOP = 20


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"))


def _request(num_top: int, named: tuple[int, ...]) -> GenerationRequest:
    asked = request(
        [1, 2, 3, 4],
        SamplingParams(temperature=0.0),
        StopParams(12),
        top_logprobs=num_top,
        prompt_scoring=PromptScoring(0, num_top),
    )
    return replace(asked, logprob_token_ids=named)


def _check(found: TokenLogprobs, num_top: int) -> None:
    """Checks those that are among the likeliest, too."""
    named = found.top[num_top:]
    assert [token_id for token_id, _ in named] == list(NAMED)
    likeliest = dict(found.top[:num_top])
    for token_id, value in named:
        assert likeliest.get(token_id, value) == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize("mode", [VerificationMode.COUPLED, VerificationMode.POINT_MASS])
def test_named_tokens_stand_behind_the_likeliest(decoder: Decoder, mode: VerificationMode) -> None:
    engine = build_engine(decoder, mode=mode)
    ScriptedDraft(engine, random_trees(4)).attach()
    requests = [_request(NUM_TOP, NAMED), _request(2, ()), _request(0, NAMED)]
    collector = run(engine, requests)
    for key, num_top in ((0, NUM_TOP), (2, 0)):
        for found in (*collector.logprobs(key), *collector.prompt_scores(key).values()):
            _check(found, num_top)
    assert all(len(found.top) == 2 for found in collector.logprobs(1))
    assert any(set(NAMED) & {i for i, _ in each.top[:NUM_TOP]} for each in collector.logprobs(0))


def test_no_lane_tells_of_named_tokens(decoder: Decoder) -> None:
    assert can_be_round(_request(1, ()), "EAGLE3")
    assert not can_be_round(_request(1, NAMED), "EAGLE3")


@pytest.mark.parametrize("wrong", [(VOCAB_SIZE,), (1,) * 129])
def test_wrong_names_are_refused(decoder: Decoder, wrong: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="logprob_token_ids"):
        build_engine(decoder).limits.check(_request(1, wrong))
