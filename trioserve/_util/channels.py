"""Memory channels whose messages come in crowds: taken and passed on together.

trio's own ``receive`` and ``send`` let everybody else run each time. That is right where something
may have to be waited for. But where a thousand requests come at once, the last of them would wait
at each station for a thousand turns of the event loop, each of which is a step of all who are
served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import trio

T = TypeVar("T")


def all_waiting(channel: trio.MemoryReceiveChannel[T]) -> Iterator[T]:
    """What has been sent and not been received yet, without waiting for more."""
    while True:
        try:
            yield channel.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return


async def pass_on(channel: trio.MemorySendChannel[T], message: T) -> None:
    """Send ``message``. A checkpoint only where the channel's buffer is full.

    Raises:
        trio.BrokenResourceError, trio.ClosedResourceError: as ``channel.send``.
    """
    try:
        channel.send_nowait(message)
    except trio.WouldBlock:
        await channel.send(message)
