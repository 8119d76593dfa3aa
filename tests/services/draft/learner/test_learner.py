"""Lessons: a head gets better on what it is taught, better weights are swapped, worse ones taken
back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.draft.events import WeightsUpdated
from services.draft.learner.learner import LOG_FILE, Learner
from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import LIKELY, HeadStudent, Measurement, Student
from services.draft.learner.traffic import Example, Traffic
from services.draft.training.head_shape import Algorithm, HeadShape
from services.draft.training.heads import build_head, save_head
from shared.errors import CheckpointError, InvalidArgument

VOCAB_SIZE, HIDDEN = 24, 32
STEP = 5


class Ends:
    """Of a target whose states are the embeddings of the tokens that it says next."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCAB_SIZE, HIDDEN, generator=draw)
        self.lm_head = self.embedding


ENDS = Ends()
SETTINGS = LearnerSettings(target=("127.0.0.1:1",), rate=3e-2, batch_size=8, window=20)


def _head(folder: Path, algorithm: Algorithm, *, draft_vocab_size: int | None = None) -> Path:
    shape = HeadShape(
        algorithm=algorithm,
        hidden_size=HIDDEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=32,
        vocab_size=VOCAB_SIZE,
        draft_vocab_size=draft_vocab_size,
        num_layers=1,
        num_target_layers=4,
        feature_layers=(1, 2, 4) if algorithm is Algorithm.EAGLE3 else (5,),
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        max_position_embeddings=128,
    )
    torch.manual_seed(3)
    known = None if draft_vocab_size is None else range(draft_vocab_size)
    save_head(build_head(shape, known), folder)
    return folder


def _example(first: int, step: int = STEP, num_tokens: int = 24) -> Example:
    """A text whose tokens are `step` apart, by a target that is sure of it."""
    tokens = [(first + step * place) % VOCAB_SIZE for place in range(num_tokens)]
    rows = ENDS.embedding[tokens[1:]] * 3.0
    return Example(tuple(tokens), rows, 4)


def _examples(step: int = STEP) -> list[Example]:
    return [_example(first, step) for first in range(VOCAB_SIZE)]


def _student(folder: Path) -> HeadStudent:
    return HeadStudent(folder, ENDS, replace(SETTINGS, unroll=3))


@pytest.fixture(autouse=True)
def _short_chains_on_few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.draft.learner.learner.NUM_STEPS", 3)
    monkeypatch.setattr("services.draft.learner.learner.MIN_HELD_OUT", 8)


class Drafts:
    """Keeps what is published, and refuses it if it is told to."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.refuses = False

    def __call__(self, folder: Path, version: int) -> None:
        assert (folder / "model.safetensors").is_file()
        self.versions.append(version)
        if self.refuses and version:
            raise InvalidArgument.of("WEIGHTS_REFUSED", "model_path", "norm.weight is too odd")


def _learner(
    tmp_path: Path, drafts: Drafts, examples: Sequence[Example]
) -> tuple[Learner, Traffic, Student]:
    return _learner_on(_head(tmp_path / "head", Algorithm.EAGLE), drafts, examples)


def _learner_on(
    folder: Path, drafts: Drafts, examples: Sequence[Example]
) -> tuple[Learner, Traffic, Student]:
    student = _student(folder)
    traffic = Traffic(iter(range(10**6)).__next__, held_out_share=0.5)
    for example in examples:
        traffic.add(example)
    settings = replace(
        SETTINGS,
        out=folder.parent / "out",
        lesson_updates=30,
        lesson_tokens=1,
        versions_kept=2,
    )
    clock = iter(range(1, 10**6)).__next__
    return Learner(student, traffic, settings, drafts, clock), traffic, student


@pytest.mark.parametrize(
    ("algorithm", "draft_vocab_size"),
    [
        (Algorithm.EAGLE, None),
        (Algorithm.EAGLE3, None),
        (Algorithm.EAGLE3, 20),
        (Algorithm.MTP, None),
    ],
)
def test_a_head_learns_what_its_target_says(
    tmp_path: Path, algorithm: Algorithm, draft_vocab_size: int | None
) -> None:
    folder = _head(tmp_path / "head", algorithm, draft_vocab_size=draft_vocab_size)
    student, examples = _student(folder), _examples()
    frozen = student.projection.clone() if student.projection is not None else None
    before = student.measure(examples, num_steps=3).mean_length
    generator = torch.Generator().manual_seed(0)
    losses = [student.learn(examples[::5], generator) for _ in range(80)]
    assert losses[-1] < losses[0]
    with student.with_weights(student.state()):  # the mean of its latest weights
        after = student.measure(examples, num_steps=3).mean_length
    assert after > before + 0.3
    student.save(tmp_path / "saved")
    again = _student(tmp_path / "saved")
    assert again.measure(examples, num_steps=3).mean_length == pytest.approx(after, abs=0.1)
    if frozen is not None:
        assert again.projection is not None
        assert torch.equal(again.projection, frozen), "the target applies it"


def test_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="blocks"):
        _student(_head(tmp_path / "head", Algorithm.DFLASH))


def test_better_weights_are_swapped_and_logged(tmp_path: Path) -> None:
    drafts = Drafts()
    learner, traffic, _ = _learner(tmp_path, drafts, _examples())
    learner.begin()
    report = learner.step()
    assert report is not None
    assert report.before is not None
    assert report.after is not None
    assert report.event == "swapped"
    assert report.after > report.before
    assert drafts.versions == [0, 1]
    assert (learner.version, learner.figures.num_swaps) == (1, 1)
    assert learner.step() is None, "there is nothing new to learn"
    traffic.add(_example(3))
    learner.step()
    [line, *_] = (tmp_path / "out" / LOG_FILE).read_text().splitlines()
    assert json.loads(line)["event"] == "swapped"


def test_weights_that_a_draft_refuses_are_taken_back_from_all(tmp_path: Path) -> None:
    drafts = Drafts()
    drafts.refuses = True
    learner, _, student = _learner(tmp_path, drafts, _examples())
    served = student.state()
    report = learner.step()
    assert report is not None
    assert report.event == "refused"
    assert drafts.versions == [1, 0]
    assert learner.version == 0
    assert all(torch.equal(served[name], each) for name, each in student.state().items())


def test_weights_that_turn_out_worse_are_taken_back(tmp_path: Path) -> None:
    """The traffic turns right after the swap to what the weights before it were good at."""
    drafts = Drafts()
    student = _student(_head(tmp_path / "head", Algorithm.EAGLE))
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        student.learn(_examples(step=7)[::3], generator)
    student.save(tmp_path / "other")
    learner, traffic, _ = _learner_on(tmp_path / "other", drafts, _examples())
    report = learner.step()
    assert report is not None
    assert report.event == "swapped"
    assert learner.watch() is None, "nothing came since"
    for example in _examples(step=7):
        traffic.add(Example(example.token_ids, example.rows, 4, arrived_s=float("inf")))
    taken_back = learner.watch()
    assert taken_back is not None
    assert taken_back.event == "rolled back"
    assert drafts.versions == [1, 0]
    assert (learner.version, learner.figures.num_rollbacks) == (0, 1)


def test_a_lesson_on_what_other_weights_computed_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target takes other weights in the middle of a lesson; then the next one counts."""
    drafts = Drafts()
    learner, traffic, student = _learner(tmp_path, drafts, _examples())
    served = student.state()
    learner.between_updates(lambda: traffic.submit(WeightsUpdated(1, 1)))
    report = learner.step()
    assert report is not None
    assert report.event == "outdated"
    assert not drafts.versions
    assert all(torch.equal(served[name], each) for name, each in student.state().items())
    assert not traffic.recent()
    for example in _examples():
        traffic.add(example)
    report = learner.step()
    assert report is not None
    assert report.event == "swapped"


def test_luck_is_no_gain() -> None:
    """A few texts that go well weigh less than as much spread over many."""
    plain = Measurement(((10, 20),) * 8)
    lucky = Measurement(((5, 20), *((10, 20),) * 7))
    better = Measurement(((9, 20),) * 8)
    assert lucky.mean_length > plain.mean_length + 0.1
    assert not lucky.beats(plain, 0.1)
    assert lucky.beats(plain, 0.1, LIKELY)
    luckier = Measurement(((0, 20), (15, 20), *((10, 20),) * 6))
    assert not luckier.beats(plain, 0.0, LIKELY)
    assert better.beats(plain, 0.1)
    assert not better.beats(plain, 0.5)
    assert not plain.beats(better, 0.0)


def test_the_first_updates_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warm-up the first step of AdamW moves each weight by the whole rate."""
    folder, moved = _head(tmp_path / "head", Algorithm.EAGLE), []
    for warm_up in (1, 20):
        monkeypatch.setattr("services.draft.learner.student.WARM_UP", warm_up)
        student = HeadStudent(folder, ENDS, replace(SETTINGS, rate=1e-2))
        before = student.state()["fc.weight"]
        student.learn(_examples()[:8], torch.Generator().manual_seed(0))
        moved.append(float((student.state()["fc.weight"] - before).abs().max()))
    assert moved[1] == pytest.approx(moved[0] / 20, rel=0.01)


def test_old_versions_go(tmp_path: Path) -> None:
    learner, _, _ = _learner(tmp_path, Drafts(), _examples())
    for _ in range(4):
        learner._swap(0.0, Measurement(((2, 2),)), Measurement(((1, 2),)))
    assert sorted(each.name for each in (tmp_path / "out").glob("version-*")) == [
        "version-3",
        "version-4",
    ]


def test_half_of_a_batch_is_what_has_come_since_the_last_lesson(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, traffic, student = _learner(tmp_path, Drafts(), _examples())
    learner.step()
    news = [example for example in _examples(step=7) if _is_trained_on(example)]
    for example in news:
        traffic.add(replace(example, arrived_s=float("inf")))
    batches: list[Sequence[Example]] = []
    monkeypatch.setattr(student, "learn", lambda batch, _: batches.append(batch) or 0.0)
    learner.step()
    texts = {example.token_ids for example in news}
    shares = [sum(each.token_ids in texts for each in batch) / len(batch) for batch in batches]
    assert min(shares) >= 0.5
    assert sum(shares) < len(shares), "of the rest some are older"


def _is_trained_on(example: Example) -> bool:
    traffic = Traffic(held_out_share=0.5)
    traffic.add(example)
    return bool(traffic.recent())


def test_measuring_counts_as_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner, _, _ = _learner(tmp_path, Drafts(), _examples())
    monkeypatch.setattr("time.perf_counter", itertools.count().__next__)
    learner.step()
    assert learner.figures.busy_s == 30 + 2, "a second an update, and each of two measurements"
