"""Lanes whose trees remote drafts push: who has one, their rounds, and when each is launched.

Planned steps of prompts, and of whoever has no lane, go beside them. While the device verifies the
trees of a round, drafts push those for its ends. Once they are here they are uploaded, and the next
round can be launched before the host has read the last one. What the host makes of that, tokens,
events and verdicts, is then off the critical path. A sequence that waits for its tree sits rounds
out. Where no tree is wanted, and where pages are missing, there are no lanes.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext

from services.target.committer import Committed, Committer
from services.target.drafts.attachment import Attachment
from services.target.drafts.attachments import Attachments
from services.target.drafts.feature_store import FeatureFeed, FeatureSpec
from services.target.draw import Decision
from services.target.rounds.device_rounds import can_be_round
from services.target.rounds.round_steps import MIN_LANE_TOKENS, EarlyLaunch, RoundWait
from services.target.rounds.selected_rounds import (
    NextTrees,
    SelectedRound,
    SelectedRounds,
    TreeForecast,
    as_step,
)
from services.target.scheduler import Scheduler
from services.target.sequence import Sequence
from services.target.step_plan import ScheduledSequence
from services.target.step_report import Clock, HostGap
from shared.runtime.round_state import SequenceRound
from shared.tokens import TreeShape


class SelectionTerms:
    """Looks at who runs and at their drafts. Owned by the engine thread."""

    def __init__(self, scheduler: Scheduler, attachments: Attachments, clock: Clock) -> None:
        self._scheduler = scheduler
        self._attachments = attachments
        self._clock = clock

    @property
    def are_met(self) -> bool:
        """Whether lanes draw in this turn: a tree is wanted of a draft, drafts read nothing that
        the device has yet to write, and no sequence is to come to a draft or to leave one, which
        they do between planned steps."""
        assignments = self._attachments.assignments
        return (
            assignments.are_trees_wanted
            and self.are_features_known
            and not assignments.any_moves(self._scheduler.running, self._clock())
        )

    @property
    def are_features_known(self) -> bool:
        """Whether lanes can keep what drafts read: features of one kind at most, which leave the
        device before a draft reads them."""
        drafts = self._attachments.drafts.live
        return len(self.wanted_features) <= 1 and all(each.is_elsewhere for each in drafts)

    @property
    def wanted_features(self) -> dict[str, FeatureSpec]:
        """The features that drafts read, by key."""
        specs = (each.feature_spec for each in self._attachments.drafts.live)
        return {spec.key: spec for spec in specs if spec is not None}

    def suit(self, sequence: Sequence) -> bool:
        """Whether a lane can do all that the request asks for."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        wanted = sequence.request.draft_algorithm or ""
        algorithm = wanted if assignment is None else assignment.attachment.identity.algorithm
        return sequence.prediction is None and can_be_round(sequence.request, algorithm)


class SelectionCommits:
    """Owned by the engine thread.

    Args:
        forget: lets go of a sequence that has ended.
    """

    def __init__(
        self,
        committer: Committer,
        attachments: Attachments,
        forget: Callable[[Sequence], None],
    ) -> None:
        self._committer = committer
        self._attachments = attachments
        self._forget = forget
        self._committed_s = 0.0

    def commit(
        self,
        round_: SelectedRound,
        results: SequenceOf[tuple[Sequence | None, SequenceRound]],
        next_round: SelectedRound | None,
        now_s: float,
    ) -> float:
        """Commits what a round did, and returns how long it took.

        Args:
            results: with None in place of sequences that have ended since the launch.
            next_round: launched already, with trees that were prepared for the end of this one.
        """
        start_s, self._committed_s = max(round_.start_s, self._committed_s), now_s
        parts: list[Committed] = []
        num_gone = 0
        for sequence, result in results:
            if sequence is None:
                num_gone += bool(result.token_ids)
                continue
            tree = round_.trees.get(sequence.sequence_id)
            took_part = bool(result.token_ids)
            assert took_part == (tree is not None), "device and host differ on who took part"
            if tree is not None:
                entry, decision = as_step(sequence, tree, result)
                parts.append(self._commit(entry, decision, start_s, now_s))
                if sequence.finish_reason is None and next_round is not None:
                    self._follow(sequence, next_round)
        self._committer.report(
            parts,
            start_s,
            now_s,
            num_rows=round_.shape.num_draft_tokens * len(results),
            num_prompt_rows=0,
            num_discarded=num_gone,
            host_gap_s=round_.host_gap_s,
            round_shape=round_.shape,
        )
        return now_s - start_s

    def _commit(
        self, entry: ScheduledSequence, decision: Decision, start_s: float, now_s: float
    ) -> Committed:
        """Commits a sequence's part of a round."""
        sequence = entry.sequence
        sequence.num_computed += 1
        part = self._committer.commit(entry, decision, start_s, now_s, is_lane=True)
        if sequence.finish_reason is not None:
            self._forget(sequence)
        return part

    def _follow(self, sequence: Sequence, next_round: SelectedRound) -> None:
        """Notes which of the prepared trees the device has taken for the next round: the one that
        the verdict has just selected, if it was among them."""
        assignment = self._attachments.assignments.get(sequence.sequence_id)
        offered = next_round.offered.get(sequence.sequence_id, ())
        if assignment is not None and any(each is assignment.candidate for each in offered):
            assignment.is_stepping = True
            next_round.trees[sequence.sequence_id] = assignment.tree


class Turn(enum.Enum):
    """The result of a turn of the loop."""

    DONE = enum.auto()
    WAITING = enum.auto()
    ELSEWHERE = enum.auto()


class SelectionSteps:
    """See `Lanes`. Owned by the engine thread.

    Args:
        rounds: None has no lanes.
        is_elsewhere: whether a sequence has, or is to have, a lane of another kind.
        host_gap: that of the loop.
        take_offers: takes what drafts pushed meanwhile.
        runs_ahead: whether anything is prepared before the round under way is read.
    """

    def __init__(
        self,
        *,
        rounds: SelectedRounds | None,
        is_elsewhere: Callable[[Sequence], bool],
        scheduler: Scheduler,
        attachments: Attachments,
        features: FeatureFeed,
        commits: SelectionCommits,
        clock: Clock,
        host_gap: HostGap,
        take_offers: Callable[[], None],
        runs_ahead: bool,
    ) -> None:
        self._rounds = rounds
        self._is_elsewhere = is_elsewhere
        self._runs_ahead = runs_ahead
        self._scheduler = scheduler
        self._attachments = attachments
        self._features = features
        self._commits = commits
        self._clock = clock
        self._host_gap = host_gap
        self._take_offers = take_offers
        self._terms = SelectionTerms(scheduler, attachments, clock)
        self._forecast = TreeForecast(attachments, clock)
        self._is_open = False
        self._early = EarlyLaunch()
        self._wait = RoundWait()
        self._read_s = 0.0
        self._launched: deque[SelectedRound] = deque()

    @property
    def is_under_way(self) -> bool:
        """Whether a round is launched and not read."""
        return bool(self._launched)

    @property
    def shape(self) -> TreeShape | None:
        """Shape of the trees of the round under way; None while there is none."""
        return self._launched[0].shape if self._launched else None

    def patience_s(self) -> float | None:
        """Seconds to wait for pushed trees until it is time to check whether the round under
        way is done; None where there is none."""
        if not self._launched:
            return None
        began_s = max(self._launched[0].start_s, self._read_s)
        return self._wait.patience_s(self._clock() - began_s)

    def open(self, attachment: Attachment) -> None:
        """A draft attached. While nobody waits for it, all graphs for its trees are made."""
        rounds = self._rounds
        is_idle = not (self._scheduler.num_running or self._scheduler.num_waiting)
        if rounds is None or not is_idle or not self._terms.are_features_known:
            return
        self._turn_to_store(rounds)
        rounds.capture(attachment.base_shape)

    def choose(self) -> None:
        """A turn of the loop begins: decides whether lanes draw in it."""
        rounds = self._rounds
        if rounds is None:
            return
        self._is_open = rounds.max_sequences > 0 and self._terms.are_met
        if self._is_open:
            self._turn_to_store(rounds)
        own = rounds.sequences
        stay = all(map(rounds.fits, own)) and not any(map(self._is_elsewhere, own))
        if not self._is_open or rounds.is_sparse or not stay:
            self.settle()

    def holds(self, sequence: Sequence) -> bool:
        """See `Lanes`."""
        return self._rounds is not None and self._rounds.holds(sequence)

    def num_taken(self, sequence: Sequence) -> int:
        """See `Lanes`. Somebody has to draw the token after a prompt of one."""
        rounds = self._rounds
        if rounds is None or not self._is_open or len(sequence.token_ids) < MIN_LANE_TOKENS:
            return 0
        suits = rounds.num_free > 0 and rounds.fits(sequence) and self._terms.suit(sequence)
        return int(suits and not self._is_elsewhere(sequence))

    def evict(self, sequence: Sequence) -> None:
        """See `Lanes`."""
        rounds = self._rounds
        assert rounds is not None
        self._drain(rounds)
        if rounds.holds(sequence):
            rounds.evict(sequence)

    def step(self) -> Turn:
        """Does what can be done of a round.

        Returns:
            WAITING where there is nothing to do but to wait for the device or for drafts, and
            ELSEWHERE where no lane draws in this turn.
        """
        rounds = self._rounds
        if rounds is None or not self._is_open:
            return Turn.ELSEWHERE
        if self._launched:
            return self._go_on(rounds)
        return self._launch_ready(rounds)

    def settle(self) -> None:
        """Reads and commits the rounds under way, and takes all lanes from those who have them."""
        rounds = self._rounds
        if rounds is not None and rounds.is_running:
            self._drain(rounds)
            rounds.leave()

    def _drain(self, rounds: SelectedRounds) -> None:
        while self._launched:
            self._commit(rounds)

    def _lanes(self, rounds: SelectedRounds) -> list[Sequence]:
        """Returns who has a lane, and who can get one now: the last token is read, and all before
        it are computed."""
        lanes, num_free = list[Sequence](), rounds.num_free
        for each in self._scheduler.running:
            if rounds.holds(each):
                lanes.append(each)
                continue
            if each.can_join_lane and num_free > 0 and self.num_taken(each):
                lanes.append(each)
                num_free -= 1
        return lanes

    def aside(self) -> AbstractContextManager[None]:
        """Returns a context in which what earlier rounds left is read beside the one under way."""
        if self._rounds is None or not self._launched:
            return nullcontext()
        return self._rounds.aside()

    def forget(self, sequence: Sequence) -> None:
        """Lets go of a sequence that has ended; its pages are freed after this."""
        if self._rounds is not None:
            self._rounds.forget(sequence)

    def _turn_to_store(self, rounds: SelectedRounds) -> None:
        """Has rounds keep the features that a draft reads."""
        specs = self._terms.wanted_features.values()
        store = next(map(self._features.kept, specs), None)
        if store is not rounds.store:
            self.settle()
            rounds.turn_to(store)

    def _launch_ready(self, rounds: SelectedRounds) -> Turn:
        """Launches a round of the sequences that wait for nothing."""
        lanes = self._lanes(rounds)
        if not lanes:
            return Turn.ELSEWHERE
        trees = self._forecast.of_ready(lanes)
        if not trees.prepared:
            self._host_gap.wait()
            return Turn.WAITING
        shape = self._prepare(rounds, trees)
        if shape is None:
            # Planned steps need fewer pages, and may preempt.
            self._is_open = False
            self.settle()
            return Turn.ELSEWHERE
        self._attachments.readiness.begin_rounds(trees.sure)
        self._launch(rounds, shape, trees)
        return Turn.DONE

    def _go_on(self, rounds: SelectedRounds) -> Turn:
        """With a round under way: launches the next one ahead, if what was pushed for it is here,
        or one of other sequences, and reads the one under way once it is done."""
        under_way, lanes = self._launched[0], self._lanes(rounds)
        may_launch = self._runs_ahead and len(self._launched) == 1
        if may_launch and self._forecast.is_complete(lanes, under_way):
            self._launch_ahead(rounds, self._forecast.after(lanes, under_way))
        if len(self._launched) == 1 and not rounds.is_done:
            return Turn.WAITING
        self._commit(rounds)
        self._attachments.readiness.weigh(self._scheduler.running, self._clock())
        if not self._launched:
            self._launch_next(rounds)
        return Turn.DONE

    def _launch_next(self, rounds: SelectedRounds) -> None:
        """Launches a round behind one that was read, if it can be. Mostly all sequences wait for
        their drafts, which are yet to be told: nobody gives up waiting before that."""
        if self._forecast.is_any_here(self._lanes(rounds)):
            self._launch_ready(rounds)
        else:
            self._host_gap.wait()

    def _launch_ahead(self, rounds: SelectedRounds, trees: NextTrees) -> None:
        """Has trees chosen for the end of the round under way, and launches the next one: at once,
        or when it is known that any was."""
        shape = self._prepare(rounds, trees) if trees.prepared else None
        if shape is None:
            return
        known = [each.timeout.response_s or 0.0 for each in self._attachments.drafts.live]
        self._attachments.readiness.begin_rounds(trees.sure)
        if not self._early.pays(trees.hit_rates, min(known, default=0.0)):
            if not rounds.has_chosen():
                return
            self._host_gap.read(self._clock())
        self._launch(rounds, shape, trees)

    def _prepare(self, rounds: SelectedRounds, trees: NextTrees) -> TreeShape | None:
        """Hands trees to the device; None where they cannot be a round."""
        num_captured = rounds.num_captured
        shape = rounds.prepare(trees.prepared)
        if rounds.num_captured != num_captured:
            self._attachments.readiness.disregard()
        return shape

    def _launch(self, rounds: SelectedRounds, shape: TreeShape, trees: NextTrees) -> None:
        rounds.launch()
        now_s = self._clock()
        gap_s = self._host_gap.launched(now_s)
        self._launched.append(SelectedRound(trees.trees, trees.offered, shape, now_s, gap_s))
        if rounds.awaits_masks:
            if len(self._launched) > 1:
                self._commit(rounds)
            rounds.finish()

    def _commit(self, rounds: SelectedRounds) -> None:
        """Reads the oldest round and commits it."""
        results, round_ = rounds.read(self._features.stores), self._launched.popleft()
        next_round = self._launched[0] if self._launched else None
        now_s = self._clock()
        if next_round is None:
            self._host_gap.read(now_s)
        self._read_s = now_s
        self._take_offers()
        duration_s = self._commits.commit(round_, results, next_round, now_s)
        self._early.timed(duration_s)
        self._wait.timed(duration_s)
