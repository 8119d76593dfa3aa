"""An engine with a lent head takes rounds, or steps plainly, as its controller finds to pay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch

from services.target.admin_service import attachment_message, gauge_values
from services.target.engine import Engine
from services.target.requests.request import GenerationRequest
from services.target.rounds.policy import LanePolicy
from services.target.rounds.round_shapes import RoundShapes
from services.target.step_report import StepReport
from services.target.throughput import CostTable
from shared.runtime.round_runner import RoundRunner
from shared.tokens import SamplingParams, StopParams, TreeShape
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import (
    Collector,
    build_engine,
    request,
    run_plain,
    settle,
)
from tests.helpers.model_time import ModelClock, TimedRun, TimedRunner, run_timed
from tests.helpers.shared_head_rounds import SilentDraft, sharing_head

CPU = torch.device("cpu")
# Of 20 tokens that the head knows; trained for nothing, it hits as often as it is broad.
TREE, NARROW, CHAIN = TreeShape(1, 16, 17), TreeShape(1, 8, 9), TreeShape(2, 1, 3)
OTHER_TREES = {NARROW: 8, CHAIN: 8}
NUM_TOKENS = 70
PLAIN_S = 0.01
MOST_REQUESTS = 7


@dataclass(frozen=True)
class Costs:
    """Seconds of a round by its shape and sequences; a plain step takes `PLAIN_S`."""

    round_s: Callable[[TreeShape, int], float]


CHEAP = Costs(lambda shape, size: 1.05 * PLAIN_S)
DEAR = Costs(lambda shape, size: 4.0 * PLAIN_S)
CHEAP_NARROW = Costs(lambda shape, size: (4.0 if shape.topk == TREE.topk else 1.05) * PLAIN_S)
CHEAP_ALONE = Costs(lambda shape, size: (1.05 if size < 3 else 4.0) * PLAIN_S)


@dataclass
class Setup:
    """An engine whose forwards and rounds take the time of a cost model."""

    engine: Engine
    clock: ModelClock
    reports: list[StepReport] = field(default_factory=list)

    @property
    def shapes(self) -> Counter[TreeShape | None]:
        """Decode steps by what they were; None is plain."""
        decode = [report for report in self.reports if not report.num_prompt_rows]
        return Counter(report.round_shape for report in decode)

    def serve(self, requests: list[GenerationRequest]) -> TimedRun:
        self.reports.clear()
        return run_timed(self.engine, self.clock, requests)


def _setup(
    pair: Pair,
    costs: Costs,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_pinned: bool = False,
    lends: bool = True,
    plain_s: float = PLAIN_S,
) -> Setup:
    """Returns an engine.

    Args:
        plain_s: seconds of a plain step; the policy begins with `PLAIN_S`.
    """
    clock, launch = ModelClock(), RoundRunner.launch
    reports: list[StepReport] = []

    def timed_launch(runner: RoundRunner, masked: Iterable[int]) -> None:
        clock.advance(costs.round_s(runner.shape.tree, len(runner.sequence_ids)))
        launch(runner, masked)

    def measured(rounds: RoundShapes) -> CostTable:
        sizes = (1, 2, 4, 8)
        each = {
            shape: {size: costs.round_s(shape, size) for size in sizes} for shape in rounds.shapes
        }
        return CostTable(dict.fromkeys(sizes, PLAIN_S), each)

    monkeypatch.setattr(RoundRunner, "launch", timed_launch)
    monkeypatch.setattr(RoundShapes, "costs", measured)
    engine = build_engine(
        pair.decoder,
        num_pages=800,
        on_step=reports.append,
        clock=clock,
        make_runner=lambda decoder, pool: TimedRunner(decoder, pool, clock, lambda rows: plain_s),
    )
    if lends:
        engine.attach(
            sharing_head(
                pair,
                SilentDraft(),
                TREE,
                {} if is_pinned else OTHER_TREES,
                num_pages=700,
                max_context_tokens=190,
                is_pinned=is_pinned,
            )
        )
    return Setup(engine, clock, reports)


def _requests(count: int) -> list[GenerationRequest]:
    stop = StopParams(NUM_TOKENS, ignore_eos=True)
    return [
        request([1 + key, 2, 3], SamplingParams(temperature=0.7 * (key % 2), seed=key), stop)
        for key in range(count)
    ]


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[list[int]]:
    """What plain decoding makes of the most requests that a test has at a time."""
    requests = _requests(MOST_REQUESTS)
    collector = run_plain(pair.decoder, requests)
    return [collector.token_ids(key) for key in range(MOST_REQUESTS)]


def _assert_plain_output(plain: list[list[int]], found: TimedRun, count: int) -> None:
    assert [found.collector.token_ids(key) for key in range(count)] == plain[:count]


def _usual(setup: Setup) -> TreeShape | None:
    return setup.shapes.most_common(1)[0][0]


@pytest.mark.parametrize(("plain_s", "wanted"), [(PLAIN_S, None), (3.0 * PLAIN_S, TREE)])
def test_plain_steps_are_timed_while_they_are_in_force(
    pair: Pair,
    plain: list[list[int]],
    plain_s: float,
    wanted: TreeShape | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LanePolicy, "_consider_probe", lambda *_: None)
    costs = Costs(lambda shape, size: (2.2 if shape == TREE else 9.0) * PLAIN_S)
    setup = _setup(pair, costs, monkeypatch, plain_s=plain_s)
    found = setup.serve(_requests(4))
    _assert_plain_output(plain, found, 4)
    assert setup.shapes[None] > 0
    assert _usual(setup) == wanted


# Four at a time of the other two are served below.
@pytest.mark.parametrize(
    ("costs", "wanted", "count"),
    [(CHEAP, TREE, 1), (CHEAP_NARROW, NARROW, 1), (CHEAP_NARROW, NARROW, 4), (DEAR, None, 1)],
    ids=["wide", "narrow", "narrow for four", "plain"],
)
def test_it_chooses_what_pays_and_changes_no_token(
    pair: Pair,
    plain: list[list[int]],
    costs: Costs,
    wanted: TreeShape | None,
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = _setup(pair, costs, monkeypatch)
    for _ in range(2):
        _assert_plain_output(plain, setup.serve(_requests(count)), count)
    assert _usual(setup) == wanted


def test_plain_steps_where_rounds_lose_and_trees_where_they_win(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine, alone and with seven at a time, in turn."""
    setup = _setup(pair, CHEAP_ALONE, monkeypatch)
    for count, is_plain in ((1, False), (7, True), (1, False)):
        for _ in range(2):
            _assert_plain_output(plain, setup.serve(_requests(count)), count)
        assert (_usual(setup) is None) == is_plain


def test_it_is_no_slower_than_plain_where_rounds_lose_and_faster_where_they_win(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def duration_s(
        costs: Costs, wanted: TreeShape | None, *, lends: bool = True, is_pinned: bool = False
    ) -> float:
        """Of the second time that the same requests are served."""
        with monkeypatch.context() as patch:
            setup = _setup(pair, costs, patch, lends=lends, is_pinned=is_pinned)
            for _ in range(2):
                found = setup.serve(_requests(4))
                _assert_plain_output(plain, found, 4)
            assert _usual(setup) == wanted
            return found.duration_s

    plain_s = duration_s(DEAR, None, lends=False)
    assert duration_s(CHEAP, TREE) < 0.9 * plain_s
    assert duration_s(DEAR, None) < 1.1 * plain_s
    # The negative control: the draft's own shape, come what may.
    assert duration_s(DEAR, TREE, is_pinned=True) > 2.0 * plain_s


def test_a_pinned_shape_is_left_alone(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = _setup(pair, DEAR, monkeypatch, is_pinned=True)
    _assert_plain_output(plain, setup.serve(_requests(2)), 2)
    assert set(setup.shapes) == {TREE}


def test_requests_that_pin_or_disable_go_the_general_path(
    pair: Pair, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = _setup(pair, CHEAP, monkeypatch)
    for other in (
        replace(_requests(1)[0], num_draft_steps=2),
        replace(_requests(1)[0], speculation_disabled=True),
    ):
        _assert_plain_output(plain, setup.serve([other]), 1)
        assert set(setup.shapes) == {None}


@pytest.mark.parametrize(
    ("costs", "wanted"), [(CHEAP, (16, 3, 0, 1)), (DEAR, (0, 0, 3, 0))], ids=["wide", "plain"]
)
def test_the_decision_is_told(
    pair: Pair,
    costs: Costs,
    wanted: tuple[int, int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup, collector = _setup(pair, costs, monkeypatch), Collector()
    setup.serve(_requests(3))
    for key, each in enumerate(_requests(3)):
        setup.engine.submit(each, collector, key)
    told: Counter[tuple[float, ...]] = Counter()
    gauges: Mapping[str, float] = {}
    for _ in range(40):
        setup.engine.step()
        gauges = gauge_values(setup.engine.gauges_now())
        [status] = setup.engine.statuses_now()
        names = ("round_topk", "drafted_for_sequence_count", "paused_sequence_count")
        figures = [gauges[name] for name in names]
        told[*figures, attachment_message(status).wanted_step_count] += 1
    assert told.most_common(1)[0][0] == wanted
    assert gauges["round_ms_of_1_16_17_for_4"] == pytest.approx(1e3 * costs.round_s(TREE, 4))
    paused = sum(report.speculation.num_paused_rounds for report in setup.reports)
    assert (paused > 30) == (costs is DEAR)
    for key in range(3):
        setup.engine.cancel(collector, key)
    settle(setup.engine)


def test_a_shape_without_memory_gives_way_to_others(
    pair: Pair,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = _setup(pair, CHEAP, monkeypatch)
    launch = RoundRunner.launch

    def launch_narrow(runner: RoundRunner, masked: Iterable[int]) -> None:
        if runner.shape.tree == TREE and len(runner.sequence_ids) > 1:
            raise torch.OutOfMemoryError("no room")
        launch(runner, masked)

    monkeypatch.setattr(RoundRunner, "launch", launch_narrow)
    for _ in range(2):
        _assert_plain_output(plain, setup.serve(_requests(3)), 3)
    assert _usual(setup) == NARROW
    assert "no memory for rounds of 3 sequences with trees of 1 steps, 16 wide" in caplog.text
    for _ in range(2):
        _assert_plain_output(plain, setup.serve(_requests(1)), 1)
    assert _usual(setup) == TREE
