"""A cable between two network namespaces, which delays and drops packets.

Each end is a TUN device. A thread passes the packets on: the kernel's own emulation of a network,
``netem``, isn't in every kernel.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

import attrs

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MAX_PACKET = 1 << 16
_LOOK_EVERY = 0.05
"""Most seconds until the thread sees that it is to end."""


def ip(*words: str) -> None:
    """Run the command ``ip``."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@attrs.define(eq=False)
class PacketCable:
    """The cable between ``ends``, which are file descriptors of TUN devices."""

    ends: tuple[int, int]
    delay: float = 0.0
    """Seconds that a packet takes."""
    loss: float = 0.0
    """Probability that a packet is dropped. With 1.0 the cable is pulled out; no end is told."""
    num_dropped: int = 0
    _ended: bool = False

    def pass_on(self) -> None:
        """Pass packets on until :meth:`end`. This blocks."""
        numbers, order = random.Random(0), itertools.count()
        due: list[tuple[float, int, int, bytes]] = []
        with selectors.DefaultSelector() as selector:
            for end, other in (self.ends, self.ends[::-1]):
                selector.register(end, selectors.EVENT_READ, other)
            while not self._ended:
                wait = due[0][0] - time.monotonic() if due else _LOOK_EVERY
                for key, _ in selector.select(max(min(wait, _LOOK_EVERY), 0)):
                    packet = os.read(key.fd, _MAX_PACKET)
                    if numbers.random() < self.loss:
                        self.num_dropped += 1
                    else:
                        at = time.monotonic() + self.delay
                        heapq.heappush(due, (at, next(order), key.data, packet))
                while due and due[0][0] <= time.monotonic():
                    _, _, end, packet = heapq.heappop(due)
                    os.write(end, packet)

    def end(self) -> None:
        """End :meth:`pass_on` soon."""
        self._ended = True


@contextlib.contextmanager
def open_cable(namespaces: tuple[str, str], addresses: tuple[str, str]) -> Iterator[PacketCable]:
    """Connect two namespaces by a device ``cable`` in each, with these addresses.

    Raises:
        OSError: There are no TUN devices here.
        subprocess.CalledProcessError: The devices can't be configured.
    """
    with contextlib.ExitStack() as stack:
        ends = []
        for side, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True)):
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            stack.callback(os.close, end)
            name = f"tc{os.getpid()}-{side}"
            request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(end, _TUNSETIFF, request)
            ip("link", "set", name, "netns", namespace, "name", "cable")
            ip("-n", namespace, "addr", "add", address, "dev", "cable")
            ip("-n", namespace, "link", "set", "cable", "up")
            ends.append(end)
        cable = PacketCable((ends[0], ends[1]))
        thread = threading.Thread(target=cable.pass_on)
        thread.start()
        stack.callback(thread.join)
        stack.callback(cable.end)
        yield cable
