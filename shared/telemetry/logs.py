"""Logs of one process: one line per record, as text or JSON.

Both formats have the id of the request being served, and the `extra` of the call:

    logger.info("attached", extra={"worker_id": "draft-0", "num_sequences": 4})
"""

from __future__ import annotations

import enum
import json
import logging
import sys
import time
from typing import TextIO

from shared.telemetry.tracing import NO_REQUEST, current_request_id, current_traceparent

_MAX_CHARACTERS = 4096  # of a message, and of each text in `extra`
_RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFormat(enum.Enum):
    """The format of log records."""

    TEXT = "text"
    JSON = "json"


def configure_logs(
    service: str, *, level: str, log_format: LogFormat, stream: TextIO = sys.stderr
) -> None:
    """Sends every record of the process to one stream. Called once, by `__main__`."""
    handler = logging.StreamHandler(stream)
    is_json = log_format is LogFormat.JSON
    handler.setFormatter(JsonFormatter(service) if is_json else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _ServiceFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service


class TextFormatter(_ServiceFormatter):
    """`2026-11-21T02:53:33.120Z target INFO attached worker_id=draft-0 request=5f0c…`, and a
    traceback on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        # A line break in a message could pass for a new record.
        message = _shortened(record.getMessage()).replace("\r", "\\r").replace("\n", "\\n")
        words = [_utc(record.created), self._service, record.levelname, message]
        words += [f"{name}={value}" for name, value in _extra(record).items()]
        if (request_id := current_request_id.get()) != NO_REQUEST:
            words.append(f"request={request_id}")
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(_ServiceFormatter):
    """One JSON object per record; absent values have no key."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _utc(record.created),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": _shortened(record.getMessage()),
        }
        if (request_id := current_request_id.get()) != NO_REQUEST:
            fields["request_id"] = request_id
        if (traceparent := current_traceparent.get()) is not None:
            fields["traceparent"] = traceparent
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        # `extra` never replaces a field of the record.
        return json.dumps(_extra(record) | fields, ensure_ascii=False, default=str)


def _extra(record: logging.LogRecord) -> dict[str, object]:
    extra = {name: value for name, value in vars(record).items() if name not in _RECORD_ATTRIBUTES}
    return {n: _shortened(v) if isinstance(v, str) else v for n, v in extra.items()}


def _shortened(text: str) -> str:
    """Returns a text cut to `_MAX_CHARACTERS`, because clients can cause messages of any length."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    return f"{text[:_MAX_CHARACTERS]}… ({len(text):,} characters)"


def _utc(seconds: float) -> str:
    whole, milliseconds = divmod(round(seconds * 1e3), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole)) + f".{milliseconds:03d}Z"
