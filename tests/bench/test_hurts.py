"""What a hurt is, when it happens, and what is left after it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.draft import __main__ as draft_entry
from services.draft import attach_client
from services.draft.drafter_factory import _sharing
from services.draft.events import CandidatesReady, WorkerIdentity
from services.draft.link_codec import request_from_output
from services.draft.settings import DraftSettings
from services.target import __main__ as target_entry
from shared.candidate_columns import CandidateColumns
from shared.runtime import ring_memory
from shared.telemetry.start_up import open_round_log
from shared.tokens import Candidate, DraftReport, TokenTree
from tests.bench.disorder import Disorder
from tests.bench.hurts import HurtPass, report, unhurt
from tests.bench.passes import Case, Pass
from tests.bench.service import obey
from tests.bench.session import Answer
from tests.bench.switched_log import LAST_RECORD, SwitchedRoundLog
from tests.bench.trigger import Trigger


def _pass(*arrivals: tuple[float, int], last_token: int = 1) -> Pass:
    return Pass((Answer((last_token,), 1, arrivals),), 2.0, {})


def test_speed_and_pauses_are_those_since_the_hurt() -> None:
    whole = _pass((1.0, 4), (9.0, 4), (10.5, 4), (11.0, 2), (13.0, 4))
    hurt = HurtPass("killed", whole, since_s=10.0, concurrency=1)
    assert hurt.tokens_per_s == pytest.approx(10 / 3)
    assert hurt.longest_pause_s == 2.0


def test_a_draft_that_was_never_hurt_has_no_speed() -> None:
    assert HurtPass("killed", _pass((1.0, 4)), float("inf"), 1).tokens_per_s == 0.0


def test_speed_is_that_of_a_whole_batch() -> None:
    """The third answer begins when the first one ends; the second one is the last of a batch."""
    ends = ((2.0, 8), (3.0, 8)), ((2.0, 4), (5.0, 4)), ((4.0, 2), (9.0, 2))
    whole = Pass(tuple(Answer((1,), 1, arrivals) for arrivals in ends), 9.0, {})
    assert HurtPass("killed", whole, since_s=1.0, concurrency=2).tokens_per_s == 26 / 4
    assert HurtPass("killed", whole, since_s=1.0, concurrency=1).tokens_per_s == 28 / 8


def test_answers_are_held_against_plain_ones() -> None:
    # Plain decoding counts from its 16th token on: 4 tokens in 2 s.
    plain = _pass((1.0, 10), (2.0, 6), (4.0, 4))
    other = HurtPass("frozen", _pass((1.0, 1), (1.5, 4), last_token=2), 1.0, 1)
    title, *rows = report(Case(0.0, 1), [other], plain).splitlines()
    assert title == "temperature 0, 1 at a time"
    assert rows[1].split()[-4:] == ["2.0", "1.00", "2000", "1/1"]
    assert rows[2].split()[1:] == ["8.0", "4.00", "500", "0/1;", "0,", "token", "0:", "2/1"]


def test_a_pass_that_is_not_hurt_counts_from_as_many_tokens_of_each_sequence() -> None:
    whole = _pass((1.0, 16), (2.0, 16), (3.0, 1))
    assert unhurt("", whole, Case(0.0, 1)).since_s == 1.0
    assert unhurt("", whole, Case(0.0, 2)).since_s == 2.0


def test_what_the_bench_replaces_in_the_services_is_there() -> None:
    assert attach_client.request_from_output is request_from_output
    for entry in (target_entry, draft_entry):
        assert entry.open_round_log is open_round_log


def test_a_distant_draft_offers_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_memory, "host_id", lambda: "")
    near = WorkerIdentity("draft", "model", "STANDALONE", None, 8, 100, None)
    assert not _sharing(near, DraftSettings(device="cpu")).host_id


async def test_a_trigger_acts_once_after_enough_tokens() -> None:
    acts: list[str] = []

    async def act() -> None:
        acts.append("hurt")

    trigger = Trigger(act, num_tokens=5)
    trigger.count(4)
    await trigger.done()
    assert not acts
    assert trigger.at_s == float("inf")
    for _ in range(3):
        trigger.count(1)
    await trigger.done()
    assert acts == ["hurt"]
    assert trigger.at_s < float("inf")


def _output(*rounds: int) -> CandidatesReady:
    tree = TokenTree((1,), (None,))
    candidates = [Candidate(7, number, 3, tree) for number in rounds]
    return CandidatesReady(1, CandidateColumns.of(candidates), DraftReport(None, None))


def test_disorder_brings_every_candidate_twice_and_loses_none() -> None:
    disorder = Disorder()
    sent = [_output(0, 1), _output(2, 3, 4), _output(), _output(5)]

    def rounds_said() -> list[list[int]]:
        return [list(disorder.request(each).candidates.rounds) for each in sent]

    assert rounds_said() == [[0, 1], [2, 3, 4], [], [5]]
    disorder.turn(is_on=True)
    found = rounds_said()
    assert [sorted(each) for each in found] == [[0, 1], [0, 1, 2, 3, 4], [2, 3, 4], [5]]
    assert any(each != sorted(each) for each in found)


def test_a_log_is_written_while_its_switch_is_on(tmp_path: Path) -> None:
    log = SwitchedRoundLog(tmp_path / "rounds.jsonl")
    log.instant("early")
    obey(["log on\n"], {"log": log})
    log.span("step", 0.5, rows=4)
    obey(["log off\n"], {"log": log})
    log.instant("late")
    # Not closed: what was noted is there all the same.
    names = [json.loads(line)["name"] for line in log_lines(tmp_path)]
    log.close()
    assert names == ["step", LAST_RECORD]


def log_lines(folder: Path) -> list[str]:
    return (folder / "rounds.jsonl").read_text().splitlines()
