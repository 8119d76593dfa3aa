"""One engine under random traffic and bad drafts, audited after every step.

What is audited: every page has one owner, nobody reads a page that is not theirs (free pages and
the padding page hold poison), every output is plain decoding's, and in the end nothing is held.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from services.target.adaptive_config import ALWAYS_TREES, DEFAULT_CONFIG, AdaptiveConfig
from services.target.engine import Engine
from services.target.requests.request import GenerationRequest
from services.target.step_report import StepReport
from shared.kv.leases import KvLeases
from shared.kv.pool import KvPool
from shared.models.decoder import Decoder
from shared.models.heads.head import DraftHead
from shared.runtime.graphs import ForwardGraphs, GraphLimits
from shared.runtime.runner import ModelRunner
from tests.helpers.device_rounds import Pair
from tests.helpers.engines import (
    PAGE_SIZE,
    Collector,
    PoisonedPages,
    build_engine,
    engine_over,
    run,
    settle,
)
from tests.helpers.poisoned import POISON
from tests.soak.drafts import Drafts
from tests.soak.shared_head import SoakHead
from tests.soak.traffic import Traffic

# Less than eight long sequences need, so that some are preempted.
NUM_PAGES = 60
_PLAIN_PAGES = 800
MAX_RUNNING = 8
MAX_OPEN = 20
CONTEXT_TOKENS = 200
EOS = frozenset({0})
GRAPHS = GraphLimits(
    max_rows=48, max_sequences=MAX_RUNNING, max_tail_width=24, max_context_tokens=CONTEXT_TOKENS
)
BATCH = 32


class SoakFailed(AssertionError):
    """An output that is not plain decoding's, with request, output and what was due; or a soak that
    shows nothing."""


@dataclass(slots=True)
class SoakFigures:
    """What happened so far; a soak in which little happened proves little.

    Attributes:
        num_compared: outputs of a token or more that were held to plain decoding's.
    """

    num_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_preempted: int = 0
    num_outcome_hits: int = 0
    num_device_rounds: int = 0
    num_rounds_ahead: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_reconnects: int = 0
    num_compared: int = 0

    def add(self, report: StepReport) -> None:
        self.num_steps += 1
        self.num_tokens += report.num_committed
        self.num_drafted += report.num_drafted
        self.num_accepted += report.num_accepted
        self.num_preempted += report.num_preempted
        self.num_outcome_hits += report.outcomes.num_hits
        self.num_device_rounds += report.round_shape is not None
        self.num_rounds_ahead += bool(report.round_shape and report.round_shape.is_ahead)


@dataclass(slots=True)
class _Open:
    """A request that is under way."""

    request: GenerationRequest
    leaves_at: int | None
    collector: Collector = field(default_factory=Collector)


class Soak:
    """Drives one engine until told to stop.

    Args:
        decoder: the target's; graphs are recorded where it lies on a GPU.
        draft_decoders: models of the drafts, by name.
        selects: the device selects among trees that drafts push; most requests are such that it
            can.
        chooses: the controller of the target chooses what drafts draft, and cuts it.
        head: of the target, which is lent for rounds on the device; then there are no other drafts,
            and most requests are such that rounds can take them. With neither of the two the target
            looks trees up as well.
        mapped: a model that drafts in these rounds instead of the head, from a thread of its own.
    """

    def __init__(
        self,
        decoder: Decoder,
        draft_decoders: dict[str, Decoder],
        seed: int,
        *,
        overlaps: bool,
        selects: bool = False,
        chooses: bool = False,
        head: DraftHead | None = None,
        mapped: Decoder | None = None,
    ) -> None:
        assert not (selects and head), "rounds have trees of one kind"
        self._has_rounds = has_rounds = selects or head is not None
        self.figures = SoakFigures()
        self._decoder = decoder
        self._source = random.Random(seed)
        # Rounds with a head run while no prompt waits, so prompts come more rarely.
        self._admission = 0.6 if head is None else 0.15
        self._traffic = Traffic(seed, share_of_simple=0.97 if has_rounds else 0.0)
        self._leases = KvLeases(NUM_PAGES, PAGE_SIZE)
        self._engine = self._build(
            overlaps,
            selects or mapped is not None,
            # Of a model of random weights no draft pays.
            DEFAULT_CONFIG if head else ALWAYS_TREES if chooses else None,
        )
        self._drafts: Drafts | SoakHead = (
            Drafts(self._engine, draft_decoders, seed)
            if head is None
            else SoakHead(self._engine, Pair(decoder, head), seed, mapped)
        )
        self._open: dict[int, _Open] = {}
        self._ended: list[_Open] = []
        self._next_key = 0

    def run(self, goes_on: Callable[[], bool]) -> Iterator[SoakFigures]:
        """Runs until `goes_on` says no, then to the end of what is open; yields now and then.

        Raises:
            SoakFailed: an output is wrong, or there was nothing to compare.
            AssertionError: a page is lost or has two owners, or the engine does not end.
        """
        while goes_on():
            self._step(admits=True)
            if len(self._ended) >= BATCH:
                self._compare()
                yield self.figures
        for _ in range(5000):
            if not self._open:
                break
            self._step(admits=False)
        assert not self._open, f"{len(self._open)} requests do not end"
        self._compare()
        settle(self._engine)
        if isinstance(self._drafts, SoakHead):
            self._drafts.close()
        self._check_happened()
        yield self.figures

    def _check_happened(self) -> None:
        if not self.figures.num_compared:
            raise SoakFailed(f"no output was compared with plain decoding's: {self.figures}")
        if self._has_rounds and not self.figures.num_device_rounds:
            raise SoakFailed(f"no round ran on the device: {self.figures}")

    def _build(self, overlaps: bool, selects: bool, choices: AdaptiveConfig | None) -> Engine:
        pool = KvPool(self._decoder.kv_layout(PAGE_SIZE), NUM_PAGES, self._decoder.device)
        is_cuda = self._decoder.device.type == "cuda"
        graphs = ForwardGraphs(self._decoder, pool, GRAPHS) if is_cuda else None
        [group] = self._leases._groups
        group.pages = PoisonedPages(NUM_PAGES, pool)
        self._padding = [cache[:PAGE_SIZE] for cache in (*pool.keys, *pool.values)]
        engine = engine_over(
            ModelRunner(self._decoder, pool, graphs),
            self._leases,
            max_running=MAX_RUNNING,
            max_context_tokens=CONTEXT_TOKENS,
            eos_token_ids=EOS,
            on_step=self.figures.add,
            overlaps=overlaps,
            adaptive=choices,
            selects=selects,
        )
        early = random.Random(0)
        engine._loop._pushed._early.pays = lambda *_: early.random() < 0.5  # type: ignore[method-assign]
        return engine

    def _step(self, *, admits: bool) -> None:
        if admits and len(self._open) < MAX_OPEN and self._source.random() < self._admission:
            self._submit()
        self._leave()
        for page in self._padding:
            page.fill_(POISON)
        self._drafts.step()
        self._engine.step()
        self._leases.check()
        self._collect()

    def _submit(self) -> None:
        caller = self._traffic.caller()
        key, self._next_key = self._next_key, self._next_key + 1
        steps = caller.leaves_after
        leaves_at = None if steps is None else self.figures.num_steps + steps
        self._open[key] = _Open(caller.request, leaves_at)
        self._engine.submit(caller.request, self._open[key].collector, key)

    def _leave(self) -> None:
        now = self.figures.num_steps
        for key, each in list(self._open.items()):
            if each.leaves_at is not None and now >= each.leaves_at:
                self._engine.cancel(each.collector, key)
                self._end(key)
                self.figures.num_cancelled += 1

    def _collect(self) -> None:
        for key, each in list(self._open.items()):
            if each.collector.has_ended(key):
                each.leaves_at = None
                self._end(key)
                self.figures.num_finished += 1

    def _end(self, key: int) -> None:
        each = self._open.pop(key)
        each.collector.events = {0: each.collector.events.get(key, [])}
        self._ended.append(each)

    def _compare(self) -> None:
        """Holds what has ended to plain decoding's, one request at a time in one small batch."""
        self.figures.num_reconnects = self._drafts.num_reconnects
        ended, self._ended = self._ended, []
        expected = plain_outputs(self._decoder, [each.request for each in ended])
        for each, due in zip(ended, expected, strict=True):
            found = each.collector.token_ids(0)
            if found != (due[: len(found)] if each.leaves_at is not None else due):
                raise SoakFailed(
                    f"prompt {list(each.request.prompt_token_ids)} with {each.request.sampling} and"
                    f" {each.request.stop} gave {found}; plain decoding gives {due}"
                )
            self.figures.num_compared += bool(found)


def plain_outputs(decoder: Decoder, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Returns what an engine without drafts, overlap, graphs or shared prefixes gives."""
    engine = build_engine(
        decoder, num_pages=_PLAIN_PAGES, max_running=MAX_RUNNING, prefix_cache=False,
        max_context_tokens=CONTEXT_TOKENS, eos_token_ids=EOS, overlaps=False,
    )  # fmt: skip
    collector = run(engine, [replace(each, priority=0) for each in requests])
    return [collector.token_ids(key) for key in range(len(requests))]
