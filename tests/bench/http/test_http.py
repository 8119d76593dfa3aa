"""The bench over HTTP: its figures, its table, its client, and what it says of a dead stack."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.serve_line import split_line
from tests.bench.http.__main__ import parse, plan_of, widened_models
from tests.bench.http.answers import (
    Answer,
    Figures,
    Window,
    closed_rate,
    figures_of,
    knee,
    whole,
)
from tests.bench.http.client import Connection, Server
from tests.bench.http.load import Load, Traffic, clients, first_lengths
from tests.bench.http.prompts import prompts
from tests.bench.http.report import HEADER, Row, StepCost, markdown
from tests.bench.http.stack import MODES, Models, Stack, StackDied, log_tails

_USAGE = (
    b'{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":6,"total_tokens":14,'
    b'"prompt_tokens_details":{"cached_tokens":4},"completion_tokens_details":'
    b'{"accepted_prediction_tokens":3,"rejected_prediction_tokens":0}},'
    b'"metrics":{"speculative_decoding":{"num_spec_steps":2}}}'
)
_EVENTS = b'data: {"choices":[{"text":"a"}],"usage":null}\n\ndata: %b\n\ndata: [DONE]\n\n' % _USAGE


def _response(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@asynccontextmanager
async def _server(
    respond: Callable[[int], bytes], *, keeps: bool = True, bodies: list[bytes] | None = None
) -> AsyncIterator[Server]:
    """Yields a server that answers the n-th request with `respond(n)`.

    Args:
        keeps: connections outlive an answer.
        bodies: takes those of requests.
    """
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = await reader.readexactly(int(head.rpartition(b": ")[2]))
                if bodies is not None:
                    bodies.append(body)
                writer.write(respond(next(numbers)))
                await writer.drain()
                if not keeps:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield Server("127.0.0.1", server.sockets[0].getsockname()[1], "demo")


def _answer(first_s: float, last_s: float, num_tokens: int, **more: Any) -> Answer:
    return Answer(
        due_s=first_s - 0.5, first_s=first_s, last_s=last_s, num_tokens=num_tokens, **more
    )


def test_a_window_counts_the_part_of_an_answer_within_it() -> None:
    answers = [
        _answer(0.0, 4.0, 40),  # a quarter of it within
        _answer(3.0, 5.0, 10, num_accepted=5, num_verified=5, num_prompt=10, num_cached=5),
        _answer(9.0, 10.0, 100),  # behind it
        Answer(due_s=3.0, first_s=3.1, last_s=3.1, error="HTTP/1.1 429"),
    ]
    figures = figures_of(answers, Window(3.0, 5.0))
    assert figures.tokens_per_s == pytest.approx((10 + 10) / 2)
    assert figures.requests_per_s == pytest.approx(1 / 2)  # the other ends as it closes
    assert figures.tokens_per_round == pytest.approx(20 / 15)
    assert figures.verified_share == pytest.approx(5 / 15)
    assert figures.round_ms == pytest.approx(1000 * 3.0 / 15)
    assert figures.first_ms == {50: pytest.approx(500), 99: pytest.approx(500)}
    assert figures.num_running == pytest.approx((1.0 + 2.0) / 2)
    assert figures.cached_share == pytest.approx(0.5)
    assert (figures.num_failed, figures.first_error) == (1, "HTTP/1.1 429")


def test_a_window_without_answers_has_no_times() -> None:
    figures = figures_of([], Window(0.0, 1.0))
    assert (figures.tokens_per_s, figures.round_ms, figures.first_ms) == (0.0, None, {})


def test_a_burst_takes_from_the_first_request_to_the_last_token() -> None:
    assert whole([_answer(1.0, 4.0, 1), _answer(2.0, 3.0, 1)]) == Window(0.5, 4.0)


def _figures(tokens_per_s: float) -> Figures:
    return figures_of([_answer(0.0, 1.0, round(tokens_per_s))], Window(0.0, 1.0))


def test_the_knee_has_the_most_power() -> None:
    points = [(1, _figures(100)), (8, _figures(700)), (64, _figures(1400)), (256, _figures(1500))]
    assert knee(points).tokens_per_s == pytest.approx(700)  # 61,250 to 30,625, 10,000 and 8,789


def test_an_open_loop_stands_beside_the_closed_one_between_its_points() -> None:
    points = [(8.0, _figures(800)), (4.0, _figures(600))]
    found = [closed_rate(points, running) for running in (2.0, 4.0, 6.0, 8.0, 9.0)]
    assert found == [pytest.approx(x) for x in (300, 600, 700, 800)] + [None]


def test_first_answers_of_a_loop_end_one_by_one() -> None:
    assert first_lengths(4, 256) == [64, 128, 192, 256]
    assert first_lengths(1, 256) == [256]
    assert min(first_lengths(256, 48)) == 1


def test_prompts_have_their_length_and_do_not_repeat() -> None:
    drawn = [each for seed in (1, 2) for each in itertools.islice(prompts(64, seed), 40)]
    assert {len(each) for each in drawn} == {64}
    assert len({tuple(each) for each in drawn}) == len(drawn)


def test_repeated_prompts_are_the_same_for_every_seed() -> None:
    drawn = [each for seed in (1, 2) for each in itertools.islice(prompts(64, seed, 3), 9)]
    assert len({tuple(each) for each in drawn}) == 3


def test_the_table_sets_a_mode_beside_plain_at_the_same_load() -> None:
    cost = StepCost(step_ms=5.0, host_ms=0.25)
    rows = [
        Row("plain", "8", 1, _figures(100), cost, 0.1),
        Row("eagle3", "8", 1, _figures(250), cost, 0.1, "a note"),
        Row("eagle3", "8", 2, _figures(300), StepCost(), 0.1),
    ]
    lines = [line[2:-2].split(" | ") for line in markdown(rows).splitlines()]
    assert {len(line) for line in lines} == {len(HEADER)}
    over = HEADER.index("over plain")
    assert [line[over] for line in lines[2:]] == ["1.00 ×", "2.50 ×", "–"]
    assert lines[3][HEADER.index("host, ms a step")] == "0.250"
    assert lines[4][HEADER.index("ms a step")] == "–"


def test_a_step_costs_what_the_counters_gained() -> None:
    names = ("steps", "rounds", "busy_seconds", "host_gap_seconds")
    before, after = (
        dict(zip((f"outrider_target_{name}_total" for name in names), values, strict=True))
        for values in ((10.0, 100.0, 1.0, 0.5), (20.0, 300.0, 1.5, 0.502))
    )
    cost = StepCost.of(before, after)
    assert cost.step_ms == pytest.approx(50.0)
    assert cost.host_ms == pytest.approx(0.2)
    assert cost.lane_us == pytest.approx(10.0)
    own = StepCost.of(before, after | {"outrider_target_host_seconds_total": 0.01})
    assert own.host_ms == pytest.approx(1.0)
    assert StepCost.of({}, {}) == StepCost()


async def test_the_client_reads_counts_and_keeps_its_connection() -> None:
    async with _server(lambda number: _response(_EVENTS)) as server:
        connection = Connection(server)
        answers = [await connection.ask([1, 2], 6) for _ in range(2)]
        connection.close()
    for answer in answers:
        assert answer.error is None
        assert (answer.num_tokens, answer.num_accepted, answer.num_rounds) == (6, 3, 3)
        assert (answer.num_prompt, answer.num_cached, answer.num_verified) == (8, 4, 2)
        assert answer.due_s <= answer.first_s <= answer.last_s


async def test_the_client_asks_again_where_its_connection_was_closed_meanwhile() -> None:
    async with _server(lambda number: _response(_EVENTS), keeps=False) as server:
        connection = Connection(server)
        answers = [await connection.ask([1], 6) for _ in range(3)]
        connection.close()
    assert [each.error for each in answers] == [None] * 3


@pytest.mark.parametrize(
    ("response", "words"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n", "429"),
        (_response(b'data: {"error":{"message":"lost"}}\n\n'), "no usage at the end"),
        (b"", "closed the connection"),
    ],
)
async def test_the_client_says_why_a_request_failed(response: bytes, words: str) -> None:
    async with _server(lambda number: response, keeps=bool(response)) as server:
        connection = Connection(server)
        answer = await connection.ask([1], 6)
        connection.close()
    assert answer.error is not None
    assert words in answer.error


async def test_processes_of_clients_carry_every_load() -> None:
    async with _server(lambda number: _response(_EVENTS)) as server, clients(2) as processes:
        load = Load(processes, server, Traffic(prompt_tokens=16, num_tokens=6))
        burst = await load.burst(5)
        for window_s in (0.05, 0.5, 5.0):  # in which a busy machine may bring no answer
            closed = await load.closed(3, num_windows=2, window_s=window_s)
            assert [round(each.length_s, 6) for each in closed.windows] == [window_s] * 2
            if all(figures_of(closed.answers, each).tokens_per_s > 0 for each in closed.windows):
                break
        else:
            pytest.fail("windows without an answer")
        arrivals = await load.open(200.0, warm_s=0.05, window_s=0.1)
    assert len(burst.answers) == 5
    assert figures_of(burst.answers, burst.windows[0]).tokens_per_s > 0
    assert 5 <= len(arrivals.answers) <= 80  # 30 on average
    assert not [each for each in (*burst.answers, *closed.answers, *arrivals.answers) if each.error]


async def test_some_requests_have_fields_of_their_own() -> None:
    bodies: list[bytes] = []
    async with (
        _server(lambda number: _response(_EVENTS), bodies=bodies) as server,
        clients(1) as processes,
    ):
        traffic = Traffic(16, 6, fields={"regex": "a*"}, fields_every=2, timeout_s=30.0)
        await Load(processes, server, traffic).burst(4)
    assert sorted(orjson.loads(body).get("regex", "") for body in bodies) == ["", "", "a*", "a*"]


async def test_a_stack_that_dies_ends_the_work_and_shows_its_logs(tmp_path: Path) -> None:
    (tmp_path / "target.log").write_text("out of memory\n")
    launcher = await asyncio.create_subprocess_exec("false")
    stack = Stack(Server("127.0.0.1", 1, "demo"), 0.0, 1, tmp_path, launcher)
    with pytest.raises(StackDied, match=r"ended with 1\n== .*target.log\nout of memory"):
        await stack.watched(asyncio.Event().wait())
    assert await stack.counters() == {}


def test_only_the_last_lines_of_a_log_are_shown(tmp_path: Path) -> None:
    (tmp_path / "target.log").write_text("".join(f"line {n}\n" for n in range(100)))
    assert "line 60\n" in log_tails(tmp_path)
    assert "line 59\n" not in log_tails(tmp_path)


def test_a_mode_has_its_flags_and_its_shape() -> None:
    models = Models(Path("wide"), {"EAGLE3": Path("head")})
    plain = ["--speculative-algorithm", "NONE", "--model-path", "wide"]
    assert MODES["plain"].flags(models) == plain
    assert MODES["ngram"].flags(models)[-1] == "embedded", "it has no folder"
    speculating = MODES["eagle3"].flags(models)
    assert speculating[-2:] == ["--speculative-draft-model-path", "head"]
    shape = ["--speculative-num-steps", "5", "--speculative-eagle-topk", "1"]
    shape += ["--speculative-num-draft-tokens", "6"]
    assert MODES["eagle3-chain"].flags(models) == speculating + shape


async def test_each_algorithm_has_a_wide_draft(tmp_path: Path) -> None:
    algorithms = {mode.algorithm for mode in MODES.values()}
    async with widened_models(tmp_path, "trial", algorithms) as models:
        assert models.drafts.keys() == algorithms - {"NONE", "NGRAM"}
        assert all((folder / "config.json").exists() for folder in models.drafts.values())


def test_the_launcher_knows_every_flag() -> None:
    for mode in MODES.values():
        models = Models(Path("wide"), {mode.algorithm: Path("head")})
        assert not split_line(mode.flags(models)).problems


def test_flags_pin_a_shape_and_follow_the_hardware() -> None:
    arguments = ["--shape", "5,8,32", "--open", "", "--serve", "--max-running-requests 256"]
    plan = plan_of(parse(arguments, has_gpu=True))
    assert plan.concurrencies == (1, 8, 32, 64, 128, 256)
    assert "8" in plan.modes[1].flags(Models())
    assert (plan.open_percents, plan.serve_flags) == ((), ("--max-running-requests", "256"))
    with pytest.raises(SystemExit):
        parse(["--modes", "fast"], has_gpu=False)
    assert plan_of(parse([], has_gpu=False)).burst == 8
