"""Both ends of a stream count alike, and their logs can be laid side by side."""

from __future__ import annotations

import json
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from shared.telemetry.start_up import RoundLog, open_round_log
from shared.telemetry.wire_meter import WireMeter, WireMetrics


def test_streams_add_up_each_way() -> None:
    meter = WireMeter()
    for name in ("a", "b"):
        stream = meter.stream(name)
        stream.sent(10, "verdicts")
        stream.received(5, "candidates")
        stream.received(6, "candidates")
    assert (meter.sent.num_messages, meter.sent.num_bytes) == (2, 20)
    assert (meter.received.num_messages, meter.received.num_bytes) == (4, 22)
    registry = CollectorRegistry()
    registry.register(WireMetrics("outrider_target", meter))
    text = generate_latest(registry).decode()
    assert 'outrider_target_wire_bytes_total{direction="received"} 22.0' in text
    assert 'outrider_target_wire_messages_total{direction="sent"} 2.0' in text


def test_log_numbers_the_messages_of_each_stream(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "log.jsonl")
    meter = WireMeter(log)
    first, second = meter.stream("a"), meter.stream("b")
    first.sent(10, "verdicts")
    second.sent(11, "verdicts")
    first.sent(12, "closed")
    log.close()
    first.sent(13, "after the end")
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(each["stream"], each["number"], each["bytes"]) for each in records] == [
        ("a", 0, 10),
        ("b", 0, 11),
        ("a", 1, 12),
    ]


def test_span_ends_now(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "log.jsonl")
    before_s = time.monotonic()
    log.span("step", 0.5, rows=3)
    log.close()
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert before_s <= record["end_s"] <= time.monotonic()
    assert record["end_s"] - record["start_s"] == 0.5
    assert record["rows"] == 3


def test_span_may_have_ended_before(tmp_path: Path) -> None:
    log = RoundLog(tmp_path / "log.jsonl")
    log.span("step", 0.5, end_s=7.0)
    log.close()
    record = json.loads((tmp_path / "log.jsonl").read_text())
    assert (record["start_s"], record["end_s"]) == (6.5, 7.0)


def test_no_path_is_no_log() -> None:
    assert open_round_log(None) is None
