"""A front end's own program: from Hello until it is told to leave, or its standard input ends."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence

import attrs
import structlog
import trio

from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.front_ends.client.front_end import StartedFrontEnd
from trioserve.front_ends.client.scheduler import receive_from_engine
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.messages import FrontEndHello, FrontEndStart, encode
from trioserve.front_ends.processes.process import package_folder
from trioserve.http.server.connections import raise_descriptor_limit
from trioserve.http.server.listeners import OpenListeners, inherited
from trioserve.observability.logs import setup_logging
from trioserve.observability.signals import dumping_tasks
from trioserve.protocol.errors import EngineError
from trioserve.protocol.gc_tuning import rare_collections
from trioserve.protocol.version import __version__

EXIT_FAILED = 1
EXIT_PARENT_GONE = 3


def run(url: str, index: int, descriptors: Sequence[int]) -> None:
    """Serve the engine process that listens at ``url``, on sockets that were inherited."""
    # On every line of the log.
    structlog.contextvars.bind_contextvars(front_end=index)
    program = _Program(descriptors)
    trio.run(program.main, url)
    # Threads that were given up aren't waited for.
    sys.stderr.flush()
    os._exit(program.exit_code)


@attrs.define(eq=False)
class _Program:
    _descriptors: Sequence[int]
    exit_code: int = 0

    async def main(self, url: str) -> None:
        """Talk to the engine process from beginning to end."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_parent, nursery.cancel_scope)
            try:
                with contextlib.closing(PairSocket.dial(url)) as socket:
                    await self._talk(socket)
            except (EngineError, SocketFailed):
                # The engine process has given this one up, and knows why.
                self.exit_code = EXIT_FAILED
            nursery.cancel_scope.cancel()

    async def _watch_parent(self, scope: trio.CancelScope) -> None:
        """Leave when standard input ends. The engine process holds the other end."""
        await trio.lowlevel.wait_readable(0)
        self.exit_code = EXIT_PARENT_GONE
        scope.cancel()

    async def _talk(self, socket: PairSocket) -> None:
        hello = FrontEndHello(package_folder(), __version__, os.getpid())
        await socket.send(encode(hello))
        start = await receive_from_engine(socket)
        if isinstance(start, FrontEndStart):
            setup_logging(start.config.log_level, start.config.log_format)
            raise_descriptor_limit()
            with dumping_tasks(1 + start.index), rare_collections() as freeze:
                await self._serve(socket, start, freeze)

    async def _serve(
        self, socket: PairSocket, start: FrontEndStart, freeze: Callable[[], None]
    ) -> None:
        others = [each for each in self._descriptors if each not in start.sockets]

        def listening() -> OpenListeners:
            return inherited(start.config, start.sockets, others)

        front_end = StartedFrontEnd(
            socket=socket,
            start=start,
            clock=SharedClock.now(),
            listening=listening,
            on_listening=lambda _: freeze(),
        )
        try:
            await front_end.run()
        except Exception:
            # The engine process was told, or has told it.
            self.exit_code = EXIT_FAILED
