"""Errors in messages: the other process raises the error that was raised in this one."""

from __future__ import annotations

import msgspec

from trioserve.protocol import errors
from trioserve.protocol.errors import EngineError, TrioserveError

Plain = str | float | bool | None

_KINDS: dict[str, type[TrioserveError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TrioserveError)
}


class ErrorMessage(msgspec.Struct, frozen=True, array_like=True):
    """An error of :mod:`trioserve.protocol.errors`: its class, its message, its attributes."""

    kind: str
    message: str
    attributes: dict[str, Plain] = {}


def fault_of(error: BaseException) -> ErrorMessage:
    """Return ``error`` for a message. An error that isn't trioserve's becomes an ``EngineError``.

    Its cause and its traceback stay here.
    """
    kind = next((each for each in type(error).__mro__ if each.__name__ in _KINDS), None)
    if kind is None:
        return ErrorMessage(EngineError.__name__, f"{type(error).__name__}: {error}")
    attributes = {
        name: value
        for name, value in vars(error).items()
        if value is None or isinstance(value, (str, float, int))
    }
    return ErrorMessage(kind.__name__, str(error), attributes)


def error_of(fault: ErrorMessage) -> TrioserveError:
    """Return the error that ``fault`` describes."""
    kind = _KINDS.get(fault.kind, EngineError)
    # Its own constructor may change the message, which has been done already.
    error = kind.__new__(kind, fault.message)
    Exception.__init__(error, fault.message)
    for name, value in fault.attributes.items():
        setattr(error, name, value)
    return error
