"""The messages between an engine and an agent on another host: that of a worker, or a front end.

An agent begins with :class:`Join` in place of Hello. That of a worker then passes messages on
between the engine and its worker process (:mod:`trioserve.protocol.wire`); a front end goes on with
messages of its own (``front_ends/messages.py``). The engine may answer with a :class:`JoinRefusal`.
:class:`LinkHeartbeat` goes both ways all the time. :class:`WorkerEnd` says why the worker process
has ended.
"""

from __future__ import annotations

from typing import Literal

import attrs

Role = Literal["worker", "front end"]
"""The part of an agent in the server."""
WorkerRole = Literal["both", "prefill", "decode"]
"""The part of each request that a worker computes."""


@attrs.frozen(kw_only=True)
class Join:
    """Agent to engine: the first message. The engine refuses another version or another model."""

    role: Role
    protocol: int
    schema: str
    version: str
    """Version of trioserve on the agent's host."""
    id: str
    """Name of the agent's process; a worker that joins again is known by it."""
    host: str
    checksum: str
    """Checksum of the model's files on the agent's host, as ``Ready.model_checksum``."""
    computes: WorkerRole = "both"
    """Role of the worker; a front end has none."""


@attrs.frozen(kw_only=True)
class JoinRefusal:
    """Engine to agent: it isn't wanted. It may try again unless that is ``final``."""

    reason: str
    final: bool


@attrs.frozen(kw_only=True)
class LinkHeartbeat:
    """Either way between hosts: a sign of life, which the other end answers with its number.

    ``time`` is that of an answer on the answering system's clock (``time.perf_counter``).
    """

    number: int
    is_answer: bool = False
    time: float = 0.0


@attrs.frozen(kw_only=True)
class WorkerEnd:
    """Agent to engine: the worker process has ended.

    ``reason`` is one line; ``from_outside`` as in
    :class:`~trioserve.protocol.errors.WorkerLost`. ``leaves`` says that the agent ends, too.
    """

    reason: str
    from_outside: bool
    leaves: bool = False
