"""Recurrent states of linear attention, beside the paged cache.

The cache holds each token's inputs to a layer's state, at the token's slot, like keys and values.
So moving an accepted path, cutting a tree and sharing a prefix work as in any other cache. The
state after a token follows from these inputs. A *checkpoint* is the state of all layers after the
first L tokens of a sequence, so that a forward need not begin at the first token.

A checkpoint belongs to no sequence. Every write of a row has a unique number, its *stamp*, which is
stored with the row and moves with it. A checkpoint knows the stamp of its last token, and is valid
for a sequence if the row at logical index L - 1 of its pages has this stamp. A row that was written
again, for another owner of the page or after a rejected node or a cancelled request, has another
stamp, so a stale state is never used. A state without a valid checkpoint is computed anew from the
inputs.

A lane of rounds, whose forwards are planned on the device (`shared.runtime.lane_states`), borrows a
checkpoint, which no other sequence uses until it is given back.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shared.kernels.delta_layer import NOWHERE, STAMP_SIZE
from shared.kv.batch import ForwardBatch
from shared.kv.state_plan import HostBatch, StatePlan, candidate_lanes, sequence_lanes
from shared.kv.upload import Array, downloaded, uploaded


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Shape of the states of one decoder.

    Attributes:
        num_layers: decoder layers with states.
        window: see `DeltaShape`.
        first_layer: first layer of the cache that holds rows of these decoder layers.
        layers_each: layers of the cache for the rows of one such decoder layer.
    """

    num_layers: int
    num_heads: int
    key_dim: int
    value_dim: int
    window: int
    first_layer: int
    layers_each: int

    @property
    def size_bytes(self) -> int:
        """Bytes of one checkpoint."""
        return 4 * self.num_layers * self.num_heads * self.key_dim * self.value_dim


class StateStore:
    """Checkpoints, and the plan of each forward; owned by the engine's thread.

    Attributes:
        values: `[num_layers, num_states + 1, num_heads, key_dim, value_dim]` float32; the last
            checkpoint is the state before the first token, zeros.
    """

    def __init__(self, layout: StateLayout, num_states: int, device: torch.device) -> None:
        size = (layout.num_heads, layout.key_dim, layout.value_dim)
        self.layout = layout
        self.values = torch.zeros((layout.num_layers, num_states + 1, *size), device=device)
        # Per checkpoint: tokens it covers (0: empty), stamp of the last one, turn of its last use.
        self._lengths, self._stamps, self._used = np.zeros((3, num_states), np.int64)
        self._is_lent = np.zeros(num_states, np.bool_)
        # Per checkpoint that was given back: tokens it covers, and the digits of the stamp.
        self._returned_places: list[int] = []
        self._returns = torch.zeros((num_states, 1 + STAMP_SIZE), dtype=torch.int64, device=device)
        # A random start: rows may come from the pool of another process, whose stamps must differ.
        self._next_stamp = 1 + secrets.randbits(62)
        self._turn = 0

    def plan(self, batch: ForwardBatch, read_stamps: Callable[[Tensor], Tensor]) -> StatePlan:
        """Plans a forward, and marks the checkpoints that it will overwrite as empty; `keep` enters
        the new ones. Waits for the device twice.

        Args:
            read_stamps: returns the stamps `[N, STAMP_SIZE]` int64 at slots `[N]`.
        """
        return self._plan(HostBatch.of(batch), read_stamps)[0]

    def lend(
        self, host: HostBatch, read_stamps: Callable[[Tensor], Tensor]
    ) -> tuple[StatePlan, Array]:
        """Plans a checkpoint of all tokens for each sequence of a batch without rows. No other
        sequence uses it until `give_back`. Waits for the device.

        Returns:
            The plan, and the checkpoints `[B]`; `NOWHERE` where none was free. Some may be free
            once the plan has run.
        """
        plan, places = self._plan(host, read_stamps)
        self._is_lent[plan.kept] = True
        return plan, places

    def give_back(
        self, places: Sequence[int], index: Tensor, lengths: Tensor, stamps: Tensor
    ) -> None:
        """Takes back K checkpoints that were lent. Does not wait for the device.

        Args:
            index: `[K]` int64, `places` on the device.
            lengths: `[K]` int64, tokens that each covers when the work queued so far is done.
            stamps: `[K, STAMP_SIZE]` int64, the stamp of the last of those tokens.
        """
        self._returns.index_copy_(0, index, torch.cat((lengths.unsqueeze(1), stamps), dim=1))
        self._is_lent[list(places)] = False
        self._used[list(places)] = self._turn
        self._returned_places += places

    def _enter_returned(self) -> None:
        """Enters the checkpoints that were given back; waits for the device if there are any."""
        if self._returned_places:
            [returns] = downloaded([self._returns])
            entries = returns[self._returned_places]
            self._lengths[self._returned_places] = entries[:, 0]
            self._stamps[self._returned_places] = _numbers(entries[:, 1:])
            self._returned_places = []

    def _plan(
        self, host: HostBatch, read_stamps: Callable[[Tensor], Tensor]
    ) -> tuple[StatePlan, Array]:
        """Returns the plan, and the checkpoint that each sequence writes, `[B]`."""
        self._turn += 1
        self._enter_returned()
        history = self.layout.window - 1
        stamps = np.arange(len(host.slots), dtype=np.int64) + self._next_stamp
        self._next_stamp += len(stamps)
        matches = self._match(host, stamps, read_stamps)
        targets = self._assign(matches)
        [kept] = np.nonzero(targets != NOWHERE)
        # Empty until they are written.
        self._lengths[targets[kept]] = 0
        zeros = len(self._used)
        sources = np.where(matches.places == NOWHERE, zeros, matches.places)
        numbers = sources, matches.lengths, targets
        sequences, prompts, chunks, places = sequence_lanes(host, *numbers, history)
        candidates, candidate_places = candidate_lanes(host, *numbers, history)
        candidates[:, 2] += len(places)
        plan = StatePlan(
            stamps=stamps,
            sequences=sequences,
            candidates=candidates,
            prompts=prompts,
            chunks=chunks,
            places=np.concatenate((places, candidate_places)),
            kept=targets[kept],
            lengths=host.end[kept],
            ends=matches.end_stamps[kept],
        )
        return plan, targets

    def keep(self, plan: StatePlan) -> None:
        """Enters the checkpoints of a forward whose layers have all written them."""
        self._lengths[plan.kept] = plan.lengths
        self._stamps[plan.kept] = plan.ends
        self._used[plan.kept] = self._turn

    def _match(
        self,
        host: HostBatch,
        stamps: Array,
        read_stamps: Callable[[Tensor], Tensor],
    ) -> _Matches:
        """Finds the longest valid checkpoint of each sequence.

        Args:
            stamps: stamps of the forward's rows, which are not in the cache yet.
        """
        slots = self._checkpoint_slots(host)
        [slot_index] = uploaded([np.maximum(slots, 0).reshape(-1)], self.values.device)
        [digits] = downloaded([read_stamps(slot_index)])
        stored = _numbers(digits).reshape(slots.shape)
        rewritten = np.isin(slots, host.slots)
        is_valid = (slots[:, :-1] > 0) & ~rewritten[:, :-1] & self._stamps_match(stored[:, :-1])
        lengths = np.where(is_valid, self._lengths, 0)
        best = lengths.argmax(1)
        longest = lengths[np.arange(len(best)), best]
        written = dict(zip(host.slots.tolist(), stamps.tolist(), strict=True))
        end_stamps = [
            written.get(slot, stamp) if slot > 0 else 0
            for slot, stamp in zip(slots[:, -1].tolist(), stored[:, -1].tolist(), strict=True)
        ]
        return _Matches(
            np.where(longest > 0, best, NOWHERE), longest, np.array(end_stamps, np.int64)
        )

    def _stamps_match(self, stamps: Array) -> Array:
        """Whether the stamps of rows, `[B, num_states]`, are those of the checkpoints."""
        is_equal: Array = stamps == self._stamps
        return is_equal

    def _checkpoint_slots(self, host: HostBatch) -> Array:
        """Returns the slot of each sequence at the last token of each checkpoint, and of its new
        one, `[B, num_states + 1]`; `NOWHERE` if the checkpoint is empty or too long."""
        lengths = np.where(self._lengths <= host.start[:, None], self._lengths, 0)
        indices = np.concatenate((lengths, host.end[:, None]), 1) - 1
        owners = np.arange(len(indices))[:, None]
        return np.where(host.is_real[:, None], host.slots_of(owners, indices), NOWHERE)

    def _assign(self, matches: _Matches) -> Array:
        """Returns the checkpoint that each sequence writes, `[B]`: the one it starts from, unless
        others do too; else the least recently used free one. `NOWHERE` if there is none: then the
        state is not kept."""
        sources, counts = np.unique(matches.places[matches.places != NOWHERE], return_counts=True)
        self._used[sources] = self._turn
        shared = set(sources[counts > 1].tolist())
        in_use = set(sources.tolist())
        in_use |= set(np.nonzero(self._is_lent)[0].tolist())
        free = (place for place in self._used.argsort().tolist() if place not in in_use)
        targets = np.full(len(matches.places), NOWHERE, np.int64)
        for number, place in enumerate(matches.places.tolist()):
            if matches.end_stamps[number]:
                is_own = place != NOWHERE and place not in shared
                targets[number] = place if is_own else next(free, NOWHERE)
        return targets


@dataclass(frozen=True, slots=True)
class _Matches:
    """The checkpoint that each sequence starts from, `[B]`.

    Attributes:
        places: the checkpoint; `NOWHERE` where there is none.
        lengths: tokens that it covers.
        end_stamps: stamp of the last token of the sequence's new checkpoint; 0 if it has none.
    """

    places: Array
    lengths: Array
    end_stamps: Array


def _numbers(digits: Array) -> Array:
    """Returns the stamps of their digits `[N, STAMP_SIZE]`."""
    numbers: Array = (digits << 8 * np.arange(STAMP_SIZE)).sum(1)
    return numbers
