"""Recurrent states of linear attention, beside the paged cache.

The cache holds what each token gave a layer, at the token's slot, like keys and values: so paths
are moved, trees are cut and prefixes are shared as in any other cache. The state after a token
follows from these inputs. A *checkpoint* is the state of all layers after the first L tokens of a
sequence, so that a forward need not begin at the first token.

A checkpoint belongs to no sequence. Every write of a row has a *stamp*, a number that no other
write has, which is stored with the row and moves with it. A checkpoint knows the stamp of its last
token, and holds for a sequence if the row at L - 1 of its pages has this stamp. Rows behind another
write, of a page that was given to others, of a rejected node or of a request that was cancelled,
have other stamps, so a stale state is never found; what is not found is computed anew from the
inputs.

A lane of rounds, whose forwards are planned on the device (`shared.runtime.lane_states`), borrows a
checkpoint, which nobody else finds until it is given back.
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
        num_layers: with states.
        window: see `DeltaShape`.
        first_layer: of the cache, where the first of them has its rows.
        layers_each: of the cache, that hold a row of one of them.
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
    """Checkpoints, and the plan of each forward; owned by the thread that computes.

    Attributes:
        values: `[num_layers, num_states + 1, num_heads, key_dim, value_dim]` float32; the last is
            the state before the first token, zeros.
    """

    def __init__(self, layout: StateLayout, num_states: int, device: torch.device) -> None:
        size = (layout.num_heads, layout.key_dim, layout.value_dim)
        self.layout = layout
        self.values = torch.zeros((layout.num_layers, num_states + 1, *size), device=device)
        # Of each checkpoint: tokens, 0 without a state; stamp of the last; turn of the last use.
        self._lengths, self._stamps, self._used = np.zeros((3, num_states), np.int64)
        self._is_lent = np.zeros(num_states, np.bool_)
        # Of those given back: tokens, and the digits of the stamp.
        self._returned: list[int] = []
        self._returns = torch.zeros((num_states, 1 + STAMP_SIZE), dtype=torch.int64, device=device)
        # Rows may come from the pool of another process, whose stamps must not be ours.
        self._next_stamp = 1 + secrets.randbits(62)
        self._turn = 0

    def plan(self, batch: ForwardBatch, read_stamps: Callable[[Tensor], Tensor]) -> StatePlan:
        """Plans a forward, and takes what it will overwrite out of the checkpoints; `keep` enters
        the new ones. Waits for the device, twice a forward.

        Args:
            read_stamps: returns `[N, STAMP_SIZE]` int64 of slots `[N]`.
        """
        return self._planned(HostBatch.of(batch), read_stamps)[0]

    def lend(
        self, host: HostBatch, read_stamps: Callable[[Tensor], Tensor]
    ) -> tuple[StatePlan, Array]:
        """Plans what gives each sequence of a batch without rows a checkpoint of all its tokens,
        which nobody else finds or writes until `give_back`. Waits for the device.

        Returns:
            The plan, and the checkpoints `[B]`; `NOWHERE` where none was free. There may be some
            once the plan is done.
        """
        plan, places = self._planned(host, read_stamps)
        self._is_lent[plan.kept] = True
        return plan, places

    def give_back(
        self, places: Sequence[int], index: Tensor, lengths: Tensor, stamps: Tensor
    ) -> None:
        """Takes back K checkpoints that were lent. Waits for nothing.

        Args:
            index: `[K]` int64, `places` on the device.
            lengths: `[K]` int64, tokens that each holds when the work queued so far is done.
            stamps: `[K, STAMP_SIZE]` int64, of the last of them.
        """
        self._returns.index_copy_(0, index, torch.cat((lengths.unsqueeze(1), stamps), dim=1))
        self._is_lent[list(places)] = False
        self._used[list(places)] = self._turn
        self._returned += places

    def _enter_returned(self) -> None:
        """Enters the checkpoints that were given back; waits for the device if there are any."""
        if self._returned:
            [returns] = downloaded([self._returns])
            own = returns[self._returned]
            self._lengths[self._returned] = own[:, 0]
            self._stamps[self._returned] = _numbers(own[:, 1:])
            self._returned = []

    def _planned(
        self, host: HostBatch, read_stamps: Callable[[Tensor], Tensor]
    ) -> tuple[StatePlan, Array]:
        """Returns the plan, and the checkpoint that each sequence writes, `[B]`."""
        self._turn += 1
        self._enter_returned()
        history = self.layout.window - 1
        stamps = np.arange(len(host.slots), dtype=np.int64) + self._next_stamp
        self._next_stamp += len(stamps)
        found = self._find(host, stamps, read_stamps)
        targets = self._assign(found)
        [kept] = np.nonzero(targets != NOWHERE)
        # Until they are written.
        self._lengths[targets[kept]] = 0
        zeros = len(self._used)
        sources = np.where(found.places == NOWHERE, zeros, found.places)
        numbers = sources, found.lengths, targets
        sequences, prompts, chunks, places = sequence_lanes(host, *numbers, history)
        candidates, more = candidate_lanes(host, *numbers, history)
        candidates[:, 2] += len(places)
        plan = StatePlan(
            stamps=stamps,
            sequences=sequences,
            candidates=candidates,
            prompts=prompts,
            chunks=chunks,
            places=np.concatenate((places, more)),
            kept=targets[kept],
            lengths=host.end[kept],
            ends=found.end_stamps[kept],
        )
        return plan, targets

    def keep(self, plan: StatePlan) -> None:
        """Enters the checkpoints of a forward whose layers have all written them."""
        self._lengths[plan.kept] = plan.lengths
        self._stamps[plan.kept] = plan.ends
        self._used[plan.kept] = self._turn

    def _find(
        self,
        host: HostBatch,
        stamps: Array,
        read_stamps: Callable[[Tensor], Tensor],
    ) -> _Found:
        """Looks for the longest checkpoint of each sequence.

        Args:
            stamps: of the forward's rows, which are not in the cache yet.
        """
        slots = self._asked(host)
        [wanted] = uploaded([np.maximum(slots, 0).reshape(-1)], self.values.device)
        [digits] = downloaded([read_stamps(wanted)])
        stored = _numbers(digits).reshape(slots.shape)
        rewritten = np.isin(slots, host.slots)
        is_held = (slots[:, :-1] > 0) & ~rewritten[:, :-1] & self._are_own(stored[:, :-1])
        lengths = np.where(is_held, self._lengths, 0)
        best = lengths.argmax(1)
        longest = lengths[np.arange(len(best)), best]
        written = dict(zip(host.slots.tolist(), stamps.tolist(), strict=True))
        end_stamps = [
            written.get(slot, stamp) if slot > 0 else 0
            for slot, stamp in zip(slots[:, -1].tolist(), stored[:, -1].tolist(), strict=True)
        ]
        return _Found(np.where(longest > 0, best, NOWHERE), longest, np.array(end_stamps, np.int64))

    def _are_own(self, stamps: Array) -> Array:
        """Whether a row's stamp `[B, S]` is that of the checkpoint."""
        own: Array = stamps == self._stamps
        return own

    def _asked(self, host: HostBatch) -> Array:
        """Returns the slots of the last token of every checkpoint that may be one of a sequence,
        and of its new one, `[B, num_states + 1]`; `NOWHERE` elsewhere."""
        lengths = np.where(self._lengths <= host.start[:, None], self._lengths, 0)
        indices = np.concatenate((lengths, host.end[:, None]), 1) - 1
        owners = np.arange(len(indices))[:, None]
        return np.where(host.is_real[:, None], host.slots_of(owners, indices), NOWHERE)

    def _assign(self, found: _Found) -> Array:
        """Returns the checkpoint that each sequence writes, `[B]`: its own, or the one that was
        not used for the longest time. None that another one starts from; `NOWHERE` of those that
        find none, and keep nothing."""
        own, counts = np.unique(found.places[found.places != NOWHERE], return_counts=True)
        self._used[own] = self._turn
        shared = set(own[counts > 1].tolist())
        in_use = set(own.tolist())
        in_use |= set(np.nonzero(self._is_lent)[0].tolist())
        free = (place for place in self._used.argsort().tolist() if place not in in_use)
        targets = np.full(len(found.places), NOWHERE, np.int64)
        for number, place in enumerate(found.places.tolist()):
            if found.end_stamps[number]:
                is_own = place != NOWHERE and place not in shared
                targets[number] = place if is_own else next(free, NOWHERE)
        return targets


@dataclass(frozen=True, slots=True)
class _Found:
    """What is found for each sequence, `[B]`.

    Attributes:
        places: its checkpoint; `NOWHERE` where there is none.
        lengths: tokens that it holds.
        end_stamps: the stamp of the last token that its new one holds; 0 if it can have none.
    """

    places: Array
    lengths: Array
    end_stamps: Array


def _numbers(digits: Array) -> Array:
    """Returns the stamps of `[N, STAMP_SIZE]`."""
    numbers: Array = (digits << 8 * np.arange(STAMP_SIZE)).sum(1)
    return numbers
