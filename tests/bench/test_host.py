"""The host's cost is measured on steps in which every sequence decodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.target.step_report import StepReport
from tests.bench import host


@pytest.mark.parametrize("overlaps", [True, False])
def test_measured_steps_are_plain_decode(
    tmp_path: Path, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "OUTPUT_TOKENS", 40)
    reports: list[StepReport] = []
    engine = host.build(tmp_path, 3, overlaps=overlaps, on_step=reports.append)
    host.submit(engine, 3, host.SAMPLINGS["seeded"])
    reports.clear()
    times_ms = host.step_times_ms(engine)
    assert len(times_ms) == len(reports) > 0
    assert all(time_ms > 0.0 for time_ms in times_ms)
    assert {(report.num_rows, report.num_committed) for report in reports} == {(3, 3)}
