"""Logs of one process: a line a record, for people or for machines."""

from __future__ import annotations

import enum
import json
import logging
import sys
import time

from shared.telemetry.request_id import current_request_id


class LogFormat(enum.Enum):
    """How a record is written."""

    TEXT = "text"
    JSON = "json"


def configure_logs(service: str, *, level: str, log_format: LogFormat) -> None:
    """Sends every record to standard error. Called once, by `__main__`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonFormatter(service) if log_format is LogFormat.JSON else _TextFormatter(service)
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        request_id = current_request_id.get()
        return line if request_id == "-" else f"{line} request={request_id}"


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": current_request_id.get(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
