"""Receiving and forwarding of many messages of memory channels at once.

Trio's own ``receive`` and ``send`` are checkpoints, at which every other task runs. If a thousand
requests come at once, the last of them would wait a thousand turns of the event loop at each
channel, and each turn delays all requests being served.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import trio

T = TypeVar("T")


def receive_waiting(channel: trio.MemoryReceiveChannel[T]) -> Iterator[T]:
    """Yield all messages that have been sent and not received yet, without waiting for more."""
    while True:
        try:
            yield channel.receive_nowait()
        except (trio.WouldBlock, trio.EndOfChannel):
            return


async def forward(channel: trio.MemorySendChannel[T], message: T) -> None:
    """Send ``message``. It is a checkpoint only if the channel's buffer is full.

    Raises:
        trio.BrokenResourceError, trio.ClosedResourceError: As for ``channel.send``.
    """
    try:
        channel.send_nowait(message)
    except trio.WouldBlock:
        await channel.send(message)
