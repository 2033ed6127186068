"""Logging: structlog events on the standard loggers, and their setup for the command line.

As a library, trioserve only emits: an event goes to the standard logger of its name as one line of
text, and the program decides where it goes. :func:`setup_logging` is for trioserve's own programs.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, cast

import structlog

from trioserve.protocol.log_output import WORKER_LOG, StderrHandler, escaped

ASKED_FOR = "trioserve.dump"
"""Name of the logger for explicitly requested output, which is logged at every level."""

Renderer = Callable[[Any, str, dict[str, Any]], str]


def _to_record(
    _: Any, __: str, event: structlog.typing.EventDict
) -> tuple[tuple[str], dict[str, Any]]:
    """Return the arguments of a standard logger's method: a line of text, with the event's
    fields.
    """
    standard = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    name = str(event.pop("event", ""))
    text = " ".join([name, *(f"{key}={value!r}" for key, value in event.items())])
    extra = {"event": name, "fields": dict(event)}
    # Without arguments, a percent sign in the text isn't a placeholder.
    return (text,), {**standard, "extra": extra}


_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.contextvars.merge_contextvars,
    _to_record,
]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a structlog logger over the standard logger ``name``: ``log.info("event",
    key=value)``.
    """
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return cast(structlog.stdlib.BoundLogger, logger.bind())


class _Formatter(logging.Formatter):
    """Formatter of trioserve's events with their fields, and of other libraries' messages."""

    def __init__(self, timestamp: structlog.typing.Processor, renderer: Renderer) -> None:
        super().__init__()
        self._timestamp = timestamp
        self._renderer = renderer

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        event = {
            "level": level,
            "logger": record.name,
            "event": getattr(record, "event", None) or record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            event["exc_info"] = record.exc_info
        self._timestamp(None, level, event)
        return self._renderer(None, level, event)


def _console_renderer() -> Renderer:
    console = structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(),
        exception_formatter=structlog.dev.plain_traceback,
        pad_event_to=0,
    )

    def render(_: Any, level: str, event: dict[str, Any]) -> str:
        # An exception becomes text first, so that its message is escaped, too.
        event = dict(structlog.processors.format_exc_info(None, level, event))
        shown = {
            key: escaped(value, keep="\n\t") if isinstance(value, str) else value
            for key, value in event.items()
        }
        # A dump is trusted and has many lines; in other texts a client may have put the line's end.
        tasks = shown.pop("tasks", None) if shown["logger"] == ASKED_FOR else None
        line = str(console(None, level, shown))
        return line if tasks is None else f"{line}\n{tasks}"

    return render


def _render_json(_: Any, level: str, event: dict[str, Any]) -> str:
    event = dict(structlog.processors.format_exc_info(None, level, event))
    return str(structlog.processors.JSONRenderer(default=str)(None, level, event))


def setup_logging(level: str = "info", log_format: str = "auto") -> None:
    """Send every log of this process and its workers to stderr. A library must not call this.

    Args:
        level: the lowest level of trioserve's own events. Other libraries' start at "warning".
        log_format: ``console``, ``json``, or ``auto``: console on a terminal, else json.
    """
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    if as_json:
        timestamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
        formatter = _Formatter(timestamp, _render_json)
    else:
        timestamp = structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False)
        formatter = _Formatter(timestamp, _console_renderer())
    handler = StderrHandler()
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("trioserve").setLevel(level.upper())
    logging.getLogger(ASKED_FOR).setLevel(logging.INFO)
    os.environ[WORKER_LOG] = f"{'json' if as_json else 'console'}:{level}"
    structlog.configure(
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
