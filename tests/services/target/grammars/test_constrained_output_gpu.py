"""Output under a grammar on a GPU, in float32: drafts, graphs and running ahead change no token."""

from __future__ import annotations

import re

import pytest
import torch

from services.target.requests.request import GenerationRequest
from shared.models.decoder import Decoder
from shared.runtime.graphs import GraphLimits
from shared.tokens import FinishReason, SamplingParams, StopParams
from tests.helpers.engines import (
    Collector,
    Proposal,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    random_trees,
    request,
    run,
    tiny_decoder,
)
from tests.helpers.grammars import EOS, regex, spelled

pytestmark = pytest.mark.gpu
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11])
PATTERN = r"\{(a|b|ab|bc|x){3,9}(0|1|01|12){0,6}\}( ?[xy]{1,3})*"
SAMPLINGS = {"greedy": SamplingParams(temperature=0.0), "seeded": SamplingParams(seed=7)}
GRAPHS = GraphLimits(max_rows=48, max_sequences=8, max_tail_width=24, max_context_tokens=200)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return tiny_decoder(tmp_path_factory.mktemp("decoder"), torch.device("cuda"))


def _run(
    decoder: Decoder,
    requests: list[GenerationRequest],
    propose: Proposal | None = None,
    graph_limits: GraphLimits | None = None,
) -> Collector:
    engine = build_engine(
        decoder, eos_token_ids=frozenset({EOS}), graph_limits=graph_limits, overlaps=True
    )
    if propose is not None:
        ScriptedDraft(engine, propose).attach()
    return run(engine, requests)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("graph_limits", [None, GRAPHS], ids=["eager", "graphs"])
def test_output_matches_and_is_that_of_plain_decoding(
    decoder: Decoder, name: str, graph_limits: GraphLimits | None
) -> None:
    grammar, sampling = regex(PATTERN), SAMPLINGS[name]
    requests = [request(prompt, sampling, StopParams(40), grammar=grammar) for prompt in PROMPTS]
    requests.append(request(PROMPTS[0], sampling))  # one without a grammar, in the same steps
    plain = _run(decoder, requests)
    expected = [plain.token_ids(key) for key in range(len(requests))]
    for key in range(len(PROMPTS)):
        if plain.finished(key).reason is FinishReason.STOP:
            assert re.fullmatch(PATTERN, spelled(expected[key]))
    wholes = [[*prompt, *output] for prompt, output in zip(PROMPTS, expected, strict=False)]
    for propose in (oracle_trees(wholes, 0, 1.0), oracle_trees(wholes, 1, 0.5), random_trees(2)):
        found = _run(decoder, requests, propose, graph_limits)
        assert [found.token_ids(key) for key in range(len(requests))] == expected
