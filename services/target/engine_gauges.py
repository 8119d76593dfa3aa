"""Live figures of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from services.target.drafts.attachments import Attachments
from services.target.rounds.round_steps import RoundStanding
from services.target.scheduler import Scheduler
from shared.kv.leases import KvLeases
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


def engine_gauges(
    scheduler: Scheduler,
    leases: KvLeases,
    attachments: Attachments,
    standing: RoundStanding,
    selected_shape: TreeShape | None,
) -> EngineGauges:
    """Returns the live figures.

    Args:
        standing: of rounds with an embedded head.
        selected_shape: of the round under way whose trees the device selects; None without one.
    """
    assignments, policies = attachments.assignments, attachments.drafts.policies
    return EngineGauges(
        num_waiting=scheduler.num_waiting,
        num_running=scheduler.num_running,
        num_pages=leases.num_pages,
        num_free_pages=leases.num_free_pages,
        num_cached_pages=leases.num_cached_pages,
        num_held_pages=leases.num_held_pages,
        num_drafted_for=assignments.num_drafted_for + standing.num_drafted_for,
        num_paused=assignments.num_paused + standing.num_paused,
        probe_s=sum(each.trial_s for each in policies) + standing.probe_s,
        speculates=attachments.pays is not False,
        round_shape=standing.shape or selected_shape,
        round_s={
            **{key: s for each in policies for key, s in each.times.measured().items()},
            **standing.round_s,
        },
    )
