"""The worker as the engine sees it: a link for messages, and a process.

The scheduler knows only :class:`Link`. In production a link is a pair of nng sockets
(:mod:`trioserve.workers.link`), in tests two memory channels (:mod:`trioserve.testing`).

Imported by ``scheduler``, ``pooling``, ``engine``, ``observability.live``, ``front_ends`` and
``testing``.
"""

from __future__ import annotations

from typing import Protocol

from trioserve.protocol import wire


class Link(Protocol):
    """One end of an ordered, reliable connection to one worker.

    One task sends and one task receives at a time.
    """

    async def send(self, message: wire.Message) -> None:
        """Send ``message``. After a cancelled send, the link must not be used any more.

        Raises:
            WorkerLost: The peer is gone.
        """
        ...

    async def receive(self) -> wire.Message:
        """Return the next message. If cancelled, no message is lost.

        Raises:
            WorkerLost: The peer is gone or sent no valid message, and all earlier messages have
                been received.
        """
        ...
