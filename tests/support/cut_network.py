"""A network between two hosts that can be cut, slow or half-open: a relay in this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import attrs
import trio

CHUNK = 65536


@attrs.define(eq=False)
class Network:
    """A relay to one address. Each connection may be closed, and all bytes delayed or held back."""

    target: str
    address: str = ""
    delay: float = 0.0
    """Seconds that bytes take, each way."""
    num_connections: int = 0
    _flows: trio.Event = attrs.field(factory=trio.Event)
    _is_open: bool = True
    _streams: set[trio.SocketStream] = attrs.field(factory=set)
    """Streams that are open, two for each connection."""

    def hold(self) -> None:
        """Let nothing through any more: connections stay open, as over a cut cable."""
        self._flows = trio.Event()

    def flow(self) -> None:
        """Let everything through again."""
        self._flows.set()

    async def close(self) -> None:
        """Close all connections, and refuse new ones until :meth:`open`."""
        self._is_open = False
        for each in list(self._streams):
            await trio.aclose_forcefully(each)

    def open(self) -> None:
        """Take new connections again."""
        self._is_open = True

    async def serve(self, near: trio.SocketStream) -> None:
        """Relay one connection."""
        if not self._is_open:
            await trio.aclose_forcefully(near)
            return
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            far = await trio.open_tcp_stream(host, int(port))
        except OSError:
            await trio.aclose_forcefully(near)
            return
        self._streams |= {near, far}
        async with near, far, trio.open_nursery() as nursery:
            nursery.start_soon(self._pass_on, near, far, nursery)
            nursery.start_soon(self._pass_on, far, near, nursery)
        self._streams -= {near, far}

    async def _pass_on(
        self, source: trio.SocketStream, target: trio.SocketStream, nursery: trio.Nursery
    ) -> None:
        to_write, chunks = trio.open_memory_channel[tuple[float, bytes]](1000)

        async def write() -> None:
            async for due, data in chunks:
                await trio.sleep_until(due)
                await self._flows.wait()
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    await target.send_all(data)

        async with trio.open_nursery() as inner, to_write:
            inner.start_soon(write)
            with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                while data := await source.receive_some(CHUNK):
                    await to_write.send((trio.current_time() + self.delay, data))
            await self._flows.wait()  # a cut network brings no end of a connection either
            nursery.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def open_network(target: str) -> AsyncIterator[Network]:
    """Open a network to ``target`` for the block; its ``address`` is the near end."""
    network = Network(target)
    network.flow()
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        network.address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.start_soon(trio.serve_listeners, network.serve, [listener])
        yield network
        nursery.cancel_scope.cancel()
