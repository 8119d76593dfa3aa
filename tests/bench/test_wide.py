"""The wide bench at sizes a CPU can bear: every mode writes what plain decoding does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.target.rounds import round_shapes
from shared.model_options import Dtype
from shared.tokens import TreeShape
from tests.bench import wide_engine
from tests.bench.draft_parallel import DraftBench, DraftPlan
from tests.bench.head_ahead import HeadBench, HeadPlan
from tests.bench.mode_row import CHOSEN, ON_DEVICE, ModeRow
from tests.bench.tensor_parallel import ParallelBench
from tests.bench.wide import CHAIN, TREE, Plan, WideBench, check_equality
from tests.bench.wide_engine import Run
from tests.bench.wide_floors import mean_floor_ms
from tests.bench.wide_folders import target_folder
from tests.bench.wide_head import WideHeadShape
from tests.bench.wide_model import INDEX_FILE, SPARE_TOKEN, WideModel, WideShape
from tests.bench.wide_pair import DRAFT, PairShapes, chat_prompts

SHAPES = PairShapes(
    target=WideShape(512, 7, 8, 2, 1300, 8210),
    draft=WideShape(512, 3, 8, 4, 800, 8210, tie_word_embeddings=True),
    head=WideHeadShape(intermediate_size=400, draft_vocab_size=8200),
)
PLAN = Plan(
    batches=(1, 2),
    prompt_tokens=40,
    output_tokens=8,
    num_checked=8,
    shapes=SHAPES,
    dtype=torch.float32,
    device=torch.device("cpu"),
    has_host_rounds=True,
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> WideBench:
    return WideBench(PLAN, tmp_path_factory.mktemp("scratch"))


def test_conversations_have_the_length_that_is_asked_for() -> None:
    prompts = chat_prompts(25, 200)
    assert {len(prompt) for prompt in prompts} == {200}
    assert len({tuple(prompt) for prompt in prompts}) == 25


def test_the_wide_target_writes_what_the_small_one_does(bench: WideBench) -> None:
    assert check_equality(bench.pair, PLAN, bench.prompts) == 2


def test_every_draft_leaves_the_answers_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However busy the machine is, trees are waited for.
    monkeypatch.setattr(wide_engine, "_TERMS", replace(wide_engine._TERMS, longest_wait_s=30.0))
    monkeypatch.setattr(round_shapes, "_NUM_TIMED", 1)
    rows = list(WideBench(replace(PLAN, batches=(1,)), tmp_path).rows())
    modes = {row.cells()[0] for row in rows}
    assert len(modes) == 9
    exact = [row for row in rows if "fp8" not in row.mode]
    assert all(row.num_same == row.batch for row in exact)
    # What is chosen depends on the machine.
    drafted = [row.tokens_a_round for row in exact if row.shape and row.mode != CHOSEN]
    assert min(drafted) > 1.0, "wide drafts hit as the small ones do"
    figures = {figure.name: figure for row in rows for figure in row.figures()}
    assert len(figures) == 5
    chain = next(row for row in rows if row.mode == ON_DEVICE and row.shape == CHAIN)
    served = figures["EAGLE-3 round served, chain of 5, batch 1"]
    assert (served.measured, served.floor) == (chain.round_ms, None)


def test_only_what_is_aimed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_shapes, "_NUM_TIMED", 1)
    plan = replace(PLAN, has_host_rounds=False, aims_only=True)
    rows = list(WideBench(plan, tmp_path).rows())
    # Of batch 2 nothing is aimed at, and plain decoding is what the others are held against.
    assert [(row.mode, row.batch) for row in rows] == [
        *(("plain", 1), ("plain", 2)),
        *((ON_DEVICE, 1), (ON_DEVICE, 1), (CHOSEN, 1)),
    ]
    plan = Plan(batches=(1, 8, 32, 64), aims_only=True)
    assert plan.drafted_batches(ON_DEVICE, TREE) == (1, 8)
    assert plan.drafted_batches(CHOSEN, TREE) == (1, 8, 32, 64)


def test_a_floor_is_that_of_the_shapes_that_ran() -> None:
    floors_ms = {None: 4.0, CHAIN: 6.0, TREE: 24.0}
    assert mean_floor_ms({CHAIN: 30}, floors_ms.__getitem__) == 6.0
    assert mean_floor_ms({CHAIN: 30, None: 10}, floors_ms.__getitem__) == 5.5


def test_without_a_floor_there_is_no_share_of_it() -> None:
    run = Run(200.0, 3.0, 15.0, ((1, 2),), {CHAIN: 4})
    cells = ModeRow.of(CHOSEN, TREE, run, 0.0, base=run, plain=run).cells()
    assert cells[6:8] == ("–", "–")


def test_two_processes_leave_the_answers_as_they_are(tmp_path: Path) -> None:
    rows = list(ParallelBench(replace(PLAN, batches=(2,)), tmp_path).rows((1, 2)))
    assert [row.mode for row in rows] == ["1 × plain", "1 × EAGLE3", "2 × plain", "2 × EAGLE3"]
    assert all(row.num_same == row.batch == 2 for row in rows)
    # Not by how much: on a busy machine trees come too late for some rounds.
    assert all(row.tokens_a_round > 1.0 for row in rows if row.mode.endswith("EAGLE3"))


def test_a_target_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    plan = replace(PLAN, batches=(1,))
    index = target_folder(tmp_path) / INDEX_FILE
    ParallelBench(plan, tmp_path, tmp_path, has_drafts=False)
    index.write_text(text := index.read_text() + " ")
    bench = ParallelBench(plan, tmp_path, tmp_path, has_drafts=False)
    assert index.read_text() == text
    assert [row.mode for row in bench.rows((1,))] == ["1 × plain"]


def test_two_processes_grow_the_same_trees(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    model = WideModel(DRAFT, SHAPES.draft, spare_token=SPARE_TOKEN, device=cpu)
    model.write(tmp_path, dtype=torch.float32, shard_size_bytes=10**9)
    shapes = (TreeShape(3, 1, 4), TreeShape(2, 3, 8))
    plan = DraftPlan((2,), shapes, 40, num_rounds=6, device=cpu, dtype=Dtype.FLOAT32)
    rows = list(DraftBench(plan, tmp_path).rows((1, 2)))
    assert [row[0] for row in rows] == ["1 × 3,1,4", "1 × 2,3,8", "2 × 3,1,4", "2 × 2,3,8"]
    assert all(row[-1] == "12/12" for row in rows)


def test_a_head_is_timed_ahead_of_verdicts(tmp_path: Path) -> None:
    plan = HeadPlan(
        batches=(1, 2),
        shapes=(TreeShape(2, 2, 6),),
        budget=3,
        prompt_tokens=40,
        num_rounds=6,
        max_context_tokens=256,
        pair=SHAPES,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rows = list(HeadBench(plan, tmp_path).rows())
    assert [row[1] for row in rows] == ["1", "2"]
    assert all(0.0 < float(row[3]) <= float(row[4]) for row in rows)
