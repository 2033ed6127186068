"""The messages between an engine and the agent of a worker on another host.

The agent stands in the worker's place. It begins with :class:`Join` in place of Hello, and then
passes messages on between the engine and its worker process (:mod:`trioserve.protocol.wire`). The
engine may answer with a :class:`JoinRefusal`. :class:`LinkHeartbeat` goes both ways all the time.
:class:`WorkerEnd` says why the worker process has ended.
"""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Join:
    """Agent to engine: the first message. The engine refuses another version or another model."""

    protocol: int
    schema: str
    version: str
    """Version of trioserve on the agent's host."""
    id: str
    """Name of the agent's process; a worker that joins again is known by it."""
    host: str
    checksum: str
    """Checksum of the model's files on the agent's host, as ``Ready.model_checksum``."""


@attrs.frozen(kw_only=True)
class JoinRefusal:
    """Engine to agent: the worker isn't wanted. It may try again unless that is ``final``."""

    reason: str
    final: bool


@attrs.frozen(kw_only=True)
class LinkHeartbeat:
    """Either way between hosts: a sign of life, which the other end answers with its number."""

    number: int
    is_answer: bool = False


@attrs.frozen(kw_only=True)
class WorkerEnd:
    """Agent to engine: the worker process has ended.

    ``reason`` is one line; ``from_outside`` as in
    :class:`~trioserve.protocol.errors.WorkerLost`. ``leaves`` says that the agent ends, too.
    """

    reason: str
    from_outside: bool
    leaves: bool = False
