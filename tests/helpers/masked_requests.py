"""Requests for which the host computes the token masks of tree rows."""

from __future__ import annotations

from dataclasses import replace

from services.target.requests.request import GenerationRequest
from shared.tokens import SamplingParams, StopParams, ThinkingBudget
from tests.helpers.engines import request
from tests.helpers.grammars import SPELLINGS, regex

_Y = SPELLINGS.index("y")
_GREEDY, _SEEDED = SamplingParams(temperature=0.0), SamplingParams(seed=7)
_TRUNCATED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1)
_PENALISED = SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2)
_BIASED = SamplingParams(seed=5, logit_bias={3: 2.0, 9: -100.0, 11: 1.5})


def masked_requests() -> list[GenerationRequest]:
    """Returns requests with a grammar, bad words or a thinking budget, and one without. The fourth
    has log probabilities; the first four can be done in 30 tokens."""
    thinking = ThinkingBudget(end_token_id=4, max_tokens=5)
    return [
        request([5, 4, 3], _SEEDED, StopParams(30), grammar=regex("(a|b|ab|abc){1,40}")),
        request([1, 2, 3, 4], _PENALISED, StopParams(30), grammar=regex("(x|y|xy|cd)*")),
        request([3] * 21, _GREEDY, StopParams(30), grammar=regex("[abc0-9:,]*")),
        request([8, 8], _SEEDED, StopParams(30), grammar=regex("(ab){3}x{4}"), top_logprobs=2),
        request([2, 9], replace(_SEEDED, bad_words=((3, 4), (7, 7, 7), (12, 1))), StopParams(30)),
        request([6, 1], replace(_SEEDED, thinking=thinking), StopParams(30)),
        request([6, 2], replace(_BIASED, bad_words=((3, 9),)), grammar=regex("[abcd]*")),
        request([11, 3], _TRUNCATED, StopParams(30)),
        # The minimum length forbids the stop token that the grammar requires: the grammar wins.
        request([9, 4], _GREEDY, StopParams(30, 12, frozenset({_Y})), grammar=regex("[ab]y{20}")),
    ]
