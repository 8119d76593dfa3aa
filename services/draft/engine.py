"""The draft engine: one thread that turns events of several targets into candidates.

`open_link` and `submit` never block and may be called from an event loop. Outputs are handed to
the link's callback on the engine thread; the callback must not block either. This module does not
import grpc, so the target process can host the same engine over an in-process channel.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from services.draft.drafters.drafter import Drafter
from services.draft.events import (
    MAX_TREE_NODES,
    CandidatesReady,
    Event,
    FeatureRows,
    LinkClosed,
    LinkOpened,
    LinkTerms,
    MappedCommandArrived,
    Output,
    Probe,
    ProbeDone,
    SequencesOpened,
)
from services.draft.mapped_heads import MappedHeads
from services.draft.metrics import DraftRecorder
from services.draft.rounds import Rounds
from services.draft.sequence_table import SequenceTable
from shared.errors import EngineFailed, OutriderError
from shared.inbox import Inbox
from shared.tokens import SamplingParams, TreeShape

if TYPE_CHECKING:
    # A worker without a model runs where torch is not installed.
    from shared.models.heads.feature_spec import FeatureSpec

log = logging.getLogger(__name__)
_GAUGES_TIMEOUT_S = 1.0

T = TypeVar("T")
Deliver = Callable[[Output], None]

MAX_WAITING_EVENTS = 4096
_UNLIMITED_VOCAB = 2**31


class DraftEngine:
    """Owns the drafter, its thread, and the bounded inbox of that thread.

    Attributes:
        has_failed: whether the thread ended by an error.
    """

    def __init__(
        self,
        drafter: Drafter,
        shape: TreeShape,
        *,
        chunk_tokens: int,
        max_sequences: int,
        is_pinned: bool = False,
        outcome_budget: int = 0,
        are_rows_cheap: bool = True,
        recorder: DraftRecorder | None = None,
        max_waiting_events: int = MAX_WAITING_EVENTS,
        enter_thread: Callable[[], None] | None = None,
        num_targets: int = 1,
    ) -> None:
        """Args:
        enter_thread: called first on the engine's thread.
        num_targets: number of targets in whose rounds the drafter's model can take part.
        """
        self._enter_thread = enter_thread
        self._drafter = drafter
        self.recorder = recorder or DraftRecorder()
        self._table = SequenceTable(
            drafter, max_sequences=max_sequences, deliver=self._deliver, recorder=self.recorder
        )
        self._rounds = Rounds(
            self._table,
            drafter,
            shape,
            chunk_tokens=chunk_tokens,
            is_pinned=is_pinned,
            outcome_budget=outcome_budget,
            are_rows_cheap=are_rows_cheap,
            deliver=self._deliver,
        )
        if outcome_budget and drafter.lookahead is None:
            log.warning("this drafter cannot draft ahead: every tree follows its verdict")
        self._mapped = MappedHeads(
            drafter, self._deliver, max_targets=num_targets, on_span=self.recorder.on_span
        )
        self._inbox = Inbox(max_waiting_events)
        self._probes: set[Future[ProbeDone]] = set()
        self._stop = threading.Event()
        self._callbacks: dict[int, Deliver] = {}
        self._link_numbers = itertools.count(1)
        self.has_failed = self._has_ended = False
        self._prepares_when_idle = False
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def shape(self) -> TreeShape:
        return self._rounds.shape

    @property
    def is_pinned(self) -> bool:
        """Whether trees keep to `shape` whatever tree their targets request."""
        return self._rounds.is_pinned

    @property
    def num_sequences(self) -> int:
        return len(self._table)

    def start(self) -> None:
        self._thread.start()

    def stop(self, grace_s: float | None = None) -> bool:
        """Ends the thread after the step in progress; waits for it.

        Returns:
            Whether it has ended within the grace, if there is one.
        """
        self._stop.set()
        self._inbox.close(EngineFailed.of)
        self._inbox.post_end(lambda: None)  # wakes the thread
        self._thread.join(grace_s)
        return not self._thread.is_alive()

    def open_link(self, terms: LinkTerms, deliver: Deliver) -> int:
        """Opens a link and returns its number. `deliver` runs on the engine thread.

        Raises:
            QueueFull: see `submit`.
        """
        link = next(self._link_numbers)
        self._callbacks[link] = deliver
        try:
            self.submit(LinkOpened(link, terms))
        except BaseException:
            del self._callbacks[link]
            raise
        return link

    def close_link(self, link: int) -> None:
        """Ends a link with its sequences. Nothing is delivered from then on. Never refused."""
        if self._callbacks.pop(link, None) is not None:
            self._inbox.post_end(lambda: self._apply(LinkClosed(link)))

    def submit(self, event: Event) -> None:
        """Queues an event.

        Raises:
            QueueFull: the engine is too far behind; the link must be closed, because an event is
                lost.
            EngineFailed: the engine has died, or is stopping.
        """
        self._inbox.post(lambda: self._apply(event))

    def propose_once(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        shape: TreeShape | None,
        *,
        features: FeatureRows | None = None,
    ) -> Future[ProbeDone]:
        """Proposes one tree for a prompt, in a batch with other sequences that are due. The prompt
        is the only sequence of a link of its own. Cancelling the future ends the work.

        Args:
            features: the target's features of every position but the last. Without them a drafter
                that reads features proposes an empty tree.

        Raises:
            QueueFull, EngineFailed: see `submit`.
        """
        future: Future[ProbeDone] = Future()
        self._probes.add(future)
        future.add_done_callback(self._probes.discard)
        size = self._drafter.limits.vocab_size or _UNLIMITED_VOCAB
        terms = LinkTerms(size, MAX_TREE_NODES, max_sequences=1, mirrors_noise=True)
        probe = Probe(0, token_ids, len(token_ids), sampling, 0, shape=shape, features=features)
        try:
            link = self.open_link(terms, lambda output: _resolve_probe(future, output))
            future.add_done_callback(lambda _: self.close_link(link))
            self.submit(SequencesOpened(link, (probe,)))
        except OutriderError:
            future.cancel()
            raise
        return future

    def set_shape(self, shape: TreeShape, *, is_pinned: bool) -> Future[None]:
        """Replaces the shape of trees between two steps.

        Args:
            is_pinned: False lets targets request other shapes.
        """

        def replace() -> None:
            self._rounds.shape, self._rounds.is_pinned = shape, is_pinned
            for link in self._table.links:
                self._rounds.announce(link)

        return self._call(replace)

    @property
    def outcome_budget(self) -> int:
        """Most verdicts of a round to prepare candidates for."""
        return self._rounds.outcome_budget

    def set_outcome_budget(self, outcome_budget: int) -> Future[None]:
        """Replaces the outcome budget between two forwards."""
        return self._call(lambda: setattr(self._rounds, "outcome_budget", outcome_budget))

    def prepare_when_idle(self) -> Future[None]:
        """From now on captures graphs for trees of `shape` while no sequence is open."""

        def begin() -> None:
            self._prepares_when_idle = True

        return self._call(begin)

    def flush_prefix_cache(self) -> Future[int]:
        """Drops unused cached state; resolves to the pages freed."""
        return self.between_rounds(self._drafter.flush_prefix_cache)

    def gauges(self) -> Future[dict[str, float]]:
        """Resolves to live figures for operators."""
        return self._call(
            lambda: {
                "sequence_count": float(len(self._table)),
                "unprepared_shape_count": float(self._rounds.num_unprepared),
                # The live configuration: an operator may have changed it since the start.
                "tree_step_count": float(self.shape.num_steps),
                "tree_topk": float(self.shape.topk),
                "tree_draft_token_count": float(self.shape.num_draft_tokens),
                "shape_is_pinned": float(self.is_pinned),
                "outcome_budget": float(self.outcome_budget),
                **self._drafter.gauges(),
            }
        )

    def figures(self) -> Mapping[str, float]:
        """Returns the live figures; empty where the engine does not answer within a second."""
        try:
            return self.gauges().result(_GAUGES_TIMEOUT_S)
        except (OutriderError, TimeoutError):
            return {}

    def between_rounds(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on the engine thread between two forwards.

        Raises:
            QueueFull, EngineFailed: see `submit`.
        """

        def call() -> T:
            with self._mapped.between_rounds():
                return function()

        return self._call(call)

    def _call(self, function: Callable[[], T]) -> Future[T]:
        """Calls a function on the engine thread that queues no work on the device, so that rounds
        need not wait for it. Raises as `between_rounds`."""

        def call() -> T:
            if self._has_ended:
                raise EngineFailed.of()
            return function()

        return self._inbox.call(call)

    def check(self) -> Future[None]:
        """Asserts the drafter's invariants on the engine thread."""
        return self._call(self._drafter.check)

    def _run(self) -> None:
        try:
            if self._enter_thread is not None:
                self._enter_thread()
            wait_s: float | None = None
            while True:
                self._inbox.run_all(wait_s=wait_s)
                if self._stop.is_set():
                    return
                has_work = self._rounds.step()
                has_work = self._rounds.prepare() or has_work
                wait_s = 0.0
                if not has_work:
                    wait_s = self._rounds.prepare_next() if self._prepares_when_idle else None
        except BaseException:
            # Losing the draft costs its targets speed, never a token. Going on with state that may
            # be inconsistent could cost more.
            log.exception("the draft engine failed")
            self.has_failed = True
        finally:
            self._has_ended = True
            self._inbox.close(EngineFailed.of)
            self._inbox.run_all()
            for future in list(self._probes):
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineFailed.of())

    def _apply(self, event: Event) -> None:
        if self._has_ended:
            return
        if isinstance(event, MappedCommandArrived):
            terms = self._table.terms(event.link)
            if terms is not None:
                self._mapped.apply(event, terms.vocab_size)
            return
        if isinstance(event, LinkClosed):
            self._mapped.close(event.link)
        self._table.apply(event)
        if isinstance(event, LinkOpened) and self._rounds.is_pinned:
            self._rounds.announce(event.link)

    def _deliver(self, output: Output) -> None:
        deliver = self._callbacks.get(output.link)
        if deliver is not None:
            deliver(output)


def _resolve_probe(future: Future[ProbeDone], output: Output) -> None:
    """Handles an output on a probe's link. `CandidatesReady` is only an announcement there, without
    candidates; a refused probe comes back as `SequencesReleased`."""
    if isinstance(output, CandidatesReady):
        return
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(output, ProbeDone):
        future.set_result(output)
    else:
        future.set_result(ProbeDone(output.link, None, 0.0))


# Warm-up proposals at start: kernels are compiled and tuned, and memory is allocated.

_WARM_UP_TOKENS = 16
"""More tokens than a head has layers, as each layer reads a token further ahead."""
# Kernels are specialised for prompt lengths and for few or many rows at once.
_PROMPT_LENGTHS = (_WARM_UP_TOKENS, 17, 25, 40, 300, 700)
_GROUP_SIZES = (1, 2, 8, 40)
# Greedy and sampled trees have different scoring kernels and graphs.
_SAMPLINGS = (SamplingParams(temperature=0.0), SamplingParams())


def warm_up(
    engine: DraftEngine, feature_spec: FeatureSpec | None, *, most_at_once: int | None = None
) -> None:
    """Proposes trees of each kind and discards them; waits until that is done.

    Args:
        feature_spec: of the engine's drafter; the features are zeros.
        most_at_once: most sequences at once, on a device whose kernels are compiled on first use:
            then the warm-up uses prompts of many lengths, alone and in groups. None uses one short
            prompt.

    Raises:
        EngineFailed: the drafter cannot compute.
    """
    if most_at_once is None:
        num_proposed = _propose(
            engine, feature_spec, 1 if feature_spec is None else _WARM_UP_TOKENS, 1
        )
    else:
        sizes = [size for size in _GROUP_SIZES if size <= most_at_once]
        groups = [(length, size) for size in sizes for length in _PROMPT_LENGTHS]
        num_proposed = sum(_propose(engine, feature_spec, *group) for group in groups)
    if feature_spec is not None and not num_proposed:
        log.warning("warm-up proposed nothing, so the first rounds will be slow")


def _propose(
    engine: DraftEngine, feature_spec: FeatureSpec | None, num_tokens: int, size: int
) -> int:
    """Proposes for `size` prompts at once, for each kind of sampling; returns the trees' tokens."""
    num_proposed = 0
    features = None
    if feature_spec is not None:
        import torch

        shape = (num_tokens - 1, feature_spec.width)
        features = FeatureRows(0, torch.zeros(shape, dtype=feature_spec.dtype))
    for sampling in _SAMPLINGS:
        group: list[Future[ProbeDone]] = [
            engine.propose_once((0,) * num_tokens, sampling, None, features=features)
            for _ in range(size)
        ]
        probes = [future.result() for future in group]
        count = sum(len(probe.tree) for probe in probes if probe.tree is not None)
        log.debug(
            "warm-up: %d prompts of %d tokens took %.3f s and proposed %d tokens",
            *(size, num_tokens, max(probe.draft_s for probe in probes), count),
        )
        num_proposed += count
    return num_proposed
