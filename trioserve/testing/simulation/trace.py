"""The trace of a simulation, line by line, and its violations."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator

import attrs
import trio


class Violation(AssertionError):
    """A violated invariant.

    Attributes:
        invariant: The invariant, in a few words.
    """

    def __init__(self, invariant: str, detail: str = "") -> None:
        super().__init__(f"{invariant}: {detail}" if detail else invariant)
        self.invariant = invariant


@attrs.define(eq=False)
class Trace:
    """The events of a run, each a line with its virtual time.

    Two runs of one scenario must have equal traces.
    """

    lines: list[str] = attrs.field(factory=list)

    def note(self, event: str) -> None:
        """Record an event at this moment."""
        self.lines.append(f"{trio.current_time():.9f} {event}")

    def digest(self) -> str:
        """Return a hash of the trace."""
        return hashlib.blake2b("\n".join(self.lines).encode(), digest_size=8).hexdigest()


def as_violation(error: Exception) -> Violation:
    """Return ``error`` as a violation."""
    if isinstance(error, Violation):
        return error
    if isinstance(error, AssertionError):
        violation = Violation(str(error) or "the engine's assertions hold")
    else:
        violation = Violation("no error is unexpected", repr(error))
    violation.__cause__ = error
    return violation


def first_error(error: BaseException) -> BaseException:
    """Return the first error in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@contextlib.contextmanager
def logs_into(trace: Trace) -> Iterator[None]:
    """Redirect the engine's log to the trace during the block."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            trace.note(f"log: {record.getMessage()}")

    logger, handler = logging.getLogger("trioserve"), Handler()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
