"""``trioserve front-end``: a front end for an engine on another host.

It joins, reads the model's texts on its own host, listens, and serves. When the link is lost its
streams get a last event, and it stops listening until it has joined again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import structlog
import trio

from trioserve.config import ServerConfig
from trioserve.front_ends.client.front_end import StartedFrontEnd
from trioserve.front_ends.client.scheduler import receive_from_engine
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.messages import FrontEndStart, messages_hash
from trioserve.front_ends.remote.link_socket import LinkSocket
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError
from trioserve.protocol.joining import Role
from trioserve.workers.remote.joiner import Joiner
from trioserve.workers.remote.link import RemoteLink

OWN_ADDRESS = ("host", "port", "uds")
OWN_TLS = ("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs")
"""Options that are the front end's own; these only if it has a certificate, else the engine's."""

_log = get_logger("trioserve.front_end")


@attrs.define(eq=False, kw_only=True)
class FrontEndAgent(Joiner):
    """A front end on another host than its engine.

    Args:
        config: Its own options: :data:`OWN_ADDRESS` and :data:`OWN_TLS`.
        on_start: Called with all options each time that the engine has told them.
        on_listening: Called with its URLs each time that it has begun to listen.
    """

    config: ServerConfig
    on_start: Callable[[ServerConfig], None] = lambda _: None
    on_listening: Callable[[Sequence[str]], None]
    num_cut: int = attrs.field(init=False, default=0)
    """Requests that were cut off when it left."""
    _present: StartedFrontEnd | None = attrs.field(init=False, default=None)
    """The front end over the present link, once the engine has told what it serves."""

    @property
    def role(self) -> Role:
        """Its part in the server."""
        return "front end"

    @property
    def schema(self) -> str:
        """Hash of its messages."""
        return messages_hash()

    async def serve(self, link: RemoteLink, nursery: trio.Nursery) -> None:
        """Serve until it has drained, or the engine ends.

        Raises:
            TrioserveError: It can't serve, and why.
            EngineError: The engine has failed.
            JoinRefused: The engine refused it.
        """
        self._present = None
        nursery.start_soon(self._leave, link, nursery)
        socket = LinkSocket(link)
        start = await receive_from_engine(socket)
        if not isinstance(start, FrontEndStart):
            raise EngineError(f"the engine sent {type(start).__name__} where its start was due")
        start = self._for_this_host(start)
        link.agree(start.config.engine.worker_link_timeout)
        self.on_start(start.config)
        structlog.contextvars.bind_contextvars(front_end=start.index)
        _log.info("joined", engine=self.engine, host=self.host)
        await link.clock.is_known.wait()

        def on_listening(urls: Sequence[str]) -> None:
            self._attempts = 0
            self.on_listening(urls)

        self._present = StartedFrontEnd(
            socket=socket,
            start=start,
            clock=SharedClock(lambda: link.clock.offset),
            on_listening=on_listening,
        )
        num_cut = await self._present.run()
        if self._leaving.is_set():
            self.num_cut += num_cut
        else:
            _log.info("the engine has ended")

    async def _leave(self, link: RemoteLink, nursery: trio.Nursery) -> None:
        """Drain the front end when the process leaves; count what the link's loss cuts off."""
        await self._leaving.wait()
        if self._present is None:
            nursery.cancel_scope.cancel()
            return
        self._present.shutdown.set()
        await link.ended.wait()
        self.num_cut += self._present.num_requests

    def _for_this_host(self, start: FrontEndStart) -> FrontEndStart:
        """Return ``start`` with what is this host's own."""
        names = OWN_ADDRESS + (OWN_TLS if self.config.ssl_certfile is not None else ())
        own = {name: getattr(self.config, name) for name in names}
        start.config = attrs.evolve(start.config, **own)
        start.path = self.model
        return start
