"""A small language model is distilled from what a target's states say, not from what was drawn."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from services.draft.learner.settings import LearnerSettings
from services.draft.learner.student import ModelStudent
from services.draft.learner.traffic import Example
from services.draft.training.frozen_target import load_causal_model
from shared.errors import CheckpointError
from shared.model_options import ModelOptions
from shared.models.loader import load_decoder
from tests.helpers.checkpoints import TinyShape, write_checkpoint

VOCAB_SIZE, STEP = 24, 5
NUM_LAYERS = 4


class Ends:
    """Of a target whose states are the embeddings of the tokens that it finds most probable."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        self.embedding = torch.randn(VOCAB_SIZE, 32, generator=draw)
        self.lm_head = self.embedding


ENDS = Ends()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "draft").mkdir()
    shape = TinyShape(vocab_size=VOCAB_SIZE, num_layers=1)
    return write_checkpoint(tmp_path / "draft", "llama", shape, seed=5)


def _student(folder: Path, rate: float = 1e-2, window: int = 20) -> ModelStudent:
    settings = LearnerSettings(target=("127.0.0.1:1",), rate=rate, batch_size=8, window=window)
    return ModelStudent(folder, ENDS, settings, num_target_layers=NUM_LAYERS)


def _example(tokens: Sequence[int], best: Sequence[int]) -> Example:
    """A text, and the token that the target finds most probable behind each of its tokens."""
    return Example(tuple(tokens), ENDS.embedding[list(best)] * 0.3, 4)


def _steps(first: int) -> Example:
    """Each token is `STEP` above the one before, as the target says."""
    tokens = [(first + STEP * place) % VOCAB_SIZE for place in range(24)]
    return _example(tokens, tokens[1:])


TEXTS = [_steps(first) for first in range(0, 24, 2)]
HELD_OUT = [_steps(first) for first in range(1, 24, 5)]


def _taught(student: ModelStudent, examples: Sequence[Example], count: int = 60) -> float:
    """Returns tokens a round, on texts of the domain, of what the student has come to."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(count):
        student.learn(draw.choices(examples, k=8), generator)
    with student.with_weights(student.state()):
        return student.measure(HELD_OUT, num_steps=3).mean_length


def test_a_model_learns_what_its_target_says(folder: Path) -> None:
    student = _student(folder)
    assert student.feature_layers == (NUM_LAYERS + 1,)
    before = _taught(student, TEXTS, 0)
    assert _taught(student, TEXTS) > before + 1.0


def test_it_learns_the_distribution_and_not_the_tokens_that_were_drawn(folder: Path) -> None:
    """The texts are noise; behind each token the target would have gone on by the rule."""
    draw, examples = random.Random(3), []
    for _ in range(40):
        tokens = draw.choices(range(VOCAB_SIZE), k=24)
        examples.append(_example(tokens, [(token + STEP) % VOCAB_SIZE for token in tokens[:-1]]))
    student = _student(folder)
    before = _taught(student, examples, 0)
    assert _taught(student, examples) > before + 1.0


def test_states_of_other_positions_teach_nothing(folder: Path) -> None:
    """The control: the same texts and states, but each state beside another position."""
    draw, examples = random.Random(3), []
    for example in TEXTS:
        order = draw.sample(range(len(example.rows)), len(example.rows))
        examples.append(Example(example.token_ids, example.rows[order], 4))
    student = _student(folder)
    before = _taught(student, examples, 0)
    assert _taught(student, examples) < before + 0.3


def test_a_draft_is_measured_as_it_would_draft(folder: Path, tmp_path: Path) -> None:
    """Against greedy chains that are generated token by token."""
    student = _student(folder)
    _taught(student, TEXTS, 25)
    student.save(tmp_path / "saved")
    model = load_causal_model(tmp_path / "saved", torch.float32)
    walked = []
    for example in HELD_OUT:
        tokens, rounds, at = example.token_ids, 0, 5
        while at < len(tokens):
            known = list(tokens[:at])
            for _ in range(3):
                known.append(int(model(torch.tensor([known])).logits[0, -1].argmax()))
            pairs = zip(known[at:], tokens[at:], strict=False)
            depth = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
            rounds, at = rounds + 1, at + depth + 1
        walked.append((rounds, len(tokens) - 5))
    saved = _student(tmp_path / "saved", window=64)
    found = saved.measure(HELD_OUT, num_steps=3)
    assert found.walked == tuple(walked)
    assert 1.2 < found.mean_length < 4.0


def test_the_loss_is_the_divergence_from_the_targets_law(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_model(folder, torch.float32)
    example = _steps(3)
    monkeypatch.setattr("services.draft.learner.student.HARD", 0.0)
    student = _student(folder, rate=1e-9, window=64)
    loss = student.learn([example], torch.Generator().manual_seed(0))
    with torch.no_grad():
        own = model(torch.tensor([example.token_ids[:-1]])).logits[0].log_softmax(-1)
    law = F.linear(example.rows, ENDS.lm_head).log_softmax(-1)
    divergence = (law.exp() * (law - own)).sum(-1)[3:]  # the first token behind the prompt is 4
    assert loss == pytest.approx(float(divergence.mean()), rel=1e-4)


def test_an_update_in_parts_is_that_of_the_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = (6, 6, 9, 9, 15, 15)  # so that no part scores as many tokens as another
    texts = [
        Example(each.token_ids, each.rows, num_prompt_tokens)
        for each, num_prompt_tokens in zip(TEXTS[:6], prompts, strict=True)
    ]

    def losses() -> list[float]:
        student, generator = _student(folder), torch.Generator().manual_seed(0)
        return [student.learn(texts, generator) for _ in range(4)]

    whole = losses()
    monkeypatch.setattr("services.draft.learner.student._MAX_ROWS", 45)  # two windows of 20
    assert losses() == pytest.approx(whole, rel=1e-4)


def test_saved_weights_are_read_by_who_serves_them(folder: Path, tmp_path: Path) -> None:
    student = _student(folder)
    _taught(student, TEXTS, 3)
    student.save(tmp_path / "saved")
    device, options = torch.device("cpu"), ModelOptions()
    old, new = (
        load_decoder(each, dtype=torch.float32, device=device, options=options)
        for each in (folder, tmp_path / "saved")
    )
    assert torch.equal(new.embedding, student.state()["model.embed_tokens.weight"])
    assert not torch.equal(new.embedding, old.embedding)


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        _student(tmp_path)
