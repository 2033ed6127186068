"""The worker's log, in the server's format, on the stderr shared with the server."""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from types import TracebackType

from trioserve.protocol.log_output import WORKER_LOG, StderrHandler, escaped


class _JsonFormatter(logging.Formatter):
    """One JSON object for each event, with the field names of the server's log."""

    def format(self, record: logging.LogRecord) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat()
        event: dict[str, object] = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            "pid": record.process,
            "timestamp": now.replace("+00:00", "Z"),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


class ConsoleFormatter(logging.Formatter):
    """Lines of text with control characters escaped, so that no input can control a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record), keep="\n\t")


def set_up_logging() -> None:
    """Log to stderr, including Python warnings and uncaught exceptions.

    An engine embedded in another program sets no format; the worker then logs lines of text.
    """
    log_format, _, level = os.environ.get(WORKER_LOG, "").partition(":")
    handler = StderrHandler()
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(ConsoleFormatter("worker %(process)d: %(message)s"))
    logging.basicConfig(handlers=[handler], level=level.upper() or logging.INFO)
    logging.captureWarnings(True)
    sys.excepthook = _log_crash


def _log_crash(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    logging.getLogger("gpu.worker").critical("crashed", exc_info=(kind, error, traceback))
