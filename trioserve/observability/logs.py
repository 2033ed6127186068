"""Logging: structlog events on the standard loggers, and their setup for the command line.

As a library, trioserve only emits: an event goes to the standard logger of its name as one line of
text, and the program around it decides what becomes of that. :func:`setup_logging` is for a program
that is all ours.
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
"""The logger of what somebody asked to see: it is logged whatever the level is."""

Renderer = Callable[[Any, str, dict[str, Any]], str]


def _to_record(
    _: Any, __: str, event: structlog.typing.EventDict
) -> tuple[tuple[str], dict[str, Any]]:
    """The arguments of a standard logger's method: a line of text, the event's fields beside it."""
    standard = {key: event.pop(key) for key in ("exc_info", "stack_info") if key in event}
    name = str(event.pop("event", ""))
    text = " ".join([name, *(f"{key}={value!r}" for key, value in event.items())])
    extra = {"event": name, "fields": dict(event)}
    # A percent sign in the text is no placeholder, because there are no arguments.
    return (text,), {**standard, "extra": extra}


_PROCESSORS: list[Any] = [
    structlog.stdlib.filter_by_level,
    structlog.stdlib.PositionalArgumentsFormatter(),
    structlog.contextvars.merge_contextvars,
    _to_record,
]


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """A structlog logger over the standard logger ``name``: ``log.info("event", key=value)``."""
    logger = structlog.wrap_logger(
        logging.getLogger(name),
        processors=_PROCESSORS,
        wrapper_class=structlog.stdlib.BoundLogger,
        context_class=dict,
    )
    return cast(structlog.stdlib.BoundLogger, logger.bind())


class _Formatter(logging.Formatter):
    """Renders our events with their fields, and other libraries' messages alike."""

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
        # An exception becomes text first, so that what its message quotes is escaped, too.
        event = dict(structlog.processors.format_exc_info(None, level, event))
        shown = {
            key: escaped(value, keep="\n\t") if isinstance(value, str) else value
            for key, value in event.items()
        }
        # A dump is ours, and many lines; in other texts a line's end might be a client's.
        tasks = shown.pop("tasks", None) if shown["logger"] == ASKED_FOR else None
        line = str(console(None, level, shown))
        return line if tasks is None else f"{line}\n{tasks}"

    return render


def _render_json(_: Any, level: str, event: dict[str, Any]) -> str:
    event = dict(structlog.processors.format_exc_info(None, level, event))
    return str(structlog.processors.JSONRenderer(default=str)(None, level, event))


def setup_logging(level: str = "info", log_format: str = "auto") -> None:
    """Send every log of this process and its workers to stderr. A library leaves this to its user.

    Args:
        level: the least level of trioserve's own events. Other libraries' start at "warning".
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
