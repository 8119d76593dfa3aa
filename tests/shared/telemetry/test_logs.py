"""A line a record, with the request it belongs to."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shared.telemetry.logs import LogFormat, configure_logs
from shared.telemetry.tracing import current_request_id, current_traceparent

logger = logging.getLogger("shared.example")


@contextlib.contextmanager
def logs(log_format: LogFormat, level: str = "info") -> Iterator[io.StringIO]:
    """Configures the root logger for the time of the block."""
    root = logging.getLogger()
    handlers, old_level = root.handlers[:], root.level
    stream = io.StringIO()
    configure_logs("target", level=level, log_format=log_format, stream=stream)
    try:
        yield stream
    finally:
        root.handlers[:], root.level = handlers, old_level


@pytest.fixture
def request_id() -> Iterator[str]:
    token = current_request_id.set("r-7")
    trace = current_traceparent.set("00-abc-def-01")
    yield "r-7"
    current_request_id.reset(token)
    current_traceparent.reset(trace)


def test_text_line_has_time_service_level_message_and_facts(request_id: str) -> None:
    with logs(LogFormat.TEXT) as stream:
        logger.info("attached %s", "now", extra={"worker_id": "draft-0"})
    time, _, rest = stream.getvalue().partition(" ")
    assert rest == "target INFO attached now worker_id=draft-0 request=r-7\n"
    assert len(time) == len("2026-11-21T02:53:33.120Z")


def test_record_outside_a_request_names_none() -> None:
    with logs(LogFormat.TEXT) as stream:
        logger.info("ready")
    assert "request" not in stream.getvalue()
    with logs(LogFormat.JSON) as stream:
        logger.info("ready")
    assert "request_id" not in json.loads(stream.getvalue())


def test_message_cannot_forge_a_record() -> None:
    with logs(LogFormat.TEXT) as stream:
        logger.info("user says %s", "hello\nERROR all is lost")
    assert stream.getvalue().count("\n") == 1


def test_traceback_is_written_in_both_forms() -> None:
    for log_format in LogFormat:
        with logs(log_format) as stream:
            try:
                raise ValueError("the cause")
            except ValueError:
                logger.exception("failed")
        assert "ValueError: the cause" in stream.getvalue()


def test_json_record_is_one_line_of_named_facts(request_id: str) -> None:
    with logs(LogFormat.JSON) as stream:
        logger.warning("slow\nline", extra={"num_rows": 3, "device": object})
    [line] = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["level"] == "WARNING"
    assert record["service"] == "target"
    assert record["logger"] == "shared.example"
    assert record["message"] == "slow\nline"
    assert record["num_rows"] == 3
    assert record["request_id"] == "r-7"
    assert record["traceparent"] == "00-abc-def-01"
    assert record["time"].endswith("Z")


def test_extra_does_not_replace_a_fact_of_the_record() -> None:
    with logs(LogFormat.JSON) as stream:
        logger.info("x", extra={"service": "gateway"})
    assert json.loads(stream.getvalue())["service"] == "target"


def test_less_severe_records_are_left_out() -> None:
    with logs(LogFormat.TEXT, level="error") as stream:
        logger.warning("no")
        logger.error("yes")
    assert "no" not in stream.getvalue()
    assert "yes" in stream.getvalue()


def test_importing_configures_nothing() -> None:
    program = (
        "import logging, shared.telemetry.logs, shared.rpc.server, shared.settings\n"
        "assert logging.getLogger().handlers == [], logging.getLogger().handlers\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
