"""Settings of the tests with several processes' worth of servers."""

from __future__ import annotations

import pytest

from services.target.drafts import attachment
from services.target.rounds import round_shapes


@pytest.fixture(autouse=True)
def patient_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets wait for a draft as long as `--candidate-wait-ms` lets them, not a few times as long
    as it usually takes: on a busy machine a draft may be late by any factor."""
    monkeypatch.setattr(attachment, "SHORTEST_WAIT_S", 3600.0)


@pytest.fixture(autouse=True)
def rounds_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rounds take is measured before the first one, and nothing here depends on it."""
    monkeypatch.setattr(round_shapes, "_NUM_TIMED", 1)
