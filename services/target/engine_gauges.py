"""Live figures of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.tokens import Choice, TreeShape


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Live figures. Free, cached and held pages add up to all pages.

    Attributes:
        num_drafted_for: running sequences for which trees are requested.
        num_paused: running sequences with a draft, for which no trees are requested.
        probe_s: time that probes and trials have cost beyond plain decoding.
        speculates: whether trees are requested of drafts; True also without drafts.
        round_shape: tree shape of the rounds on the device; None while there are none.
        round_s: usual round time, by tree shape (None for plain steps) and number of sequences.
    """

    num_waiting: int
    num_running: int
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_held_pages: int
    num_drafted_for: int
    num_paused: int
    probe_s: float
    speculates: bool
    round_shape: TreeShape | None
    round_s: Mapping[tuple[Choice, int], float]
