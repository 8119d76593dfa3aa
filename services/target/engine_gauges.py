"""Live figures of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.tokens import Choice, TreeShape


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Live figures; free + cached + held pages are all pages.

    Attributes:
        num_drafted_for: running sequences for which trees are wanted.
        num_paused: running sequences that have a draft, but go without trees.
        probe_s: time that probes and trials have cost beyond plain decoding.
        speculates: whether trees are wanted of drafts; also where there are none.
        round_shape: of the trees of rounds on the device; None while there are none.
        round_s: usual time of a round by shape, None for plain steps, and sequences.
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
