"""Every exception that trioserve raises on purpose, and its meaning to a caller.

:mod:`trioserve.http.api.errors` decides the HTTP status of each.
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
    """The request names an adapter that isn't loaded, or a folder that doesn't exist."""

    def __init__(self, message: str, *, param: str | None = "adapter") -> None:
        super().__init__(message, param=param, code="model_not_found")


class ContextTooLong(InvalidRequest):
    """The prompt and the tokens asked for exceed the model's length or the page pool.

    Clients recognize it by OpenAI's words: ``this model's maximum context length is``.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(TrioserveError):
    """The model can't be found, read or understood; the message is one line and says what to do.

    The message may quote names from an untrusted file. Characters that can't be printed are written
    as escapes, and a very long message loses its middle.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class QueueFull(TrioserveError):
    """The waiting queue is full; ``retry_after`` is a hint in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


def printable(text: str) -> str:
    """Return ``text`` as one line without characters that control a terminal."""
    if len(text) > 2 * _MAX_HALF_MESSAGE:
        text = f"{text[:_MAX_HALF_MESSAGE]} … {text[-_MAX_HALF_MESSAGE:]}"
    return escaped(text)


class SessionLimit(TrioserveError):
    """The limit of open sessions is reached."""


class WatcherLimit(TrioserveError):
    """The limit of subscriptions to :func:`trioserve.observability.live.watch` is reached."""


class Draining(TrioserveError):
    """The engine is shutting down and admits no new request."""


class Paused(TrioserveError):
    """The engine is paused and refuses requests meanwhile."""


class DeadlineExceeded(TrioserveError):
    """The request's own ``timeout`` ran out."""


class RequestAborted(TrioserveError):
    """The request was ended by an administrator or a shutdown, not by its caller."""


class ShuttingDown(RequestAborted):
    """The server shut down while the request ran, and its time to finish was over."""


class SlowReader(TrioserveError):
    """A stream's reader fell behind by more than the bytes allowed, so the request was aborted."""


class EngineError(TrioserveError):
    """The engine itself failed. The cause, where there is one, is ``__cause__``."""


class CallFailed(EngineError):
    """The worker couldn't do what a call asked for. ``reason`` says why; the worker goes on."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.reason = reason


class WorkerLost(TrioserveError):
    """A worker process died, hung or sent an invalid message; the supervisor decides what follows.

    Attributes:
        from_outside: True if the cause lies outside of the process, such as a signal that no fault
            raised, or the network.
        reason: ``killed`` (from outside), ``crashed`` (the process ended otherwise), ``hung``,
            ``unreachable`` (the link to another host was lost), or ``failed`` (it reported a fatal
            error, or sent an invalid message).
    """

    def __init__(self, message: str, *, from_outside: bool = False, reason: str = "failed") -> None:
        super().__init__(message)
        self.from_outside = from_outside
        self.reason = "killed" if from_outside and reason != "unreachable" else reason


class WorkerGone(WorkerLost):
    """A worker of another host was lost, and isn't waited for any more."""


class WorkerSentAway(WorkerLost):
    """The worker was stopped on request; no request is to blame."""


class FrontEndLost(TrioserveError):
    """A front-end process died, hung or sent an invalid message; its supervisor decides what
    follows.

    Attributes:
        is_hung: True if the process still runs but doesn't answer.
    """

    def __init__(self, message: str, *, is_hung: bool = False) -> None:
        super().__init__(message)
        self.is_hung = is_hung


class NoRoomForWorker(WorkerLost):
    """The system has no room for another worker: the disk is full, or no process is left."""
