"""Training on a tiny target: it learns, stops, goes on where it was, runs on several processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.draft.training.acceptance import accepted_depths
from services.draft.training.commands import parser
from services.draft.training.documents import Documents, Ids, Source, Windows, frequent_tokens
from services.draft.training.frozen_target import FrozenTarget
from services.draft.training.head_shape import Algorithm
from services.draft.training.heads import build_head, load_head
from services.draft.training.objectives import LossTerms, RecurrentObjective
from services.draft.training.trainer import (
    STATE_FILE,
    OptimiserKind,
    Optimisers,
    Ranks,
    Trainer,
    TrainingPlan,
)
from shared.errors import CheckpointError
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.serving import free_ports

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[4]
VOCAB_SIZE = 64

# A thread of the process group that is left could abort the exit of the interpreter.
TRAIN_AND_LIST_THREADS = """
from pathlib import Path
from services.draft.training.__main__ import main

main()
print([path.read_text() for path in Path("/proc/self/task").glob("*/comm")])
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=4)
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, shape=shape, seed=2)
    return folder


def _texts(count: int = 40) -> Documents:
    """Counting upwards, from anywhere."""
    draw = np.random.default_rng(0)
    starts = draw.integers(0, VOCAB_SIZE, count)
    return Documents.of([[int(t) % VOCAB_SIZE for t in range(s, s + 24)] for s in starts])


def _trainer(target: Path, out: Path, windows: Windows | None = None) -> Trainer:
    frozen = FrozenTarget.load(target, device=CPU, dtype=torch.float32)
    torch.manual_seed(0)
    head = build_head(frozen.head_shape(Algorithm.EAGLE))
    plan = TrainingPlan(
        out=out, num_steps=6, seconds=None, batch_size=4, log_every=2, save_every=3, seed=0
    )
    return Trainer(
        plan,
        RecurrentObjective(head, frozen, LossTerms(noise=0.1), num_steps=2),  # type: ignore[arg-type]
        frozen,
        windows or Windows([Source(_texts())], window=16, seed=0),
        Optimisers(head, OptimiserKind.ADAMW, rate=1e-2, decay=0.0),
        Ranks(rank=0, size=1, device=CPU),
    )


class _Interrupted(Windows):
    """Windows of a run that somebody stops."""

    def batch(self, step: int, *, size: int, rank: int = 0) -> Ids:
        if step == 4:
            raise KeyboardInterrupt
        return super().batch(step, size=size, rank=rank)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(target: Path, tmp_path: Path) -> None:
    _trainer(target, tmp_path / "whole").run()
    interrupted = _Interrupted([Source(_texts())], window=16, seed=0)
    with pytest.raises(KeyboardInterrupt):
        _trainer(target, tmp_path / "parts", interrupted).run()
    rest = _trainer(target, tmp_path / "parts")
    rest.resume()
    assert rest.step == 3
    rest.run()
    whole, parts = (load_file(tmp_path / run / "model.safetensors") for run in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, weight in whole.items():
        assert torch.equal(weight, parts[name]), name
    log = (tmp_path / "parts/training/train.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in log] == [2, 4, 6]


def test_a_checkpoint_that_is_cut_off_is_refused(target: Path, tmp_path: Path) -> None:
    _trainer(target, tmp_path).run()
    state = tmp_path / "training" / STATE_FILE
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be resumed from"):
        _trainer(target, tmp_path).resume()


def _command(*arguments: str) -> None:
    chosen = parser("").parse_args(arguments)
    chosen.run(chosen)


def _train_arguments(target: Path, data: Path, out: Path, *more: str) -> list[str]:
    return [
        *("train", "--target", str(target), "--device", "cpu", "--data", str(data)),
        *("--out", str(out), "--batch-size", "4", "--window", "16", "--log-every", "1", *more),
    ]


@pytest.mark.filterwarnings("ignore")  # of transformers, about a tokenizer that is not needed
def test_every_command_in_turn(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.draft.training.commands.TextReader", _Ids)
    prompts, own = tmp_path / "prompts.npz", tmp_path / "own.npz"
    Documents.of([row[:8] for row in _texts(12).rows()]).save(prompts)
    common = ("--target", str(target), "--device", "cpu", "--prompts", str(prompts))
    _command("generate", *common, "--out", str(own), "--max-new-tokens", "16", "--batch-size", "6")
    written = Documents.load(own)
    assert len(written) == 12
    token_map = tmp_path / "map.json"
    arguments = ("--target", str(target), "--data", str(own), "--size", "40")
    _command("token-map", *arguments, "--out", str(token_map))
    head, more = tmp_path / "head", ("--algorithm", "EAGLE3", "--token-map", str(token_map))
    _command(*_train_arguments(target, own, head, "--steps", "60", "--rate", "1e-2", *more))
    rows = [json.loads(row) for row in (head / "training/train.jsonl").read_text().splitlines()]
    assert len(rows) == 60
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"]
    assert (head / "training/loss.png").stat().st_size > 1000
    report = tmp_path / "report.json"
    _command(
        "evaluate", *common, "--head", str(head), "--max-new-tokens", "16", "--out", str(report)
    )
    figures = json.loads(report.read_text())[str(head)]
    assert figures["accepted_length_with_bonus"] >= 1.0
    assert "tokens cover" in capsys.readouterr().out


class _Ids:
    """Prompts that are ids need no tokenizer."""

    def __init__(self, folder: Path) -> None:
        pass

    def prompts(self, path: Path) -> list[list[int]]:
        return Documents.load(path).rows()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--algorithm", "DFLASH", "--block-size", "17"), "window of 16 tokens is shorter than a"),
        (
            ("--algorithm", "DFLASH", "--block-size", "34"),
            r"block_size is 34; it must be in \[2, 33",
        ),
        (("--algorithm", "MTP", "--num-layers", "2"), "num_layers is 2; heads of MTP are trained"),
    ],
)
def test_sizes_that_no_head_can_have_are_refused(
    target: Path, tmp_path: Path, more: tuple[str, ...], message: str
) -> None:
    data = tmp_path / "data.npz"
    _texts().save(data)
    with pytest.raises(CheckpointError, match=message):
        _command(*_train_arguments(target, data, tmp_path / "head", *more))


@pytest.mark.parametrize(
    "flag",
    ["--steps=0", "--batch-size=0", "--window=-1", "--rate=0", "--seconds=nan", "--num-heads=0"],
)
def test_numbers_out_of_range_are_refused_by_flag(
    flag: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = _train_arguments(target, tmp_path, tmp_path, "--algorithm", "EAGLE", flag)
    with pytest.raises(SystemExit):
        parser("").parse_args(arguments)
    name, value = flag.split("=")
    assert f"argument {name}: {value}; it must be" in capsys.readouterr().err


def test_an_eagle3_head_without_a_map_takes_the_targets_lm_head(
    target: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data.npz"
    _texts().save(data)
    _command(*_train_arguments(target, data, tmp_path, "--steps", "2", "--algorithm", "EAGLE3"))
    weights = load_file(tmp_path / "model.safetensors")
    assert not weights.keys() & {"lm_head.weight", "d2t", "t2d"}
    assert "draft_vocab_size" not in json.loads((tmp_path / "config.json").read_text())
    assert load_head(tmp_path).shape.draft_vocab_size is None


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")  # of transformers, about a tokenizer that is not needed
def test_the_processes_of_torchs_launcher_train_together(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that are told what torchrun tells each; this one is the first, so that one of them is
    spared loading torch and transformers."""
    data = tmp_path / "data.npz"
    _texts().save(data)
    arguments = _train_arguments(target, data, tmp_path, "--steps", "3", "--algorithm", "MTP")
    told = {
        "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(next(free_ports(1))),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    other = subprocess.Popen(
        [sys.executable, "-c", TRAIN_AND_LIST_THREADS, *arguments],
        cwd=ROOT,
        env={**os.environ, **told, "RANK": "1", "LOCAL_RANK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for name, value in {**told, "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    try:
        _command(*arguments)
        threads, errors = other.communicate(timeout=100)
    finally:
        other.kill()
    assert other.returncode == 0, errors
    assert "python" in threads
    assert "gloo" not in threads
    assert "3 steps on 2 processes, 384 tokens" in capsys.readouterr().out


def test_a_batch_depends_on_the_step_and_the_rank_alone() -> None:
    windows = Windows([Source(_texts(), 3.0), Source(_texts(8))], window=16, seed=1)
    again = Windows([Source(_texts(), 3.0), Source(_texts(8))], window=16, seed=1)
    assert np.array_equal(windows.batch(5, size=4), again.batch(5, size=4))
    assert not np.array_equal(windows.batch(5, size=4), windows.batch(6, size=4))
    assert not np.array_equal(windows.batch(5, size=4), windows.batch(5, size=4, rank=1))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(CheckpointError, match="24 tokens are too few for a window of 100"):
        Windows([Source(_texts(1))], window=100, seed=0)


def test_the_map_holds_the_most_frequent_tokens_and_those_it_must() -> None:
    documents = [Documents.of([[5, 5, 5, 1, 1, 2]])]
    assert frequent_tokens(documents, size=2, vocab_size=8) == ([5, 1], 5 / 6)
    assert frequent_tokens(documents, size=2, vocab_size=8, always=[7]) == ([7, 5], 0.5)
    with pytest.raises(CheckpointError, match="token map of 9; it must be in"):
        frequent_tokens(documents, size=9, vocab_size=8)


@pytest.mark.parametrize(
    ("draft", "truth", "depth"), [([1, 2, 3], [1, 2, 4], 2), ([1], [2], 0), ([1, 2], [1], 1)]
)
def test_a_draft_counts_up_to_its_first_mistake(
    draft: list[int], truth: list[int], depth: int
) -> None:
    text = torch.tensor([8, 9, *truth])
    chains = torch.tensor(draft).expand(len(text) - 1, -1)
    assert accepted_depths(chains, text)[0] == depth
