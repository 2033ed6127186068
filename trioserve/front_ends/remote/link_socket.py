"""A link to another host as a front end and its session use it."""

from __future__ import annotations

import attrs

from trioserve.workers.remote.joiner import raise_refusal
from trioserve.workers.remote.link import RemoteLink


@attrs.frozen
class LinkSocket:
    """The messages of a link: a :class:`~trioserve._util.pair_socket.MessageSocket`.

    Once the link is lost, it blocks. The link's owner then cancels what uses it.
    """

    _link: RemoteLink

    async def send(self, data: bytes) -> None:
        """Send a message."""
        await self._link.send_bytes(data)

    async def receive(self) -> bytes:
        """Return the next message.

        Raises:
            JoinRefused: It is a refusal.
        """
        data = await self._link.receive_bytes()
        raise_refusal(data)
        return data
