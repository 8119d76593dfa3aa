"""Hidden states of every computed token, kept beside the KV, for drafts that read them.

A row is stored in the slot of its token's key and value, so it has the lifetime of the KV page. A
prompt in the prefix cache brings its features along, a draft that attaches in the middle of a
sequence gets all of them, and a preempted sequence loses nothing that it has sent. The cost is one
row of width W beside the K and V of all layers, a few per cent of the memory.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.target.drafts.assignments import Assignment, Assignments
from services.target.drafts.attachment import Attachment, FeatureRows
from services.target.scheduler import StepPlan
from shared.errors import FailedPrecondition
from shared.kv.leases import KvLease, KvLeases
from shared.kv.upload import uploaded_numbers
from shared.models.decoder import ROUTES
from shared.models.heads.feature_spec import FeatureSpec as ComputedFeatures
from shared.runtime.mapped_rounds import FeatureAddress
from shared.runtime.ring_memory import RingMemory, RingUnavailable, share_memory, shared_part
from shared.runtime.runner import RunnerOutput

logger = logging.getLogger(__name__)

MAX_LAYERS = 8
"""Layers that a draft may read. Published heads read one to six."""
MAX_HIDDEN_STATES = 4
"""Widest row, in hidden states: rows take memory for every token of the KV cache."""
MAX_STORES = 4
"""Different features that drafts may read at the same time. Each takes memory of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSpec:
    """The features that a draft asks for with each token.

    Attributes:
        key: identity; drafts with equal keys share a store.
        layer_indices: index i < n stands for the residual stream that enters layer i, n for the
            last layer's output, n + 1 for that output after the final norm. Concatenated on the
            last axis.
        dtype: dtype of the rows.
        projection: `[W, K * H]`, applied to the concatenation of K layers; None applies none.
        num_routes: width of rows that hold experts, see `of_routes`; 0 for all others.
    """

    key: str
    layer_indices: tuple[int, ...]
    dtype: torch.dtype
    projection: Tensor | None
    num_routes: int = 0

    @classmethod
    def of_routes(cls, num_routes: int) -> FeatureSpec:
        """Returns the spec of rows that hold the experts of each token."""
        return cls("routes", (ROUTES,), torch.int32, None, num_routes)

    @classmethod
    def of(
        cls, layer_indices: tuple[int, ...], dtype: torch.dtype, projection: Tensor | None
    ) -> FeatureSpec:
        """Returns the spec, with a digest of its content as its key."""
        digest = hashlib.sha256(repr((layer_indices, dtype)).encode())
        if projection is not None:
            digest.update(
                projection.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            )
        return cls(digest.hexdigest(), layer_indices, dtype, projection)

    def check(self, *, num_layers: int, hidden_size: int) -> None:
        """Raises:
        FailedPrecondition: the target does not have such features; names value and limit.
        """
        num_indices = len(self.layer_indices)
        if not 1 <= num_indices <= MAX_LAYERS:
            raise _unsupported(f"layer_indices has {num_indices}; [1, {MAX_LAYERS}] can be read")
        for index in self.layer_indices:
            if not 0 <= index <= num_layers + 1:
                raise _unsupported(f"layer {index}; the target has [0, {num_layers + 1}]")
        if self.projection is not None:
            shape, columns = list(self.projection.shape), num_indices * hidden_size
            if len(shape) != 2 or shape[1] != columns:
                raise _unsupported(
                    f"the projection is {shape}; "
                    f"{num_indices} layers of {hidden_size} need [W, {columns}]"
                )
        width, widest = self.width(hidden_size), MAX_HIDDEN_STATES * hidden_size
        if width > widest:
            raise _unsupported(
                f"a row of features is {width:,} wide; the target keeps {widest:,}, "
                f"{MAX_HIDDEN_STATES} hidden states: send a projection"
            )

    def width(self, hidden_size: int) -> int:
        """Returns the width of one row."""
        if self.num_routes:
            return self.num_routes
        if self.projection is not None:
            return self.projection.shape[0]
        return len(self.layer_indices) * hidden_size


def captured_layers(layer_indices: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Returns the layers that a forward captures for features of `layer_indices`, ascending. The
    final norm's output needs no capture: every forward returns it."""
    return tuple(sorted({index for index in layer_indices if index <= num_layers}))


class FeatureStore:
    """Rows of one spec, one a KV slot."""

    def __init__(
        self, spec: FeatureSpec, *, num_slots: int, num_layers: int, hidden_size: int,
        device: torch.device, is_file: bool = False,
    ) -> None:  # fmt: skip
        """Args:
        is_file: keep the rows in an in-memory file, which other processes can map, if there is
            room for one.
        """
        self.spec = spec
        self._num_layers = num_layers
        width = spec.width(hidden_size)
        size_bytes = num_slots * width * spec.dtype.itemsize
        self._file: RingMemory | None = None
        if is_file:
            try:
                self._file = share_memory(size_bytes, device)
            except RingUnavailable as error:
                logger.warning("features cannot be shared with other processes: %s", error)
        if self._file is None:
            self._rows = torch.zeros((num_slots, width), dtype=spec.dtype, device=device)
        else:
            self._rows = self._file.elements.view(spec.dtype).view(num_slots, width)
        # Whether each slot's row is stored. Rows of tokens computed before this store was opened
        # are not. In host memory, as it decides what is sent without a wait for the device.
        self._is_stored = np.zeros(num_slots, np.bool_)
        self._projection = None if spec.projection is None else spec.projection.to(device)

    @property
    def rows(self) -> Tensor:
        """`[num_slots, W]`, a row for each slot of the KV pool."""
        return self._rows

    @property
    def address(self) -> FeatureAddress:
        """The address of the rows for another process on this host.

        Raises:
            RingUnavailable: the memory cannot be shared.
        """
        address, start = (self._file.address, 0) if self._file else shared_part(self._rows)
        return FeatureAddress(address, start, len(self._rows))

    @property
    def computed(self) -> ComputedFeatures:
        """The features that rounds on the device compute for these rows."""
        spec = self.spec
        width = self._rows.shape[1]
        return ComputedFeatures(spec.layer_indices, spec.dtype, width, self._projection)

    def write(self, slots: Tensor, output: RunnerOutput, captured: Sequence[int]) -> None:
        """Stores the rows of a forward.

        Args:
            slots: `[T]` int64, on the device.
            captured: the layers that `output.features` holds, in order.
        """
        parts = [
            output.hidden
            if index == self._num_layers + 1
            else output.features[captured.index(index)]
            for index in self.spec.layer_indices
        ]
        rows = torch.cat(parts, dim=-1)
        if self._projection is not None:
            rows = F.linear(rows, self._projection.to(rows.dtype))
        self._rows.index_copy_(0, slots, rows.to(self._rows.dtype))

    def mark_stored(self, slots: Sequence[int]) -> None:
        """Marks, on the host, slots whose rows are stored now."""
        self._is_stored[np.array(slots, np.int64)] = True

    def mark_missing(self, slots: Sequence[int]) -> None:
        """Marks, on the host, slots that hold keys and values without rows."""
        self._is_stored[np.array(slots, np.int64)] = False

    def move(self, source: Tensor, target: Tensor) -> None:
        """Moves the rows of an accepted path, as the KV pool moves its keys and values."""
        self._rows.index_copy_(0, target, self._rows.index_select(0, source))

    def first_stored(self, slots: Sequence[int]) -> int:
        """Returns the index into `slots` from which on all rows are stored."""
        [missing] = (~self._is_stored[np.array(slots, np.int64)]).nonzero()
        return int(missing[-1]) + 1 if len(missing) else 0

    def read(self, slots: Sequence[int]) -> Tensor:
        """Returns `[len(slots), W]`, a copy on the store's device."""
        first = slots[0] if slots else 0
        end = first + len(slots)
        # Those of a verdict are mostly consecutive, so that no indices need be uploaded.
        if list(slots) == list(range(first, end)):
            return self._rows[first:end].clone()
        return self._rows.index_select(0, uploaded_numbers(slots, self._rows.device))


def _unsupported(message: str) -> FailedPrecondition:
    return FailedPrecondition(message, reason="FEATURE_SPEC_UNSUPPORTED")


class FeatureFeed:
    """The features of one engine: stores those of computed tokens, one store a spec, and sends each
    draft the rows that it lacks. Owned by the engine thread; does nothing if no draft reads
    features.

    Args:
        assignments: sequences at drafts, some of which read features.
        num_slots: slots of the KV pool.
        are_files: see `FeatureStore`.
    """

    def __init__(
        self, assignments: Assignments, leases: KvLeases, *, num_slots: int, num_layers: int,
        hidden_size: int, device: torch.device, are_files: bool = False,
    ) -> None:  # fmt: skip
        self._assignments = assignments
        self._leases = leases
        self._num_slots = num_slots
        self._num_layers = num_layers
        self._hidden_size = hidden_size
        self._device = device
        self._are_files = are_files
        self._stores: dict[str, FeatureStore] = {}
        self._num_readers: Counter[str] = Counter()
        self._unread_key: str | None = None

    @property
    def stores(self) -> tuple[FeatureStore, ...]:
        """All stores."""
        return tuple(self._stores.values())

    @property
    def captured_layers(self) -> tuple[int, ...]:
        """Layers to capture in every forward, for all stores."""
        indices = [i for store in self._stores.values() for i in store.spec.layer_indices]
        return captured_layers(indices, self._num_layers)

    def open(self, spec: FeatureSpec) -> None:
        """Adds a reader of these features. If they were not stored before, the prefix cache is
        cleared: its tokens have no rows, so that no head could draft behind them.

        Raises:
            FailedPrecondition: other drafts read `MAX_STORES` different features already.
        """
        if self._unread_key != spec.key:
            self._drop_unread()
        self._unread_key = None
        if spec.key not in self._stores:
            if len(self._stores) >= MAX_STORES:
                message = (
                    f"drafts read {len(self._stores)} different features; {MAX_STORES} are kept"
                )
                raise FailedPrecondition(message, reason="FEATURE_MEMORY")
            self._stores[spec.key] = FeatureStore(
                spec,
                num_slots=self._num_slots,
                num_layers=self._num_layers,
                hidden_size=self._hidden_size,
                device=self._device,
                is_file=self._are_files,
            )
            self._leases.retire()
        self._num_readers[spec.key] += 1

    def close(self, spec: FeatureSpec) -> None:
        """Removes a reader. The store that was last to lose all its readers stays, in case one
        comes back, until a reader of other features comes."""
        self._num_readers[spec.key] -= 1
        if not self._num_readers[spec.key]:
            del self._num_readers[spec.key]
            self._drop_unread()
            self._unread_key = spec.key

    def _drop_unread(self) -> None:
        if self._unread_key is not None:
            del self._stores[self._unread_key]
            self._unread_key = None

    def kept(self, spec: FeatureSpec) -> FeatureStore | None:
        """Returns the store of a spec; None when its features are not stored."""
        return self._stores.get(spec.key)

    def stored_rows(
        self, spec: FeatureSpec, lease: KvLease, start: int, end: int
    ) -> tuple[int, Tensor]:
        """Returns the rows of positions `[first, end)` and `first`, which is `start`, or the
        position after the last one whose row is missing."""
        store = self._stores.get(spec.key)
        assert store is not None, "these features are not stored"
        slots = lease.slots(start, end, self._leases.page_size)
        num_skipped = store.first_stored(slots)
        return start + num_skipped, store.read(slots[num_skipped:])

    def store(self, plan: StepPlan, slots: Tensor, output: RunnerOutput) -> None:
        """Stores the rows of a step's forward, tree nodes included; see `FeatureStore.write`."""
        if not self._stores:
            return
        page_size, captured = self._leases.page_size, self.captured_layers
        host_slots = [slot for entry in plan.scheduled for slot in entry.slots(page_size)]
        for store in self._stores.values():
            store.write(slots, output, captured)
            store.mark_stored(host_slots)

    def move(self, source: Tensor, target: Tensor) -> None:
        """See `FeatureStore.move`."""
        for store in self._stores.values():
            store.move(source, target)

    def lacking(self) -> list[Assignment]:
        """Returns the assignments whose drafts lack features of computed positions."""
        return [assignment for assignment in self._assignments if assignment.lacks_features]

    def send(self, lacking: Iterable[Assignment]) -> None:
        """Puts the rows that drafts lack into their messages."""
        groups: dict[Attachment, list[Assignment]] = defaultdict(list)
        for assignment in lacking:
            groups[assignment.attachment].append(assignment)
        for attachment, group in groups.items():
            assert attachment.feature_spec is not None
            store = self._stores.get(attachment.feature_spec.key)
            if store is not None:
                self._send_rows(attachment, store, group)

    def _send_rows(
        self, attachment: Attachment, store: FeatureStore, group: Sequence[Assignment]
    ) -> None:
        """Gathers and copies the rows of all sequences of a draft at once."""
        starts: list[int] = []
        counts: list[int] = []
        slots: list[int] = []
        for assignment in group:
            start, unsent = self._unsent(store, assignment)
            starts.append(start)
            counts.append(assignment.num_features - start)
            slots += unsent
        rows, first_in_ring = attachment.placed(store.read(slots))
        # A split costs as much as all else here, and a single sequence needs none.
        parts = [rows] if len(group) == 1 else torch.split(rows, counts)
        first = 0
        for assignment, start, part, count in zip(group, starts, parts, counts, strict=True):
            sequence = assignment.sequence
            ring_start = None if first_in_ring is None else first_in_ring + first
            assignment.num_features_sent = start + count
            if count:
                attachment.outbox.features.append(
                    FeatureRows(
                        sequence.sequence_id, start, part, sequence.num_prompt_tokens, ring_start
                    )
                )
            first += count

    def _unsent(self, store: FeatureStore, assignment: Assignment) -> tuple[int, list[int]]:
        """Returns the first position to send, and the slots from there on."""
        num_sent, lease = assignment.num_features_sent, assignment.sequence.open_lease
        slots = lease.slots(num_sent or 0, assignment.num_features, self._leases.page_size)
        if num_sent is not None:
            return num_sent, slots
        # The rows of tokens that were computed before the store was opened are missing.
        num_skipped = store.first_stored(slots)
        return num_skipped, slots[num_skipped:]
