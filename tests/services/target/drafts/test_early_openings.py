"""On a CPU a draft may read a prompt while the target computes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.target.drafts.attachment import DraftMessage
from services.target.engine import Engine
from services.target.step_loop import LONG_PROMPT_TOKENS
from shared.kv.batch import ForwardBatch
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.runtime.runner import ModelRunner, RunnerOutput
from shared.tokens import TokenTree
from tests.helpers.engines import (
    Collector,
    ScriptedDraft,
    build_engine,
    request,
    settle,
    tiny_decoder,
)


class _WatchedRunner(ModelRunner):
    """Notes at each forward how many sequences the draft has been told of."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        super().__init__(decoder, pool)
        self.draft: ScriptedDraft | None = None
        self.num_opened: list[int] = []

    def run(self, batch: ForwardBatch, *, capture_layers: tuple[int, ...] = ()) -> RunnerOutput:
        assert self.draft is not None
        self.num_opened.append(len(self.draft.committed))
        return super().run(batch, capture_layers=capture_layers)


class _FullDraft(ScriptedDraft):
    """Does not read its messages."""

    def send(self, message: DraftMessage) -> bool:
        return False


def _start(
    tmp_path: Path, num_tokens: int, draft_type: type[ScriptedDraft] = ScriptedDraft
) -> tuple[Engine, _WatchedRunner, ScriptedDraft, Collector]:
    """Returns an engine with a draft and a request of `num_tokens` prompt tokens."""
    runners: list[_WatchedRunner] = []

    def make_runner(decoder: Decoder, pool: KvPool) -> ModelRunner:
        runners.append(_WatchedRunner(decoder, pool))
        return runners[0]

    engine = build_engine(
        tiny_decoder(tmp_path), max_step_rows=2 * LONG_PROMPT_TOKENS, make_runner=make_runner
    )
    draft = draft_type(engine, _last_again)
    runners[0].draft = draft
    draft.attach()
    collector = Collector()
    engine.submit(request([1 + i % 7 for i in range(num_tokens)]), collector, 0)
    return engine, runners[0], draft, collector


def _last_again(tokens: list[int]) -> TokenTree:
    return TokenTree.chain([tokens[-1]])


@pytest.mark.parametrize(
    ("num_tokens", "is_early"), [(LONG_PROMPT_TOKENS, True), (LONG_PROMPT_TOKENS - 1, False)]
)
def test_a_draft_is_told_of_a_long_prompt_before_the_target_computes_it(
    tmp_path: Path, num_tokens: int, *, is_early: bool
) -> None:
    engine, runner, draft, collector = _start(tmp_path, num_tokens)
    while not runner.num_opened:
        engine.step()
    assert runner.num_opened == [int(is_early)]
    assert len(draft.committed) == 1
    settle(engine)
    assert len(collector.token_ids(0)) == 24


def test_a_draft_that_does_not_read_is_dropped_when_the_prompt_is_computed(tmp_path: Path) -> None:
    engine, runner, draft, collector = _start(tmp_path, LONG_PROMPT_TOKENS, _FullDraft)
    while not runner.num_opened:
        engine.step()
    assert draft.is_closed
    assert not engine.statuses_now()
    settle(engine)
    assert len(collector.token_ids(0)) == 24
