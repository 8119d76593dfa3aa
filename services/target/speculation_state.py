"""Whether speculation does anything now, and why it does not: logged once a change. No torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from services.target.drafts.attachment import Attachment, AttachmentStatus, Idle, IdleReason
from services.target.drafts.attachments import Attachments

logger = logging.getLogger(__name__)
POLL_S = 0.1
"""Time between two looks."""
FIRST_LOG_PAUSE_S, LAST_LOG_PAUSE_S = 1.0, 60.0
"""Least time between two log lines about one thing; doubles with each line."""


class Comparison(Protocol):
    """The mechanism that compares speculation with plain steps."""

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster; None while that is not known."""

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""


class _Change:
    """A state that is logged when it changes, the less often the more it does."""

    def __init__(self) -> None:
        self._logged: str | None = None
        self._may_log_s = -math.inf
        self._pause_s = FIRST_LOG_PAUSE_S

    def log(self, state: str, now_s: float, line: Callable[[], str]) -> None:
        if state != self._logged and now_s >= self._may_log_s:
            self._logged, self._may_log_s = state, now_s + self._pause_s
            self._pause_s = min(2.0 * self._pause_s, LAST_LOG_PAUSE_S)
            logger.info("%s", line())


class SpeculationState:
    """Owned by the engine thread.

    Attributes:
        detail: why no trees are verified; empty while they are, or while that is not known. Other
            threads may read it.
    """

    def __init__(self, attachments: Attachments, lanes: Comparison) -> None:
        self.detail = ""
        self._attachments = attachments
        self._lanes = lanes
        self._next_s = -math.inf
        self._comparison = _Change()
        self._drafts: dict[str, _Change] = {}

    def update(self, now_s: float) -> None:
        """A turn of the loop begins. Costs a comparison, but for every tenth of a second."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + POLL_S
        drafts = self._attachments.drafts.live
        self._compare(now_s, has_drafts=bool(drafts))
        gone = self._drafts.keys() - {each.identity.attachment_id for each in drafts}
        for attachment_id in gone:
            del self._drafts[attachment_id]
        for draft in drafts:
            self._watch(draft, now_s)

    def explained(self, status: AttachmentStatus, now_s: float) -> AttachmentStatus:
        """Returns the status of a draft with the reason why none of its trees is verified."""
        idle = _own_idle(status.attachment, now_s)
        if idle is None and self.detail:
            idle = Idle(IdleReason.PLAIN_IS_FASTER, self.detail)
        return replace(status, idle=idle)

    def _compare(self, now_s: float, *, has_drafts: bool) -> None:
        has_lanes = self._lanes.pays is not None
        source: Comparison = self._lanes if has_lanes else self._attachments
        pays = source.pays if has_drafts else None
        if pays is None:
            self.detail = "" if not has_drafts else self.detail
            return
        figures = source.comparison()
        self.detail = "" if pays else f"plain steps are faster here: {figures}"
        if pays:
            self._comparison.log("on", now_s, lambda: f"speculation is on: {figures}")
        else:
            self._comparison.log("off", now_s, lambda: f"speculation is off: {self.detail}")

    def _watch(self, draft: Attachment, now_s: float) -> None:
        """Logs when a draft becomes useless, and when it is of use again."""
        identity, idle = draft.identity, _own_idle(draft, now_s)
        known = self._drafts.get(identity.attachment_id)
        if idle is None and known is None:
            return
        change = self._drafts.setdefault(identity.attachment_id, _Change())
        what = "its trees arrive in time again" if idle is None else idle.detail
        state = "" if idle is None else idle.reason.value
        change.log(state, now_s, lambda: f"draft {identity.worker_id}: {what}")


def _own_idle(draft: Attachment, now_s: float) -> Idle | None:
    """Returns why a draft by itself is of no use now."""
    if draft.warm_up.is_on(now_s) or draft.is_mapping:
        return Idle(IdleReason.WARMING_UP, "it is warming up (CUDA graphs, kernels)")
    if draft.timeout.is_cold:
        return Idle(IdleReason.SILENT, "it does not answer; the target steps without its trees")
    return None
