"""A head in another process changes no token, whatever it writes, and however late."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.target.engine import Engine
from services.target.requests.request import GenerationRequest
from services.target.rounds import head_rounds
from services.target.rounds.policy import LanePolicy
from services.target.rounds.round_shapes import RoundShapes
from services.target.step_report import StepReport
from services.target.throughput import CostTable
from shared.models.decoder import Decoder
from shared.models.loader import load_decoder
from shared.runtime import mapped_rounds
from shared.runtime.mapped_rounds import MappedRound, OpenMapped
from shared.runtime.round_batches import MAX_PENDING_ROUNDS
from shared.runtime.round_runner import RoundRunner
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.checkpoints import TinyShape, write_checkpoint
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import VOCAB_SIZE, build_engine, request, run, run_plain, settle
from tests.helpers.mapped_draft import MappedDraft
from tests.helpers.shared_head_rounds import SilentDraft, sharing_head

TREE = TreeShape(3, 2, 7)
PROMPTS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 9, 8, 7], [11, 3], [3] * 21)
SAMPLINGS = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_k=9, seed=4)]


class _Setup:
    """An engine with drafts, and the rounds that it reported."""

    def __init__(self, pair: Pair) -> None:
        self.reports: list[StepReport] = []
        self.now_s = 0.0
        self.engine: Engine = build_engine(
            pair.decoder,
            on_step=self.reports.append,
            selects=True,
            max_running=6,
            clock=self._clock,
        )
        self._pair, self.drafts = pair, list[MappedDraft]()

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def attach(
        self,
        name: str = "draft",
        tree: TreeShape = TREE,
        model: Decoder | None = None,
        *,
        is_pinned: bool = True,
    ) -> MappedDraft:
        draft = MappedDraft(self._pair, self.engine, name, tree, model, is_pinned=is_pinned)
        self.drafts.append(draft)
        self.engine.attach(draft.attachment)
        settle(self.engine)
        draft.settle()
        settle(self.engine)  # it is ready
        return draft

    def answers(self, sampling: SamplingParams) -> list[list[int]]:
        self.reports.clear()
        requests = [request(prompt, sampling) for prompt in PROMPTS]
        collector = run(self.engine, requests)
        return [collector.token_ids(key) for key in range(len(requests))]

    @property
    def num_rounds(self) -> int:
        return sum(each.num_rounds for each in self.reports if each.round_shape is not None)

    @property
    def num_accepted(self) -> int:
        return sum(each.num_accepted for each in self.reports if each.round_shape is not None)


@contextmanager
def _setup(pair: Pair) -> Iterator[_Setup]:
    setup = _Setup(pair)
    try:
        yield setup
    finally:
        for draft in setup.drafts:
            draft.stop()
        setup.engine.check_idle()


def _plain(pair: Pair, sampling: SamplingParams) -> list[list[int]]:
    collector = run_plain(pair.decoder, [request(prompt, sampling) for prompt in PROMPTS])
    return [collector.token_ids(key) for key in range(len(PROMPTS))]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
def test_rounds_take_the_trees_of_another_process(pair: Pair, sampling: SamplingParams) -> None:
    with _setup(pair) as setup:
        draft = setup.attach()
        assert setup.answers(sampling) == _plain(pair, sampling)
        assert setup.num_rounds > 0
        assert sum(isinstance(each, MappedRound) for each in draft.commands) > 0


def _garbage(trees: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(int(trees.sum()) & 0xFFFF)
    return torch.randint(-9, 40, trees.shape, generator=generator)


@pytest.mark.parametrize("shape", [TREE, TreeShape(5, 1, 6)], ids=["trees", "chains"])
def test_whatever_is_written_changes_no_token(pair: Pair, shape: TreeShape) -> None:
    with _setup(pair) as setup:
        setup.attach(tree=shape).spoils = _garbage
        for sampling in SAMPLINGS:
            assert setup.answers(sampling) == _plain(pair, sampling)
            assert setup.num_rounds > 0


def test_a_frozen_head_costs_plain_steps_until_it_has_thawed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(mapped_rounds.LONGEST_WAIT_US, "cpu", 1_000)
    monkeypatch.setattr(mapped_rounds, "WAIT_A_BACKLOG_US", 0)
    monkeypatch.setattr(head_rounds, "FIRST_LATE_PAUSE_S", 0.0)
    with _setup(pair) as setup:
        draft = setup.attach()
        num_before = len(draft.commands)
        draft.is_frozen = True
        for _ in range(2):
            assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        num_asked = sum(isinstance(each, MappedRound) for each in draft.commands[num_before:])
        assert 0 < num_asked <= MAX_PENDING_ROUNDS
        draft.is_frozen = False
        draft.settle()
        assert draft.attachment.mapped is not None
        draft.attachment.mapped.head._longest_us = 10_000_000
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert setup.num_rounds > 0


def test_a_head_that_cannot_draft_is_asked_again_a_second_after_it_can(pair: Pair) -> None:
    with _setup(pair) as setup:
        draft = setup.attach()

        def fail(_: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        draft.spoils = fail
        while setup.now_s < 3.0:
            assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        draft.spoils, num_before, able_s = (lambda trees: trees), len(draft.commands), setup.now_s
        num_asked = sum(isinstance(each, MappedRound) for each in draft.commands)
        assert 0 < num_asked < 10, "the pause doubles up to a second"
        while len(draft.commands) == num_before:
            setup.answers(SAMPLINGS[0])
            assert setup.now_s < able_s + 1.2, "answers take 0.2 s"
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert setup.num_accepted > 0


class _Time:
    """The time of a wait on the host, in which something happens to the draft.

    Attributes:
        event: called in the first nap.
    """

    def __init__(self, event: Callable[[], None]) -> None:
        self.waited_s, self.event = 0.0, event

    def monotonic(self) -> float:
        return self.waited_s

    def sleep(self, seconds: float) -> None:
        self.waited_s += seconds
        event, self.event = self.event, lambda: None
        event()


def test_a_head_that_has_gone_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _setup(pair) as setup:
        draft = setup.attach()

        def go() -> None:
            """The stream ends, which another thread notices."""
            draft.attachment.abandon()
            setup.engine.detach("draft")

        setup.answers(SAMPLINGS[0])
        draft.is_frozen, time = True, _Time(go)
        monkeypatch.setattr(mapped_rounds, "time", time)
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert 0.0 < time.waited_s < 0.001
        assert not setup.engine.statuses_now()


def test_what_late_trees_cost_is_not_held_against_a_shape(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[TreeShape] = []
    monkeypatch.setattr(LanePolicy, "choose", lambda self, *_: TREE)
    monkeypatch.setattr(
        LanePolicy,
        "observe_time",
        lambda _, shape, *__, **___: timed.extend([shape] if shape else []),
    )
    with _setup(pair) as setup:
        draft = setup.attach(is_pinned=False)
        mapped = draft.attachment.mapped
        assert mapped is not None

        def freeze(_: int) -> None:
            """As soon as rounds are timed."""
            if timed and not draft.is_frozen:
                timed.clear()
                mapped.head._longest_us = 1_000
                draft.is_frozen = True

        run(setup.engine, [request(prompt, SAMPLINGS[0]) for prompt in PROMPTS], each_step=freeze)
        assert draft.is_frozen, "no round was timed"
        assert not timed
        draft.is_frozen = False


@pytest.mark.parametrize("is_dropped", [False, True], ids=["detached", "dropped"])
def test_another_draft_takes_the_place_of_one_that_left(pair: Pair, is_dropped: bool) -> None:
    """The stream of a draft that is dropped ends when the other one has its place already."""
    with _setup(pair) as setup:
        first = setup.attach("first")
        second = setup.attach("second")
        assert not second.commands, "two models cannot share the lanes"
        if is_dropped:
            first.is_full = True
            setup.answers(SAMPLINGS[0])
        first.attachment.abandon()
        setup.engine.detach("first")
        settle(setup.engine)
        second.settle()
        settle(setup.engine)
        assert any(isinstance(each, OpenMapped) for each in second.commands)
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert setup.num_rounds > 0


def test_another_draft_takes_the_place_of_one_that_declines(pair: Pair) -> None:
    with _setup(pair) as setup:
        first = MappedDraft(pair, setup.engine, "first", TREE)
        setup.drafts.append(first)
        first.is_preparing = True
        setup.engine.attach(first.attachment)
        settle(setup.engine)
        second = setup.attach("second")
        assert not second.commands
        setup.engine.map_head("first", ())
        settle(setup.engine)
        second.settle()
        settle(setup.engine)
        assert any(isinstance(each, OpenMapped) for each in second.commands)
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert setup.num_rounds > 0


def test_without_room_for_shared_features_a_draft_pushes_its_trees(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with _setup(pair) as setup:
        draft = setup.attach()
        assert "features cannot be shared" in caplog.text
        assert draft.attachment.mapped is draft.attachment.refusal is None
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert draft.num_opened == len(PROMPTS)


def test_a_draft_that_comes_back_finds_everything_made(pair: Pair) -> None:
    with _setup(pair) as setup:
        first = setup.attach("first")
        setup.answers(SAMPLINGS[0])
        mapped = first.attachment.mapped
        setup.engine.detach("first")
        settle(setup.engine)
        second = setup.attach("second")
        assert second.attachment.mapped is mapped
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert setup.num_accepted > 0


@pytest.mark.parametrize(
    "lacking", [(RoundRunner, "capture"), (RoundShapes, "costs")], ids=["graphs", "measurement"]
)
def test_without_memory_for_its_rounds_a_draft_pushes_its_trees(
    pair: Pair,
    lacking: tuple[type, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 64.00 MiB")

    monkeypatch.setattr(*lacking, run_out)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    with _setup(pair) as setup:
        draft = setup.attach("draft", is_pinned=False)
        assert "the head of draft, which pushes its trees: 64.00 MiB more wanted" in caplog.text
        assert draft.attachment.mapped is draft.attachment.rounds is None
        # It is asked for trees as a draft on another host is.
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert draft.num_opened == len(PROMPTS)


def test_a_second_word_that_it_is_ready_changes_nothing(pair: Pair) -> None:
    with _setup(pair) as setup:
        draft = setup.attach("draft")
        expected = _plain(pair, SAMPLINGS[0])
        requests = [request(prompt, SAMPLINGS[0]) for prompt in PROMPTS]

        def say_again(step: int) -> None:
            if step == 3:
                setup.engine.map_head("draft", (1, 2, 3))

        collector = run(setup.engine, requests, each_step=say_again)
        assert [collector.token_ids(key) for key in range(len(requests))] == expected
        assert draft.attachment.rounds is not None


def test_a_draft_that_takes_no_commands_is_detached(pair: Pair) -> None:
    with _setup(pair) as setup:
        draft = setup.attach("draft")
        draft.is_full = True
        assert setup.answers(SAMPLINGS[0]) == _plain(pair, SAMPLINGS[0])
        assert not setup.engine.statuses_now()


def test_rounds_of_few_kinds_are_kept(pair: Pair) -> None:
    with _setup(pair) as setup:
        shapes = [TREE, TreeShape(2, 1, 3), TreeShape(1, 1, 2)]
        mapped = []
        for number, shape in enumerate(shapes):
            draft = setup.attach(str(number), shape)
            mapped.append(draft.attachment.mapped is not None)
            setup.engine.detach(str(number))
            settle(setup.engine)
        assert mapped == [True, True, False]


CHAIN = TreeShape(3, 1, 4)
TARGET_SEED = 3


@pytest.fixture
def always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds whose trees grow ahead are measured as the fastest of all."""

    def measured(rounds: RoundShapes) -> CostTable:
        return CostTable({1: 1.0}, {each: {1: 0.5 - 0.4 * each.is_ahead} for each in rounds.shapes})

    monkeypatch.setattr(RoundShapes, "costs", measured)


def _model(folder: Path, seed: int) -> Decoder:
    """Returns a model of the target's sizes; with `TARGET_SEED` it is the target."""
    write_checkpoint(folder, "llama", TinyShape(vocab_size=VOCAB_SIZE, num_layers=4), seed=seed)
    return load_decoder(folder, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.usefixtures("always_ahead")
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn"])
@pytest.mark.parametrize("seed", [TARGET_SEED, 9], ids=["the target itself", "another model"])
def test_a_model_drafts_ahead_while_sequences_come_and_go(
    pair: Pair, tmp_path: Path, seed: int, sampling: SamplingParams
) -> None:
    with _setup(pair) as setup:
        draft = setup.attach(tree=CHAIN, model=_model(tmp_path, seed))
        prompts = [[*prompt, number] for number in (1, 2, 3) for prompt in PROMPTS]
        requests = [request(prompt, sampling) for prompt in prompts]
        collector, plain = run(setup.engine, requests), run_plain(pair.decoder, requests)
        for key in range(len(requests)):
            assert collector.token_ids(key) == plain.token_ids(key)
        ahead = [each for each in setup.reports if each.round_shape and each.round_shape.is_ahead]
        num_rounds = sum(each.num_rounds for each in ahead)
        num_drafted = sum(each.num_drafted for each in ahead)
        num_accepted = sum(each.num_accepted for each in ahead)
        assert num_rounds > 2 * len(requests)
        names, starts, ends = zip(*draft.spans, strict=True)
        assert set(names) == {"read", "propose", "select", "ahead"}
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= later for end, later in zip(ends, starts[1:], strict=False))
        if seed != TARGET_SEED:
            assert num_accepted < num_drafted / 2
            return
        # Most verdicts are foreseen, but those of rounds in which a sequence joins.
        assert num_drafted >= 0.7 * CHAIN.num_steps * (num_rounds - len(requests))
        assert num_accepted > 0.8 * num_drafted


def test_a_model_reads_what_it_computed_for_an_earlier_prompt(pair: Pair, tmp_path: Path) -> None:
    """Not under another salt, and not once its weights have changed."""
    with _setup(pair) as setup:
        draft = setup.attach(tree=CHAIN, model=_model(tmp_path, TARGET_SEED))

        def first_row(asked: GenerationRequest) -> int:
            """Returns the first row that the draft computes for a request."""
            draft.commands.clear()
            tokens = run(setup.engine, [asked]).token_ids(0)
            assert tokens == run_plain(pair.decoder, [asked]).token_ids(0)
            rounds = [each for each in draft.commands if isinstance(each, MappedRound)]
            return next(each.backlogs[0].start for each in rounds if each.backlogs)

        prompt = [number % 19 for number in range(40)]
        first = request(prompt)
        assert first_row(first) == 0
        setup.reports.clear()
        assert first_row(first) == 32, "whole pages before the rows that rounds write"
        assert setup.num_accepted > 12
        answer = run_plain(pair.decoder, [first]).token_ids(0)
        assert first_row(request([*prompt, *answer, 7])) > 50, "the answer is cached, too"
        assert first_row(replace(first, cache_salt="another")) == 0
        setup.engine.draft_updated()
        assert first_row(first) == 0


SHAPES = (TreeShape(5, 1, 6), TreeShape(1, 1, 2), TreeShape(3, 1, 4))


def _in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the shape change for every second round."""
    numbers = itertools.count()

    def choose(policy: LanePolicy, *args: object) -> TreeShape:
        shapes = sorted(args[2], key=lambda each: (each.num_steps * 5 % 7, each.is_ahead))  # type: ignore[attr-defined, call-overload]
        return shapes[next(numbers) // 2 % len(shapes)]

    monkeypatch.setattr(LanePolicy, "choose", choose)


def _accepted(
    engine: Engine, reports: list[StepReport], sampling: SamplingParams
) -> list[tuple[TreeShape, int, int]]:
    """Returns the shape, the drafted and the accepted nodes of each round."""
    reports.clear()
    for prompt in PROMPTS:
        run(engine, [request(prompt, sampling, StopParams(60))])
    return [
        (each.round_shape, each.num_drafted, each.num_accepted)
        for each in reports
        if each.round_shape is not None
    ]


def test_a_head_elsewhere_drafts_as_one_here_while_the_shape_changes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _setup(pair) as setup:
        setup.attach(tree=SHAPES[0], is_pinned=False)
        _in_turn(monkeypatch)
        found = _accepted(setup.engine, setup.reports, SAMPLINGS[1])
    reports: list[StepReport] = []
    engine = build_engine(pair.decoder, on_step=reports.append)
    trees = dict.fromkeys(SHAPES[1:], 6)
    engine.attach(sharing_head(pair, SilentDraft(), SHAPES[0], trees))
    _in_turn(monkeypatch)
    assert found == _accepted(engine, reports, SAMPLINGS[1])
    assert {shape for shape, _, _ in found} == set(SHAPES)


def test_a_model_elsewhere_drafts_ahead_while_the_shape_changes(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _setup(pair) as setup:
        setup.attach(tree=SHAPES[0], model=_model(tmp_path, TARGET_SEED), is_pinned=False)
        _in_turn(monkeypatch)
        found = _accepted(setup.engine, setup.reports, SAMPLINGS[0])
        # Those that an answer ends in are cut.
        num_cut = sum(accepted != drafted for _, drafted, accepted in found)
        assert num_cut <= 2 * len(PROMPTS) < len(found) / 2
        assert {shape.is_ahead for shape, _, _ in found} == {False, True}
        assert len({shape.num_steps for shape, _, _ in found}) > 1
