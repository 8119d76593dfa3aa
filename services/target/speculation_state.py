"""Whether speculation is used now, and if not, why; changes are logged. No torch."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Protocol

from services.target.drafts.attachment import Attachment, AttachmentStatus, Idle, IdleReason
from services.target.drafts.attachments import Attachments

logger = logging.getLogger(__name__)
POLL_S = 0.1
"""Time between two updates."""
FIRST_LOG_PAUSE_S, LAST_LOG_PAUSE_S = 1.0, 60.0
"""Shortest time between two log lines about one draft, or about the comparison: at first, and at
most. It doubles with each line."""


class Comparison(Protocol):
    """Compares speculation with plain steps."""

    @property
    def pays(self) -> bool | None:
        """Whether speculation is faster; None while unknown."""

    def comparison(self) -> str:
        """Returns the figures behind `pays`."""


@dataclass(slots=True)
class _Logged:
    """A state that is logged when it changes; less often, the more often it changes."""

    state: str | None = None
    may_log_s: float = -math.inf
    pause_s: float = FIRST_LOG_PAUSE_S


class SpeculationState:
    """Tracks and logs whether speculation is used. Owned by the engine thread.

    Args:
        lanes: comparison of the device rounds; while it is unknown, that of the attachments counts.

    Attributes:
        detail: why no trees are verified; empty while trees are verified, or while the reason is
            unknown. Other threads may read it.
    """

    def __init__(self, attachments: Attachments, lanes: Comparison) -> None:
        self.detail = ""
        self._attachments = attachments
        self._lanes = lanes
        self._next_s = -math.inf
        # By attachment id; the state of the comparison has an empty id.
        self._logged: dict[str, _Logged] = {"": _Logged()}

    def update(self, now_s: float) -> None:
        """Updates the state at the beginning of a turn of the loop, at most every `POLL_S`; other
        calls cost one comparison."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + POLL_S
        drafts = {draft.identity.attachment_id: draft for draft in self._attachments.drafts.live}
        source = self._attachments if self._lanes.pays is None else self._lanes
        if not drafts:
            self.detail = ""
        elif (pays := source.pays) is not None:
            figures = source.comparison()
            self.detail = "" if pays else f"plain steps are faster here: {figures}"
            state = "on" if pays else "off"
            self._log("", state, f"speculation is {state}: {self.detail or figures}", now_s)
        for detached_id in self._logged.keys() - {"", *drafts}:
            del self._logged[detached_id]
        for attachment_id, draft in drafts.items():
            idle = _own_idle(draft, now_s)
            if idle is not None or attachment_id in self._logged:
                state = "" if idle is None else idle.reason.value
                what = "its trees arrive in time again" if idle is None else idle.detail
                self._log(attachment_id, state, f"draft {draft.identity.worker_id}: {what}", now_s)

    def explained(self, status: AttachmentStatus, now_s: float) -> AttachmentStatus:
        """Returns the status of a draft with the reason why none of its trees is verified."""
        idle = _own_idle(status.attachment, now_s)
        if idle is None and self.detail:
            idle = Idle(IdleReason.PLAIN_IS_FASTER, self.detail)
        return replace(status, idle=idle)

    def _log(self, key: str, state: str, line: str, now_s: float) -> None:
        logged = self._logged.setdefault(key, _Logged())
        if state != logged.state and now_s >= logged.may_log_s:
            logged.state, logged.may_log_s = state, now_s + logged.pause_s
            logged.pause_s = min(2.0 * logged.pause_s, LAST_LOG_PAUSE_S)
            logger.info("%s", line)


def _own_idle(draft: Attachment, now_s: float) -> Idle | None:
    """Returns why a draft cannot help now, for a reason of its own; None if it can."""
    if draft.warm_up.is_on(now_s) or draft.is_mapping:
        return Idle(IdleReason.WARMING_UP, "it is warming up (CUDA graphs, kernels)")
    if draft.timeout.is_cold:
        return Idle(IdleReason.SILENT, "it does not answer; the target steps without its trees")
    return None
