"""A drafter whose memory, speed and trees are set by the test."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence

from services.draft.drafters.drafter import DrafterLimits, Proposal
from services.draft.events import FeatureRows, WorkerIdentity
from services.draft.process import DraftProcess
from services.draft.sequence import DraftSequence, SequenceKey
from services.draft.settings import DraftSettings
from shared.models.heads.feature_spec import FeatureSpec
from shared.settings import load_settings
from shared.tokens import TokenTree, TreeShape, Verdict


@contextlib.asynccontextmanager
async def serving_scripted_draft() -> AsyncIterator[DraftProcess]:
    """A draft process on a free port whose target does not answer."""
    arguments = ("--port", "0", "--target", "127.0.0.1:1")
    settings = load_settings(DraftSettings, service="draft", arguments=arguments, env={})
    process = DraftProcess(settings)
    await process.listen()
    await process.serve(
        ScriptedDrafter(), WorkerIdentity("worker", "scripted", "STANDALONE", None, 4, None)
    )
    try:
        yield process
    finally:
        await process.stop()


class ScriptedDrafter:
    """Proposes `[length, length + 1, …]`; holds at most `num_slots` reserved sequences.

    Attributes:
        batches: sequence ids of each `propose`.
        chunks: tokens taken in by each `catch_up`.
        fails: makes `propose` raise.
        num_unprepared: things to prepare for shapes, by shape.
        asked: shapes that were to be prepared while there was nothing else to do.
        prepared: the shape of each that was prepared.
        num_left: things to prepare.
        has_prepared: set once nothing is left of them.
    """

    lookahead = None

    def __init__(
        self,
        *,
        num_slots: int = 1_000,
        vocab_size: int | None = None,
        feature_spec: FeatureSpec | None = None,
    ) -> None:
        self.batches: list[list[int]] = []
        self.chunks: list[int] = []
        self.fails = False
        self.num_unprepared: Counter[TreeShape] = Counter()
        self.asked: list[TreeShape] = []
        self.prepared: list[TreeShape] = []
        self.num_left = 0
        self.has_prepared = threading.Event()
        self.num_slots = num_slots
        self.limits = DrafterLimits(vocab_size=vocab_size, feature_spec=feature_spec)
        self.num_seen: dict[SequenceKey, int] = {}
        self.reserved: set[SequenceKey] = set()

    def open(self, sequence: DraftSequence) -> None:
        self.num_seen[sequence.key] = 0

    def commit(
        self, sequence: DraftSequence, verdict: Verdict, features: FeatureRows | None
    ) -> None:
        assert sequence.key in self.num_seen

    def add_features(self, sequence: DraftSequence, rows: FeatureRows) -> None:
        assert sequence.key in self.num_seen

    def backlog(self, sequence: DraftSequence) -> int:
        return sequence.num_tokens - self.num_seen[sequence.key]

    def reserve(self, sequence: DraftSequence, shape: TreeShape) -> bool:
        if sequence.key not in self.reserved and len(self.reserved) >= self.num_slots:
            return False
        self.reserved.add(sequence.key)
        return True

    def catch_up(self, sequences: Sequence[DraftSequence], max_tokens: int) -> int:
        num_taken = 0
        for sequence in sequences:
            count = min(self.backlog(sequence) - 1, max_tokens - num_taken)
            self.num_seen[sequence.key] += count
            num_taken += count
        self.chunks.append(num_taken)
        return num_taken

    def propose(self, sequences: Sequence[DraftSequence], shape: TreeShape) -> list[Proposal]:
        if self.fails:
            raise ZeroDivisionError("scripted failure")
        self.batches.append([sequence.key.sequence_id for sequence in sequences])
        for sequence in sequences:
            self.num_seen[sequence.key] = sequence.num_tokens
        return [Proposal(s, self._tree(s, shape)) for s in sequences]

    def close(self, sequence: DraftSequence) -> None:
        del self.num_seen[sequence.key]
        self.reserved.discard(sequence.key)

    def is_prepared(self, shape: TreeShape, num_sequences: int) -> bool:
        return not self.num_unprepared[shape]

    def prepare(self, shape: TreeShape, num_sequences: int | None) -> bool:
        if num_sequences is not None:
            if not self.num_unprepared[shape]:
                return False
            self.num_unprepared[shape] -= 1
            self.prepared.append(shape)
            return True
        self.asked.append(shape)
        if not self.num_left:
            self.has_prepared.set()
            return False
        self.num_left -= 1
        return True

    def flush_prefix_cache(self) -> int:
        return 7

    def retire_prefix_cache(self) -> None:
        """Nothing is shared."""

    def gauges(self) -> Mapping[str, float]:
        return {"slot_count": float(self.num_slots)}

    def check(self) -> None:
        assert self.reserved <= set(self.num_seen)

    def _tree(self, sequence: DraftSequence, shape: TreeShape) -> TokenTree:
        return TokenTree.chain([sequence.num_tokens + i for i in range(shape.max_node_count)])
