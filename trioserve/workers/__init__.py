"""The worker as the engine sees it: a link that carries messages, and a process behind it.

The scheduler knows only :class:`Link`. In production it is a pair of nng sockets
(:mod:`trioserve.workers.link`), in the simulation and in users' tests two memory channels
(:mod:`trioserve.testing`).
"""

from __future__ import annotations

from typing import Protocol

from trioserve.protocol import wire


class Link(Protocol):
    """One end of an ordered, reliable conversation with one worker.

    One task sends and one task receives at a time.
    """

    async def send(self, message: wire.Message) -> None:
        """Send ``message``. If cancelled, whether it was sent is unknown: the link is done for.

        Raises:
            WorkerLost: the peer is gone.
        """
        ...

    async def receive(self) -> wire.Message:
        """Wait for the next message. If cancelled, no message is lost.

        Raises:
            WorkerLost: the peer is gone, or sent what is no message, and everything that it had
                sent before has been received.
        """
        ...
