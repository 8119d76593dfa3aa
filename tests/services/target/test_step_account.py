"""Where every sequence awaits a draft, the verdicts go out before the step is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.target.drafts.attachments import Attachments
from services.target.engine import Engine
from services.target.step_account import LONGEST_REST_S, StepAccount
from services.target.step_commits import StepCommits
from services.target.step_report import StepReport
from shared.tokens import StopParams, TokenTree
from tests.helpers.engines import ScriptedDraft, build_engine, request, run, tiny_decoder
from tests.helpers.step_reports import step_report

REPORT = step_report()


class _Turn:
    """A turn of one sequence that began at 0 and ends at 1; a rest lasts until 3."""

    def __init__(self) -> None:
        self.now_s = 1.0
        self.rests_s: list[float] = []
        self.reported: list[StepReport] = []
        self.attachments = Attachments()
        self.attachments.controller.begin_step([], [], 0.0, num_plain=1, num_stepping=1, num_late=0)
        unused: Any = None
        self.commits = StepCommits(
            committer=unused,
            attachments=unused,
            fallback_order=unused,
            clock=unused,
            forget=unused,
            release=unused,
        )

    def end(self, *reports: StepReport, idle_s: float) -> None:
        for report in reports:
            self.commits.report(report)
        account = StepAccount(
            self.commits, self.attachments, lambda: self.now_s, self.reported.append, self._rest
        )
        account.end(0.0, is_timed=True, idle_s=idle_s)

    def _rest(self, longest_s: float) -> None:
        self.rests_s.append(longest_s)
        self.now_s = 3.0


def test_a_rest_counts_as_waiting_and_not_as_the_steps_time() -> None:
    turn = _Turn()
    turn.end(REPORT, idle_s=10.0)
    assert turn.rests_s == [LONGEST_REST_S]
    assert turn.reported == [REPORT]
    controller = turn.attachments.controller
    assert controller.step_times.measured() == {1: 1.0}
    assert controller.take_counts().waiting_s == 2.0


def test_a_rest_ends_when_a_sequence_waits_no_longer() -> None:
    turn = _Turn()
    turn.end(REPORT, idle_s=LONGEST_REST_S / 2)
    assert turn.rests_s == [LONGEST_REST_S / 2]


def test_there_is_no_rest_where_anything_is_to_do_or_nobody_was_told() -> None:
    turn = _Turn()
    turn.end(REPORT, idle_s=0.0)
    turn.end(idle_s=10.0)
    assert not turn.rests_s
    assert turn.reported == [REPORT]


@pytest.mark.parametrize(
    ("answers", "num_plain", "rests"), [(False, 0, True), (False, 1, False), (True, 0, False)]
)
def test_an_engine_rests_only_while_all_sequences_await_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, num_plain: int, rests: bool
) -> None:
    rests_s: list[float] = []
    monkeypatch.setattr(Engine, "_rest", lambda engine, longest_s: rests_s.append(longest_s))
    engine = build_engine(tiny_decoder(tmp_path))
    ScriptedDraft(
        engine,
        lambda tokens: TokenTree((1,), (None,), (-0.5,)),
        disturb=lambda batch: batch if answers else [],
        wait_s=20.0,
    ).attach()
    plain = [request([4, 5, 6], stop=StopParams(150), speculation_disabled=True)] * num_plain
    run(engine, [request([1, 2, 3], stop=StopParams(6)), *plain])
    assert bool(rests_s) == rests
