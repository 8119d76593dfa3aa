"""Graphs of rounds on two GPUs that share a target write what its plain steps write."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from services.bound import end_with_parent
from services.followers import end_processes
from services.ranks import Ranks
from services.target.rounds.policy import LanePolicy
from services.target.step_report import StepReport
from shared.kernels.kernel_settings import IS_INTERPRETING
from shared.tokens import SamplingParams, StopParams
from tests.helpers.cut_lanes import OTHER_TREES, TREE, CutTarget, cut_target
from tests.helpers.engines import Collector, request, run, settle
from tests.helpers.shared_head_rounds import any_choice

SIZE, LIMIT_S = 2, 280.0
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3], [3] * 21)
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=7),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.05, seed=1),
)
pytestmark = pytest.mark.gpu


def check_lanes(target: CutTarget, num_tokens: int) -> None:
    """Has requests come one after another while the shape changes every few rounds."""
    LanePolicy.choose = any_choice(3)  # type: ignore[method-assign, assignment]
    reports: list[StepReport] = []
    for sampling in SAMPLINGS:
        requests = [request(prompt, sampling, StopParams(num_tokens)) for prompt in PROMPTS]
        expected = run(target.plain(), requests)
        engine, collector = target.drafted(reports.append, OTHER_TREES), Collector()
        for key, each in enumerate(requests):
            engine.submit(each, collector, key)
            for _ in range(9):
                engine.step()
        settle(engine)
        for key in range(len(requests)):
            assert collector.token_ids(key) == expected.token_ids(key)
    # When a prompt ends beside rounds is a matter of time.
    rounds = [report for report in reports if report.round_shape is not None]
    assert sum(report.num_accepted for report in rounds) > 0
    assert sum(report.num_prompt_rows for report in rounds) > 0
    assert {report.round_shape for report in reports} == {None, TREE, *OTHER_TREES}


def serve(folder: Path, ranks: Ranks, spreads_sequences: bool) -> None:
    """Rank 0, in a process that may lead a group and be killed."""
    end_with_parent()
    with cut_target(folder, "cuda:0", ranks, spreads_sequences=spreads_sequences) as target:
        check_lanes(target, 60)


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.device_count() < SIZE, reason=f"needs {SIZE} GPUs")
@pytest.mark.parametrize(
    ("ranks", "spreads_sequences"),
    [(Ranks(SIZE), False), (Ranks(SIZE), True), (Ranks(1, SIZE), False)],
    ids=["heads", "sequences", "stages"],
)
def test_rounds_of_two_gpus_change_no_token(
    ranks: Ranks, spreads_sequences: bool, tmp_path: Path
) -> None:
    # Nothing here uses NVLink multicast, and on some hosts it must not even be set up.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(tmp_path, ranks, spreads_sequences)
    )
    process.start()
    end_processes([process], LIMIT_S)
    assert process.exitcode == 0


@pytest.mark.interpreter
@pytest.mark.timeout(300)
@pytest.mark.skipif(not IS_INTERPRETING, reason="a GPU has a test of its own")
@pytest.mark.parametrize("spreads_sequences", [False, True])
def test_kernels_of_two_processes_change_no_token(spreads_sequences: bool, tmp_path: Path) -> None:
    with cut_target(tmp_path, "cpu", spreads_sequences=spreads_sequences) as target:
        requests = [request(PROMPTS[2], SAMPLINGS[1], StopParams(3))]
        expected = run(target.plain(), requests)
        reports: list[StepReport] = []
        collector = run(target.drafted(reports.append), requests)
        assert collector.token_ids(0) == expected.token_ids(0)
        assert {report.round_shape for report in reports} == {None, TREE}
