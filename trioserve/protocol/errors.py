"""Every exception that trioserve raises on purpose, and what each one means to a caller.

The HTTP status of each is decided in one place, :mod:`trioserve.http.api.errors`.
"""

from __future__ import annotations

from trioserve.protocol.log_output import escaped

__all__ = [
    "AdapterNotFound",
    "ContextTooLong",
    "DeadlineExceeded",
    "Draining",
    "EngineError",
    "FrontEndLost",
    "InvalidRequest",
    "ModelLoadError",
    "Paused",
    "QueueFull",
    "RequestAborted",
    "SessionLimit",
    "ShuttingDown",
    "SlowReader",
    "TrioserveError",
    "WatcherLimit",
    "WorkerLost",
]

_MAX_HALF_MESSAGE = 1000


class TrioserveError(Exception):
    """The base of every error that trioserve raises on purpose."""


class InvalidRequest(TrioserveError, ValueError):
    """A request that can never be served as it stands.

    Attributes:
        param: the name of the offending field, as the client wrote it, or None.
        code: a short machine-readable word such as ``"context_length_exceeded"``, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class AdapterNotFound(InvalidRequest):
    """The request names an adapter that isn't loaded (any more), or a folder that isn't there."""

    def __init__(self, message: str, *, param: str | None = "adapter") -> None:
        super().__init__(message, param=param, code="model_not_found")


class ContextTooLong(InvalidRequest):
    """The prompt and the tokens asked for fit neither the model's length nor the page pool.

    Clients know it by words of OpenAI's message: ``this model's maximum context length is``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(TrioserveError):
    """The model can't be found, read or understood; the message is one line and says what to do.

    It may quote names out of a file that somebody else has made: characters that can't be printed
    are written as escapes, and of a very long message the middle is left out.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class QueueFull(TrioserveError):
    """The waiting queue is at its bound; ``retry_after`` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def printable(text: str) -> str:
    """``text`` from somewhere else as one line that does nothing to a terminal."""
    if len(text) > 2 * _MAX_HALF_MESSAGE:
        text = f"{text[:_MAX_HALF_MESSAGE]} … {text[-_MAX_HALF_MESSAGE:]}"
    return escaped(text)


class SessionLimit(TrioserveError):
    """As many sessions are open as may be."""


class WatcherLimit(TrioserveError):
    """As many watch the engine (:func:`trioserve.observability.live.watch`) as may."""


class Draining(TrioserveError):
    """The engine is shutting down and admits nothing new."""


class Paused(TrioserveError):
    """The engine is paused, and was told to refuse what comes meanwhile."""


class DeadlineExceeded(TrioserveError):
    """The request's own ``timeout`` ran out."""


class RequestAborted(TrioserveError):
    """The request was ended by somebody other than its caller (an administrator, a shutdown)."""


class ShuttingDown(RequestAborted):
    """The request ran when its server ended, and got no more time to finish."""


class SlowReader(TrioserveError):
    """The reader of a stream fell behind by more than the bytes allowed, and was aborted."""


class EngineError(TrioserveError):
    """The engine itself failed. The cause, where there is one, is ``__cause__``."""


class CallFailed(EngineError):
    """The worker couldn't do what it was asked for, and says why in ``reason``; it goes on."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


class WorkerLost(TrioserveError):
    """A worker process died, hung or spoke nonsense; the supervisor decides what follows.

    Attributes:
        from_outside: whether it was ended by a signal that others send, and no fault raises.
        reason: ``killed`` (from outside), ``crashed`` (the process ended otherwise), ``hung``, or
            ``failed`` (it said that it can't go on, or what makes no sense).
    """

    def __init__(self, message: str, *, from_outside: bool = False, reason: str = "failed") -> None:
        super().__init__(message)
        self.from_outside = from_outside
        self.reason = "killed" if from_outside else reason


class WorkerSentAway(WorkerLost):
    """The worker was sent away for a while, on request: no fault of anything that it was doing."""


class FrontEndLost(TrioserveError):
    """A front-end process died, hung or spoke nonsense; its supervisor decides what follows.

    Attributes:
        is_hung: whether it is there and says nothing any more.
    """

    def __init__(self, message: str, *, is_hung: bool = False) -> None:
        super().__init__(message)
        self.is_hung = is_hung


class NoRoomForWorker(WorkerLost):
    """No worker can be started at the moment: the disk is full, or no process is to be had."""
