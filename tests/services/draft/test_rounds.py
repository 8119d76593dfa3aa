"""What is answered, in which order, and what is given up when memory is short."""

from __future__ import annotations

import threading

import pytest

from services.draft.drafters.drafter import Proposal, VerifiedTree
from services.draft.drafters.ngram import NgramDrafter
from services.draft.engine import DraftEngine
from services.draft.events import (
    CandidatesReady,
    Event,
    LinkClosed,
    LinkOpened,
    LinkTerms,
    Output,
    Probe,
    ProbeDone,
    RoundResult,
    RoundsDecided,
    SequencesClosed,
    SequencesOpened,
    SequencesReleased,
)
from services.draft.rounds import IDLE_S, Rounds
from services.draft.sequence import DraftSequence, SequenceKey, drop_unknown_tokens
from services.draft.sequence_table import SequenceTable
from shared.candidate_columns import CandidateColumns
from shared.ngram import NgramOptions
from shared.tokens import (
    ANY_TREE,
    EMPTY_TREE,
    NO_TREE,
    Candidate,
    OpenedSequence,
    Outcome,
    SamplingParams,
    TokenTree,
    TreeRequest,
    TreeShape,
    Verdict,
)
from tests.services.draft.scripted_drafter import ScriptedDrafter

SHAPE = TreeShape(num_steps=2, topk=1, num_draft_tokens=3)
CHUNK = 100
LINK = 1


class Bench:
    """Rounds over a scripted drafter, without a thread."""

    def __init__(self, drafter: ScriptedDrafter | None = None, *, max_sequences: int = 100) -> None:
        self.drafter = drafter or ScriptedDrafter()
        self.outputs: list[Output] = []
        self.now_s, self.tick_s = 0.0, 1.0
        self.table = SequenceTable(
            self.drafter, max_sequences=max_sequences, deliver=self.outputs.append
        )
        self.rounds = Rounds(
            self.table,
            self.drafter,
            SHAPE,
            chunk_tokens=CHUNK,
            deliver=self.outputs.append,
            clock=self._tick,
        )
        self.apply(LinkOpened(LINK, LinkTerms(1_000, 64, 100, mirrors_noise=True)))

    def _tick(self) -> float:
        self.now_s += self.tick_s
        return self.now_s

    def apply(self, *events: Event) -> None:
        for event in events:
            self.table.apply(event)

    def step(self) -> list[Output]:
        """Steps once; returns what it delivered."""
        self.outputs.clear()
        self.rounds.step()
        return list(self.outputs)


def _opened(sequence_id: int, num_tokens: int = 5, *, link: int = LINK, round_: int = 0) -> Event:
    opening = OpenedSequence(sequence_id, [1] * num_tokens, num_tokens, SamplingParams(), round_)
    return SequencesOpened(link, (opening,))


def _decided(
    sequence_id: int,
    round_: int,
    tokens: tuple[int, ...],
    count: int,
    outcome: Outcome = Outcome.MISSED,
    tree_request: TreeRequest = ANY_TREE,
) -> Event:
    verdict = Verdict(sequence_id, round_, outcome, (), tokens, count, tree_request)
    return RoundsDecided(LINK, (RoundResult(verdict),))


def _candidate(
    sequence_id: int, round_: int, count: int, tree: TokenTree | None = None
) -> Candidate:
    """The scripted drafter's candidate for a sequence of `count` tokens, or one with `tree`."""
    expected = TokenTree.chain([count, count + 1]) if tree is None else tree
    return Candidate(sequence_id, round_, count, expected)


def _ready(link: int, *candidates: Candidate) -> CandidatesReady:
    return CandidatesReady(link, CandidateColumns.of(candidates))


def test_an_opened_sequence_gets_a_candidate_for_its_round() -> None:
    bench = Bench()
    bench.apply(_opened(7, 5, round_=3))
    assert bench.step() == [_ready(LINK, _candidate(7, 3, 5))]
    assert bench.step() == [], "answered once"


def test_a_verdict_makes_the_next_round_due_with_the_new_count() -> None:
    bench = Bench()
    bench.apply(_opened(7, 5, round_=3))
    bench.step()
    bench.apply(_decided(7, 3, (9, 9), 7))
    assert bench.step() == [_ready(LINK, _candidate(7, 4, 7))]


def test_only_the_newest_of_several_verdicts_is_answered() -> None:
    bench = Bench()
    bench.apply(_opened(7), _decided(7, 0, (9,), 6), _decided(7, 1, (9, 9), 8))
    assert bench.step() == [_ready(LINK, _candidate(7, 2, 8))]


def test_one_batch_serves_all_links_and_one_message_goes_to_each() -> None:
    bench = Bench()
    bench.apply(
        LinkOpened(2, LinkTerms(1_000, 64, 100, mirrors_noise=True)),
        _opened(7),
        _opened(7, 6, link=2),
        _opened(8),
    )
    assert bench.step() == [
        _ready(LINK, _candidate(7, 0, 5), _candidate(8, 0, 5)),
        _ready(2, _candidate(7, 0, 6)),
    ]
    assert bench.drafter.batches == [[7, 7, 8]]


def test_nothing_is_owed_while_a_tree_pushed_ahead_is_verified() -> None:
    bench = Bench()
    bench.apply(_opened(7))
    bench.step()
    bench.apply(_decided(7, 0, (9,), 6, Outcome.VERIFIED_NEXT_READY))
    assert bench.step() == []
    bench.apply(_decided(7, 1, (9,), 7))
    assert bench.step() == [_ready(LINK, _candidate(7, 2, 7))]


def test_a_paused_sequence_gets_no_tree_until_it_is_wanted_again() -> None:
    bench = Bench()
    bench.apply(_opened(7))
    bench.step()
    for round_ in range(3):
        bench.apply(_decided(7, round_, (9,), 6 + round_, tree_request=NO_TREE))
        assert bench.step() == []
    assert bench.drafter.batches == [[7]], "no forward while paused"
    bench.apply(_decided(7, 3, (9,), 9))
    assert bench.step() == [_ready(LINK, _candidate(7, 4, 9))]


def test_a_verdict_that_pauses_takes_back_what_was_due() -> None:
    bench = Bench()
    bench.apply(_opened(7), _decided(7, 0, (9,), 6, tree_request=NO_TREE))
    assert bench.step() == []


def test_a_sequence_may_be_paused_from_the_start() -> None:
    bench = Bench()
    opening = OpenedSequence(7, [1] * 5, 5, SamplingParams(), 0, tree_request=NO_TREE)
    bench.apply(SequencesOpened(LINK, (opening,)))
    assert bench.step() == []
    bench.apply(_decided(7, 0, (9,), 6))
    assert bench.step() == [_ready(LINK, _candidate(7, 1, 6))]


def test_a_paused_sequence_keeps_up_by_chunks() -> None:
    bench = Bench()
    bench.apply(_opened(7))
    bench.step()
    for round_ in range(150):
        bench.apply(_decided(7, round_, (9,), 6 + round_, tree_request=NO_TREE))
        bench.step()
    # 64 tokens wait until one more comes; the last one is left to start a tree from.
    assert [size for size in bench.drafter.chunks if size] == [64, 64]


def test_a_tree_has_the_shape_that_is_wanted_unless_an_operator_pinned_one() -> None:
    bench = Bench()
    bench.apply(_opened(7))
    bench.step()
    tree_request = TreeRequest(TreeShape(4, 1, 5))
    bench.apply(_decided(7, 0, (9,), 6, tree_request=tree_request))
    (answer,) = bench.step()
    assert isinstance(answer, CandidatesReady)
    assert len(next(iter(answer.candidates)).tree) == 4
    assert answer.report.pinned_shape is None
    bench.rounds.is_pinned = True
    bench.apply(_decided(7, 1, (9,), 7, tree_request=tree_request))
    (answer,) = bench.step()
    assert isinstance(answer, CandidatesReady)
    assert len(next(iter(answer.candidates)).tree) == SHAPE.num_steps
    assert answer.report.pinned_shape == SHAPE


class _NotingLookahead:
    """Notes for how many verdicts it is to prepare; computes nothing."""

    def __init__(self) -> None:
        self.budget = 0
        self.budgets: list[int] = []

    has_work = False

    def begin(self, verified: VerifiedTree) -> None:
        self.budgets.append(verified.budget)

    def resume(self, sequence: DraftSequence) -> bool:
        return False

    def advance(self) -> list[Proposal]:
        return []


def test_the_target_may_want_fewer_verdicts_prepared_for_unless_an_operator_pinned() -> None:
    drafter, lookahead = ScriptedDrafter(), _NotingLookahead()
    drafter.lookahead = lookahead  # type: ignore[assignment]
    bench = Bench(drafter)
    bench.rounds.outcome_budget = 8
    terms = LinkTerms(1_000, 64, 100, mirrors_noise=True, max_conditional=64)
    bench.apply(LinkOpened(LINK, terms), _opened(7))
    bench.step()
    for round_, wanted in enumerate((3, 0, 20, None)):
        bench.apply(
            _decided(
                7, round_, (9,), 6 + round_, tree_request=TreeRequest(SHAPE, num_outcomes=wanted)
            )
        )
        bench.step()
    assert lookahead.budgets == [8, 3, 8, 8], "none of 0"
    bench.rounds.is_pinned = True
    bench.apply(_decided(7, 4, (9,), 10, tree_request=TreeRequest(SHAPE, num_outcomes=0)))
    bench.step()
    assert lookahead.budgets[-1] == 8


class _SlowToBegin(_NotingLookahead):
    """Waits for a device before it knows what to prepare for."""

    has_work = True

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench

    def begin(self, verified: VerifiedTree) -> None:
        self._bench.now_s += 50.0


def test_all_that_a_draft_does_is_accounted_for() -> None:
    bench = Bench()
    bench.drafter.lookahead = _SlowToBegin(bench)  # type: ignore[assignment]
    bench.rounds.outcome_budget = 8
    terms = LinkTerms(1_000, 64, 100, mirrors_noise=True, max_conditional=64)
    bench.apply(LinkOpened(LINK, terms), _opened(7))
    bench.step()
    counters = bench.table.recorder.counters
    # Choosing the verdicts, and between four readings of the clock.
    assert counters.ahead_s == 50.0 + 2.0
    bench.apply(_opened(8, CHUNK + 50))
    bench.step()
    assert (counters.num_caught_up, counters.caught_up_s) == (CHUNK, 1.0)


def test_candidates_come_with_the_time_they_took() -> None:
    bench = Bench()
    bench.apply(_opened(7))
    (answer,) = bench.step()
    assert isinstance(answer, CandidatesReady)
    # By this clock, from before the proposal to after it: three readings later.
    assert answer.report.draft_s == 3.0


def test_a_long_prompt_is_taken_in_by_chunks_between_the_rounds_of_others() -> None:
    bench = Bench()
    bench.apply(_opened(1, 5), _opened(2, 350))
    (first,) = bench.step()
    assert first == _ready(LINK, _candidate(2, 0, 350, EMPTY_TREE), _candidate(1, 0, 5))
    count = 5
    for round_ in range(2):
        bench.apply(_decided(1, round_, (9,), count + 1))
        count += 1
        assert bench.step() == [_ready(LINK, _candidate(1, round_ + 1, count))]
    assert bench.drafter.chunks == [100, 100, 100]
    bench.apply(_decided(2, 0, (9,), 351))
    assert bench.step() == [_ready(LINK, _candidate(2, 1, 351))]


def test_a_prompt_of_one_chunk_is_answered_with_a_tree_not_an_empty_one() -> None:
    bench = Bench()
    bench.apply(_opened(1, CHUNK))
    assert bench.step() == []
    assert bench.step() == [_ready(LINK, _candidate(1, 0, CHUNK))]


def test_step_says_whether_there_is_more_to_do() -> None:
    bench = Bench()
    bench.apply(_opened(1, 250))
    # 250, 150 and then 50 left, which its next proposal takes in.
    assert [bench.rounds.step() for _ in range(3)] == [True, True, False]


def test_a_closed_sequence_is_forgotten() -> None:
    bench = Bench()
    bench.apply(_opened(1), SequencesClosed(LINK, (1, 99)), _decided(1, 0, (9,), 6))
    assert bench.step() == []
    assert len(bench.table) == 0
    assert bench.drafter.num_seen == {}


def test_a_lost_link_takes_its_sequences_with_it() -> None:
    bench = Bench()
    bench.apply(LinkOpened(2, LinkTerms(1_000, 64, 100, mirrors_noise=True)))
    bench.apply(_opened(1), _opened(1, link=2), LinkClosed(LINK))
    assert bench.step() == [_ready(2, _candidate(1, 0, 5))]
    bench.apply(_opened(3))
    assert bench.step() == [], "events of a closed link are dropped"


def test_the_least_recently_used_sequence_is_released_when_memory_is_short() -> None:
    bench = Bench(ScriptedDrafter(num_slots=2))
    for sequence_id in (1, 2):
        bench.apply(_opened(sequence_id))
        bench.step()
    bench.apply(_decided(1, 0, (9,), 6))
    bench.step()
    bench.apply(_opened(3))
    assert bench.step() == [
        SequencesReleased(LINK, (2,)),
        _ready(LINK, _candidate(3, 0, 5)),
    ]
    bench.apply(_decided(2, 0, (9,), 6))
    assert bench.step() == [], "a verdict that crossed the release is dropped"


def test_sequences_of_the_same_batch_are_not_released_for_each_other() -> None:
    bench = Bench(ScriptedDrafter(num_slots=2))
    bench.apply(*(_opened(sequence_id) for sequence_id in (1, 2, 3)))
    released, answered = bench.step()
    assert released == SequencesReleased(LINK, (3,))
    assert answered == _ready(LINK, _candidate(1, 0, 5), _candidate(2, 0, 5))


def test_a_full_roster_releases_what_is_opened_beyond_it() -> None:
    bench = Bench(max_sequences=2)
    bench.apply(*(_opened(sequence_id) for sequence_id in (1, 2, 3)))
    assert bench.outputs == [SequencesReleased(LINK, (3,))]


def test_the_limit_of_a_link_holds_beside_the_workers_own() -> None:
    bench = Bench()
    bench.apply(LinkOpened(2, LinkTerms(1_000, 64, 1, mirrors_noise=True)))
    bench.apply(_opened(1), _opened(1, link=2), _opened(2, link=2))
    assert bench.outputs == [SequencesReleased(2, (2,))]


@pytest.mark.parametrize("tokens", [[], [1, -1], [1, 500]])
def test_a_sequence_the_draft_cannot_embed_is_released(tokens: list[int]) -> None:
    bench = Bench(ScriptedDrafter(vocab_size=500))
    opening = OpenedSequence(1, tokens, len(tokens), SamplingParams(), 0)
    bench.apply(SequencesOpened(LINK, (opening,)))
    assert bench.outputs == [SequencesReleased(LINK, (1,))]


@pytest.mark.parametrize(
    ("tokens", "count"), [((9,), 9), ((500,), 6)], ids=["count differs", "token unknown"]
)
def test_a_verdict_that_does_not_fit_releases_the_sequence(
    tokens: tuple[int, ...], count: int
) -> None:
    bench = Bench(ScriptedDrafter(vocab_size=500))
    bench.apply(_opened(1), _decided(1, 0, tokens, count))
    assert bench.outputs == [SequencesReleased(LINK, (1,))]
    assert bench.step() == []


def test_an_id_used_twice_releases_it() -> None:
    bench = Bench()
    bench.apply(_opened(1), _opened(1))
    assert bench.outputs == [SequencesReleased(LINK, (1,))]
    assert len(bench.table) == 0


def test_trees_keep_to_the_targets_node_limit_and_vocabulary() -> None:
    bench = Bench()
    bench.apply(LinkOpened(2, LinkTerms(6, 2, 9, mirrors_noise=False)))
    bench.rounds.shape = TreeShape(8, 1, 9)
    bench.apply(_opened(1, 4, link=2), _opened(2, 5, link=2))
    (output,) = bench.step()
    assert isinstance(output, CandidatesReady)
    assert [candidate.tree.token_ids for candidate in output.candidates] == [(4, 5), (5,)]


def test_unknown_tokens_go_with_their_descendants() -> None:
    tree = TokenTree((1, 9, 2, 3, 4), (None, None, 0, 1, 2), (-1.0, -2.0, -3.0, -4.0, -5.0))
    kept = TokenTree((1, 2, 4), (None, 0, 1), (-1.0, -3.0, -5.0))
    assert drop_unknown_tokens(tree, 9) == kept
    assert drop_unknown_tokens(tree, 10) is tree


def _probe(num_tokens: int, shape: TreeShape | None = None) -> tuple[Event, Event]:
    opening = Probe(0, [1] * num_tokens, num_tokens, SamplingParams(), 0, shape=shape)
    terms = LinkTerms(1_000, 64, 1, mirrors_noise=True)
    return LinkOpened(9, terms), SequencesOpened(9, (opening,))


def test_a_probe_waits_for_its_prompt_and_is_gone_when_answered() -> None:
    bench = Bench()
    bench.apply(*_probe(250, TreeShape(1, 1, 2)))
    outputs = [output for _ in range(4) for output in bench.step()]
    # Two chunks and the proposal, a second each by this clock.
    assert outputs == [ProbeDone(9, TokenTree.chain([250]), 3.0)]
    assert len(bench.table) == 0


def test_a_probe_never_costs_another_sequence_its_memory() -> None:
    bench = Bench(ScriptedDrafter(num_slots=1))
    bench.apply(_opened(1))
    bench.step()
    bench.apply(*_probe(5))
    assert bench.step() == [ProbeDone(9, None, 0.0)]
    assert len(bench.table) == 1


def test_rounds_serve_a_real_drafter() -> None:
    outputs: list[Output] = []
    drafter = NgramDrafter(NgramOptions())
    table = SequenceTable(drafter, max_sequences=4, deliver=outputs.append)
    rounds = Rounds(table, drafter, SHAPE, chunk_tokens=64, deliver=outputs.append)
    table.apply(LinkOpened(LINK, LinkTerms(100, 64, 100, mirrors_noise=True)))
    opening = OpenedSequence(1, [1, 2, 3, 4, 1, 2], 6, SamplingParams(), 0)
    table.apply(SequencesOpened(LINK, (opening,)))
    rounds.step()
    (output,) = outputs
    assert isinstance(output, CandidatesReady)
    assert next(iter(output.candidates)).tree.token_ids == (3, 4)


def test_prompts_of_two_targets_are_read_by_turns() -> None:
    bench = Bench()
    bench.apply(LinkOpened(2, LinkTerms(1_000, 64, 100, mirrors_noise=True)))
    bench.apply(_opened(1, 1_000), _opened(1, 150, link=2))
    seen: list[int] = []
    for _ in range(4):
        bench.step()
        seen.append(bench.drafter.num_seen[SequenceKey(2, 1)])
    # 150 tokens beside 1,000 are read within four chunks of 100, not after ten.
    assert seen[-1] >= 100


def test_targets_take_turns_where_their_trees_are_too_many_for_a_batch() -> None:
    bench = Bench()
    bench.apply(LinkOpened(2, LinkTerms(1_000, 64, 100, mirrors_noise=True)))
    bench.rounds.shape = TreeShape(8, 1, 9)
    bench.apply(*(_opened(number) for number in range(90)), _opened(0, link=2))
    answers = bench.step()
    assert {each.link for each in answers if isinstance(each, CandidatesReady)} == {1, 2}
    num_first = len(bench.drafter.batches[0])
    assert num_first < 91
    while bench.rounds.step():
        pass
    assert sum(map(len, bench.drafter.batches)) == 91


def test_a_pin_is_announced_to_every_target_at_once() -> None:
    outputs: list[Output] = []
    engine = DraftEngine(ScriptedDrafter(), SHAPE, chunk_tokens=CHUNK, max_sequences=4)
    engine.start()
    heard = threading.Event()

    def deliver(output: Output) -> None:
        outputs.append(output)
        heard.set()

    engine.open_link(LinkTerms(1_000, 64, 100, mirrors_noise=True), deliver)
    engine.set_shape(TreeShape(4, 1, 5), is_pinned=True).result(60)
    assert heard.wait(60)
    engine.stop()
    (output,) = outputs
    assert isinstance(output, CandidatesReady)
    assert len(output.candidates) == 0
    assert output.report.pinned_shape == TreeShape(4, 1, 5)


DEEP = TreeShape(num_steps=4, topk=1, num_draft_tokens=5)


def _reports(outputs: list[Output]) -> list[bool]:
    """Returns what each message says of the draft: whether it is warming."""
    return [each.report.is_warming for each in outputs if isinstance(each, CandidatesReady)]


def _grown(outputs: list[Output]) -> list[TreeShape | None]:
    messages = [each for each in outputs if isinstance(each, CandidatesReady)]
    return [candidate.shape for each in messages for candidate in each.candidates]


def test_a_wish_is_answered_in_the_shape_that_is_prepared_until_its_own_is() -> None:
    bench = Bench()
    bench.drafter.num_unprepared[DEEP] = 2
    bench.apply(_opened(1), _decided(1, 0, (7,), 6, tree_request=TreeRequest(DEEP)))
    assert _grown(bench.step()) == [SHAPE]
    assert bench.drafter.prepared == []
    bench.outputs.clear()
    assert not bench.rounds.prepare(), "a sequence is open"
    assert _reports(bench.outputs) == [True, False]
    assert bench.drafter.prepared == [DEEP]
    assert not bench.rounds.prepare(), "that was its share of the time"
    assert bench.drafter.prepared == [DEEP]
    bench.now_s += 100.0
    bench.rounds.prepare()
    bench.apply(_decided(1, 1, (8,), 7, tree_request=TreeRequest(DEEP)))
    assert _grown(bench.step()) == [DEEP]
    assert not bench.rounds.prepare()
    assert bench.rounds.num_unprepared == 0


def test_a_tree_that_is_owed_goes_before_what_is_prepared() -> None:
    bench = Bench()
    bench.tick_s = 0.001
    bench.drafter.num_unprepared[DEEP] = 1
    bench.apply(_opened(1), _decided(1, 0, (7,), 6, tree_request=TreeRequest(DEEP)))
    bench.step()
    bench.apply(_decided(1, 1, (8,), 7, tree_request=TreeRequest(DEEP)))
    assert not bench.rounds.prepare()
    assert bench.drafter.prepared == []


def test_nobody_open_leaves_all_the_time_to_prepare() -> None:
    bench = Bench()
    bench.drafter.num_unprepared[DEEP] = 3
    bench.apply(_opened(1), _decided(1, 0, (7,), 6, tree_request=TreeRequest(DEEP)))
    bench.step()
    bench.apply(SequencesClosed(LINK, (1,)))
    assert [bench.rounds.prepare() for _ in range(4)] == [True, True, True, False]


def test_targets_hear_first_that_the_very_first_trees_will_be_late() -> None:
    bench = Bench()
    bench.drafter.num_unprepared[SHAPE] = 2
    bench.apply(_opened(1))
    assert _reports(bench.step()) == [True, False, False]
    assert bench.drafter.prepared == [SHAPE, SHAPE]
    assert bench.table.recorder.counters.num_prepared == 1
    assert bench.table.recorder.counters.prepared_s > 0.0


def test_pinned_shape_is_not_named_with_each_tree() -> None:
    bench = Bench()
    bench.rounds.is_pinned = True
    bench.apply(_opened(1))
    assert _grown(bench.step()) == [None]


def test_what_nobody_asked_for_waits_until_nobody_was_there_for_a_while() -> None:
    bench = Bench()
    bench.tick_s, bench.drafter.num_left = 0.0, 2
    bench.apply(_opened(1))
    bench.step()
    assert bench.rounds.prepare_next() is None, "a sequence is open"
    bench.apply(SequencesClosed(LINK, (1,)))
    assert bench.step() == []
    assert bench.rounds.prepare_next() == IDLE_S
    bench.now_s += IDLE_S
    assert (bench.rounds.prepare_next(), bench.outputs) == (0.0, [])
    assert bench.rounds.prepare_next() == 0.0
    reports = [each.report for each in bench.outputs if isinstance(each, CandidatesReady)]
    assert [each.is_warming for each in reports] == [True, False], "there is more to prepare"
    assert bench.drafter.num_left == 0
    assert bench.rounds.prepare_next() is None
    bench.outputs.clear()
    assert (bench.rounds.prepare_next(), bench.outputs) == (None, []), "and nothing to tell"


@pytest.mark.parametrize("is_pinned", [False, True])
def test_what_a_target_may_ask_for_is_prepared_behind_the_own_shape(*, is_pinned: bool) -> None:
    bench = Bench()
    bench.rounds.is_pinned = is_pinned
    bench.apply(LinkOpened(2, LinkTerms(9, 9, 9, mirrors_noise=True, shapes=(DEEP, SHAPE))))
    bench.apply(LinkOpened(3, LinkTerms(9, 9, 9, mirrors_noise=True, shapes=(DEEP,))))
    assert bench.rounds.prepare_next() is None
    assert list(dict.fromkeys(bench.drafter.asked)) == ([SHAPE] if is_pinned else [SHAPE, DEEP])
