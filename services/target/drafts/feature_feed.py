"""Keeps features of computed tokens and hands every draft the rows it lacks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from services.target.drafts.attachment import Attachment
from services.target.drafts.attachments import FeatureNeed, FeatureNeeds
from services.target.drafts.feature_rows import FeatureRows
from services.target.drafts.feature_store import FeatureSpec, FeatureStore, FeatureStores
from services.target.step_plan import StepPlan
from shared.kv.leases import KvLease, KvLeases
from shared.runtime.runner import RunnerOutput


class FeatureFeed:
    """Between the forwards and the drafts. Owned by the engine thread; idle without such drafts."""

    def __init__(self, stores: FeatureStores, needs: FeatureNeeds, leases: KvLeases) -> None:
        self._stores = stores
        self._needs = needs
        self._leases = leases

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """The stores of features."""
        return self._stores.all

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers a forward must capture."""
        return self._stores.captured_layers

    def open(self, spec: FeatureSpec) -> None:
        """A draft that wants these features attached. Where none were kept so far, the prefix cache
        starts anew: its tokens have none, so that no head could draft behind them."""
        if self._stores.open(spec):
            self._leases.retire()

    def close(self, spec: FeatureSpec) -> None:
        """A draft that wanted these features has left."""
        self._stores.close(spec.key)

    def kept(self, spec: FeatureSpec) -> FeatureStore | None:
        """Returns where the features of a spec are; None when nobody wants them."""
        return self._stores.get(spec.key)

    def known_rows(
        self, spec: FeatureSpec, lease: KvLease, start: int, end: int
    ) -> tuple[int, Tensor]:
        """Returns the rows of a spec up to position `end`, from `start` on or from behind the last
        one that nobody stored, and the position of the first."""
        store = self._stores.get(spec.key)
        assert store is not None, "nobody keeps these features"
        slots = lease.slots(start, end, self._leases.page_size)
        num_unknown = store.first_known(slots)
        return start + num_unknown, store.read(slots[num_unknown:])

    def store(self, plan: StepPlan, slots: Tensor, output: RunnerOutput) -> None:
        """Stores the rows of a step's forward, tree nodes included."""
        if self._stores.is_used:
            host_slots = [
                slot for entry in plan.scheduled for slot in entry.slots(self._leases.page_size)
            ]
            self._stores.write(slots, host_slots, output, self.captured_layers)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Follows an accepted path that the KV pool moves."""
        self._stores.move(source, target)

    def unmet(self) -> list[FeatureNeed]:
        """Returns what drafts lack that is computed and not yet sent."""
        return self._needs.unmet()

    def send(self, unmet: Sequence[FeatureNeed]) -> None:
        """Puts the rows that drafts lack into their messages."""
        needs: dict[Attachment, list[FeatureNeed]] = defaultdict(list)
        for need in unmet:
            needs[need.attachment].append(need)
        for attachment, group in needs.items():
            assert attachment.feature_spec is not None
            store = self._stores.get(attachment.feature_spec.key)
            if store is not None:
                self._send_rows(attachment, store, group)

    def _send_rows(
        self, attachment: Attachment, store: FeatureStore, needs: Sequence[FeatureNeed]
    ) -> None:
        """One gather, and one copy on their way, for all sequences of a draft."""
        starts: list[int] = []
        slots: list[int] = []
        for need in needs:
            start, own = self._unsent(store, need)
            starts.append(start)
            slots += own
        placed = attachment.sender.place(store.read(slots))
        # Of a single sequence no part has to be taken, which costs as much as the rest here.
        counts = [need.end - start for need, start in zip(needs, starts, strict=True)]
        parts = [placed.rows] if len(needs) == 1 else torch.split(placed.rows, counts)
        first = 0
        for need, start, part, count in zip(needs, starts, parts, counts, strict=True):
            sequence = need.sequence
            ring_start = None if placed.ring_start is None else placed.ring_start + first
            rows = FeatureRows(
                sequence.sequence_id, start, part, sequence.num_prompt_tokens, ring_start
            )
            self._needs.fill(need, rows)
            first += count

    def _unsent(self, store: FeatureStore, need: FeatureNeed) -> tuple[int, list[int]]:
        """Returns the first position to send and the slots from there on."""
        lease = need.sequence.open_lease
        start = need.start or 0
        slots = lease.slots(start, need.end, self._leases.page_size)
        # The first time, rows from before the store's time are missing at the front.
        num_unknown = store.first_known(slots) if need.start is None else 0
        return start + num_unknown, slots[num_unknown:]
