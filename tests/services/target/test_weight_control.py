"""Weights that are replaced between two steps, and what becomes of sequences that run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from services.target.engine import Engine
from services.target.sequence import Sequence
from services.target.weight_control import PauseMode, WeightControl
from shared.errors import CheckpointError, FailedPrecondition
from shared.generation import Delta
from shared.model_options import LoadFormat, ModelOptions
from shared.models import weight_update
from shared.models.decoder import Decoder
from shared.models.decoder_weights import DecoderKeys
from shared.models.weight_update import WeightStage, checksums
from shared.tokens import FinishReason, SamplingParams, StopParams
from tests.helpers.engines import Collector, build_engine, request, tiny_decoder

T = TypeVar("T")
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8], [1, 1, 2, 3, 5, 8, 13, 21, 3, 4, 5])
SAMPLING = SamplingParams(temperature=0.7, seed=11)


def _do(engine: Engine, what: Callable[[WeightControl], T]) -> T:
    future: Future[T] = engine.with_weights(what)
    engine.step()
    return future.result(timeout=0)


def _stage(decoder: Decoder, folder: Path) -> WeightStage:
    stage = WeightStage(decoder, DecoderKeys(), ModelOptions())
    stage.read(folder, LoadFormat.AUTO)
    return stage


def _update(engine: Engine, decoder: Decoder, folder: Path, version: str | None = None) -> None:
    stage = _stage(decoder, folder)
    _do(engine, lambda weights: weights.apply(stage, version))


def _start(engine: Engine, sink: Collector) -> None:
    for key, prompt in enumerate(PROMPTS):
        engine.submit(request(prompt, SAMPLING, StopParams(40)), sink, key)


def _finish(engine: Engine, sink: Collector) -> list[list[int]]:
    for _ in range(400):
        if all(sink.has_ended(key) for key in range(len(PROMPTS))):
            break
        engine.step()
    return [sink.token_ids(key) for key in range(len(PROMPTS))]


def _answers(decoder: Decoder) -> list[list[int]]:
    engine, sink = build_engine(decoder), Collector()
    _start(engine, sink)
    answers = _finish(engine, sink)
    engine.check_idle()
    return answers


def _spans(sink: Collector, key: int) -> list[tuple[str, int]]:
    """Returns each version with the tokens that were drawn before it."""
    spans, count = [], 0
    for event in sink.events[key]:
        if isinstance(event, Delta):
            if event.weight_version is not None:
                spans.append((event.weight_version, count))
            count += len(event.token_ids)
    return spans


def test_after_an_update_answers_are_those_of_the_new_weights(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "old", seed=3)
    old, new = _answers(decoder), _answers(tiny_decoder(tmp_path / "new", seed=4))
    assert old != new
    engine = build_engine(decoder)
    first = Collector()
    _start(engine, first)
    assert _finish(engine, first) == old
    _update(engine, decoder, tmp_path / "new", "v1")
    second = Collector()
    _start(engine, second)
    assert _finish(engine, second) == new, "a prefix of the old weights was reused"
    assert (_spans(first, 0), _spans(second, 0)) == ([("default", 0)], [("v1", 0)])
    engine.check_idle()


@pytest.mark.parametrize("mode", [None, PauseMode.RETRACT])
def test_sequences_that_run_go_on_as_if_the_new_weights_had_always_been(
    mode: PauseMode | None, tmp_path: Path
) -> None:
    decoder, other = tiny_decoder(tmp_path / "old"), tiny_decoder(tmp_path / "new", seed=4)
    engine, sink = build_engine(decoder, poisons_free_pages=True), Collector()
    _start(engine, sink)
    for _ in range(8):
        engine.step()
    if mode is not None:
        assert _do(engine, lambda weights: weights.pause(mode)) == len(PROMPTS)
    before = [sink.token_ids(key) for key in range(len(PROMPTS))]
    assert all(before)
    _update(engine, decoder, tmp_path / "new")
    if mode is not None:
        for _ in range(5):
            engine.step()
        assert [sink.token_ids(key) for key in range(len(PROMPTS))] == before, "it is paused"
        _do(engine, lambda weights: weights.resume())
    answers = _finish(engine, sink)
    engine.check_idle()
    fresh, resumed = build_engine(other), Collector()
    for key, prompt in enumerate(PROMPTS):
        drawn = answers[key][: _spans(sink, key)[1][1]]
        stop = StopParams(40 - len(drawn))
        fresh.submit(request([*prompt, *drawn], SAMPLING, stop), resumed, key)
    rest = _finish(fresh, resumed)
    for key, answer in enumerate(answers):
        num_drawn = _spans(sink, key)[1][1]
        assert 0 < num_drawn < len(answer)
        assert answer[num_drawn:] == rest[key]


def test_a_pause_in_place_keeps_keys_and_values_but_shares_them_no_more(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "old", seed=3)
    new = _answers(tiny_decoder(tmp_path / "new", seed=4))
    engine, sink = build_engine(decoder), Collector()
    _start(engine, sink)
    for _ in range(8):
        engine.step()
    assert _do(engine, lambda weights: weights.pause(PauseMode.IN_PLACE)) == 0
    assert engine.gauges_now().num_running == len(PROMPTS)
    _update(engine, decoder, tmp_path / "new", "v1")
    assert engine.gauges_now().num_running == len(PROMPTS), "nothing was sent back"
    _do(engine, lambda weights: weights.resume())
    _finish(engine, sink)
    again = Collector()
    _start(engine, again)
    assert _finish(engine, again) == new
    engine.check_idle()


def test_an_update_takes_every_sequence_from_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that waits may have been preempted, and a head may have KV of it."""
    decoder = tiny_decoder(tmp_path, seed=3)
    engine, detached = build_engine(decoder, max_running=2), set[int]()

    def apply(weights: WeightControl) -> None:
        detach = weights._detach_sequence

        def note(sequence: Sequence) -> None:
            detached.add(len(sequence.request.prompt_token_ids))
            detach(sequence)

        monkeypatch.setattr(weights, "_detach_sequence", note)
        weights.apply(stage, None)

    stage = _stage(decoder, tmp_path)
    _start(engine, Collector())
    for _ in range(5):
        engine.step()
    assert engine.gauges_now().num_waiting == 1
    _do(engine, apply)
    assert detached == set(map(len, PROMPTS))


def test_an_abort_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    engine, sink = build_engine(tiny_decoder(tmp_path / "old"), max_running=2), Collector()
    _start(engine, sink)
    for _ in range(5):
        engine.step()
    assert _do(engine, lambda weights: weights.pause(PauseMode.ABORT)) == len(PROMPTS)
    for key in range(len(PROMPTS)):
        assert sink.finished(key).reason is FinishReason.CANCELLED
    late = Collector()
    _start(engine, late)
    engine.step()
    assert late.events == {}, "it waits"
    _do(engine, lambda weights: weights.resume())
    assert all(_finish(engine, late))
    engine.check_idle()


def test_the_cache_is_flushed_only_when_nothing_runs_or_waits(tmp_path: Path) -> None:
    engine, sink = build_engine(tiny_decoder(tmp_path / "old")), Collector()
    _start(engine, sink)
    engine.step()
    with pytest.raises(FailedPrecondition, match="3 requests run and 0 wait"):
        _do(engine, lambda weights: weights.flush_if_idle())
    _finish(engine, sink)
    assert _do(engine, lambda weights: weights.flush_if_idle()) > 0


def test_half_an_update_changes_nothing(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "old")
    old, before = _answers(decoder), checksums(decoder)
    engine = build_engine(decoder)
    stage = WeightStage(decoder, DecoderKeys(), ModelOptions())
    stage.add("model.layers.0.self_attn.q_proj.weight", torch.zeros(32, 32))
    with pytest.raises(CheckpointError, match="lacks"):
        _do(engine, lambda weights: weights.apply(stage, "half"))
    assert checksums(decoder) == before
    assert _do(engine, lambda weights: weights.version.name) == "default"
    sink = Collector()
    _start(engine, sink)
    assert _finish(engine, sink) == old


def test_an_update_that_finds_no_room_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(tmp_path / "old")
    tiny_decoder(tmp_path / "new", seed=4)
    old, before, engine = _answers(decoder), checksums(decoder), build_engine(decoder)
    stage = _stage(decoder, tmp_path / "new")

    def full(num_bytes: int, device: torch.device) -> None:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(weight_update, "_check_room", full)
        with pytest.raises(FailedPrecondition, match="no room on cpu for one layer") as failure:
            _do(engine, lambda weights: weights.apply(stage, "large"))
    assert failure.value.reason == "WEIGHT_UPDATE_NO_ROOM"
    assert checksums(decoder) == before
    assert _do(engine, lambda weights: weights.version.name) == "default"
    sink = Collector()
    _start(engine, sink)
    assert _finish(engine, sink) == old
    _do(engine, lambda weights: weights.apply(stage, "large"))
    assert checksums(decoder) != before, "what was gathered is there when room is"


def test_an_update_that_breaks_off_holds_the_engine_until_a_whole_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder(tmp_path / "old")
    tiny_decoder(tmp_path / "new", seed=4)
    engine, sink = build_engine(decoder), Collector()
    broken = _stage(decoder, tmp_path / "new")
    put, calls = WeightStage._overwrite_layer, []

    def breaks(self: WeightStage, index: int, tensors: dict[str, torch.Tensor]) -> None:
        calls.append(index)
        if len(calls) == 2:
            raise OSError("the disk is gone")
        put(self, index, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(WeightStage, "_overwrite_layer", breaks)
        with pytest.raises(OSError, match="the disk is gone"):
            _do(engine, lambda weights: weights.apply(broken, "broken"))
    _start(engine, sink)
    for _ in range(5):
        engine.step()
    assert sink.events == {}, "it computes with half of each"
    part = WeightStage(decoder, DecoderKeys(), ModelOptions())
    part.add("model.norm.weight", torch.ones(32))
    _do(engine, lambda weights: weights.apply(part, "part"))
    with pytest.raises(FailedPrecondition, match="send a whole update"):
        _do(engine, lambda weights: weights.resume())
    assert sink.events == {}
    _update(engine, decoder, tmp_path / "new")
    assert _finish(engine, sink) == _answers(tiny_decoder(tmp_path / "new", seed=4))


def test_a_checker_sees_what_an_update_leaves_out(tmp_path: Path) -> None:
    decoder = tiny_decoder(tmp_path / "old")
    engine = build_engine(decoder)
    with pytest.raises(FailedPrecondition, match="no snapshot"):
        _do(engine, lambda weights: weights.compare())
    num_tensors = _do(engine, lambda weights: weights.snapshot())
    _do(engine, lambda weights: weights.pause(PauseMode.RETRACT))
    assert _do(engine, lambda weights: weights.reset()) == num_tensors
    assert len(_do(engine, lambda weights: weights.compare())) == num_tensors
    _update(engine, decoder, tmp_path / "old")
    assert _do(engine, lambda weights: weights.compare()) == ()
