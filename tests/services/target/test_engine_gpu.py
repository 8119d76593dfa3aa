"""The losslessness ladder on a GPU, in float32: drafts change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shared.models.decoder import Decoder
from shared.runtime.graphs import GraphLimits
from shared.tokens import SamplingParams, StopParams
from tests.helpers.engines import (
    Collector,
    Proposal,
    ScriptedDraft,
    build_engine,
    oracle_trees,
    random_trees,
    recurrent_decoder,
    request,
    run,
    settle,
    shuffled_drops,
    tiny_decoder,
)

pytestmark = pytest.mark.gpu
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11], [3] * 40)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(seed=7),
    "truncated": SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
    "penalised": SamplingParams(frequency_penalty=0.7, repetition_penalty=1.3, seed=2),
}


WITHOUT_STATES = pytest.mark.parametrize("decoder", [tiny_decoder], indirect=True)


@pytest.fixture(scope="module", params=[tiny_decoder, recurrent_decoder])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    made: Decoder = request.param(tmp_path_factory.mktemp("decoder"), torch.device("cuda"))
    return made


GRAPHS = GraphLimits(max_rows=48, max_sequences=8, max_tail_width=24, max_context_tokens=200)


def _outputs(
    decoder: Decoder,
    sampling: SamplingParams,
    propose: Proposal | None = None,
    seed: int = 0,
    graph_limits: GraphLimits | None = None,
    overlaps: bool = True,
) -> list[list[int]]:
    engine = build_engine(decoder, graph_limits=graph_limits, overlaps=overlaps)
    if propose is not None:
        ScriptedDraft(engine, propose, disturb=shuffled_drops(seed)).attach()
    requests = [
        request(prompt, replace(sampling, seed=sampling.seed + i))
        for i, prompt in enumerate(PROMPTS)
    ]
    collector = run(engine, requests)
    return [collector.token_ids(key) for key in range(len(PROMPTS))]


def _wholes(outputs: Sequence[Sequence[int]]) -> list[list[int]]:
    return [[*prompt, *output] for prompt, output in zip(PROMPTS, outputs, strict=True)]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_output_is_that_of_plain_decoding_for_every_draft(decoder: Decoder, name: str) -> None:
    sampling = SAMPLINGS[name]
    expected = _outputs(decoder, sampling)
    assert len({tuple(output) for output in expected}) == len(PROMPTS)
    for seed, quality in enumerate((1.0, 0.5)):
        script = oracle_trees(_wholes(expected), seed, quality=quality)
        assert _outputs(decoder, sampling, script, seed) == expected
    assert _outputs(decoder, sampling, random_trees(2)) == expected


@pytest.mark.parametrize("name", SAMPLINGS)
def test_graphs_change_nothing(decoder: Decoder, name: str) -> None:
    sampling = SAMPLINGS[name]
    expected = _outputs(decoder, sampling)
    assert _outputs(decoder, sampling, graph_limits=GRAPHS) == expected
    script = oracle_trees(_wholes(expected), 3, quality=0.7)
    assert _outputs(decoder, sampling, script, seed=3, graph_limits=GRAPHS) == expected


@pytest.mark.parametrize("name", SAMPLINGS)
def test_running_ahead_changes_nothing(decoder: Decoder, name: str) -> None:
    sampling = SAMPLINGS[name]
    expected = _outputs(decoder, sampling, overlaps=False)
    assert _outputs(decoder, sampling) == expected
    assert _outputs(decoder, sampling, graph_limits=GRAPHS, overlaps=False) == expected
    assert _outputs(decoder, sampling, graph_limits=GRAPHS) == expected


# torch says of the mode itself that it is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("name", SAMPLINGS)
@WITHOUT_STATES  # the host waits to plan those
def test_running_ahead_waits_for_drawn_tokens_alone(decoder: Decoder, name: str) -> None:
    engine, collector = build_engine(decoder, graph_limits=GRAPHS), Collector()
    for key, prompt in enumerate(PROMPTS):
        asked = request(prompt, replace(SAMPLINGS[name], seed=key), StopParams(40))
        engine.submit(asked, collector, key)
    for _ in range(6):  # prompts, captures, the first upload of what is kept
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(10):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    settle(engine)
    assert [len(collector.token_ids(key)) for key in range(len(PROMPTS))] == [40] * len(PROMPTS)


@WITHOUT_STATES  # whose rounding differs more
def test_output_is_that_of_the_cpu(
    decoder: Decoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    on_cpu = tiny_decoder(tmp_path_factory.mktemp("cpu"))
    for name in ("greedy", "seeded"):
        assert _outputs(on_cpu, SAMPLINGS[name]) == _outputs(decoder, SAMPLINGS[name])
