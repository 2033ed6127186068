"""All front ends of a server: started together, replaced one by one, drained and ended together."""

from __future__ import annotations

import attrs
import trio

from trioserve._util.exception_groups import sole_exception
from trioserve.config import ServerConfig
from trioserve.front_ends.messages import Drain, Failed, FrontEndStart, Stop
from trioserve.front_ends.processes.process import run_front_end
from trioserve.front_ends.remote.joined import JoinedFrontEnds
from trioserve.front_ends.server.engine_server import EngineServer
from trioserve.front_ends.server.session import FrontEndSession, log_loss
from trioserve.front_ends.wire_errors import fault_of
from trioserve.http.server.listeners import SharedListening
from trioserve.observability.logs import get_logger
from trioserve.protocol.errors import EngineError, TrioserveError

FIRST_DELAY = 0.05
MAX_DELAY = 5.0
"""Seconds before a front end is replaced: the first time, and at most."""
END_GRACE = 10.0
"""Seconds for last events, and spans that wait for a collector, behind ``shutdown_timeout``."""
STABLE_SECONDS = 60.0
"""Seconds after which a front end has proved that it can live."""

_log = get_logger("trioserve.front_end")


@attrs.define(eq=False, kw_only=True)
class ProcessPool:
    """The front ends of one server.

    Args:
        engine_server: has their sessions.
        config: the server's options, with how many there are to be.
        name: the model's own name.
        path: the model's folder or file.
        listening: the sockets that they listen on.
        joined: those of other hosts, if they may join.
        files: hashes of the files that these must have.
    """

    engine_server: EngineServer
    config: ServerConfig
    name: str
    path: str
    listening: SharedListening
    joined: JoinedFrontEnds | None = None
    files: dict[str, str] = attrs.field(factory=dict)
    _num_listening: int = attrs.field(default=0, init=False)
    _all_listen: trio.Event = attrs.field(factory=trio.Event, init=False)
    _is_draining: bool = attrs.field(default=False, init=False)
    _num_cut: int = attrs.field(default=0, init=False)

    async def serve(
        self,
        shutdown: trio.Event,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> int:
        """Keep all front ends alive until ``shutdown`` is set and they have drained.

        ``task_status`` is told when all of them listen.

        Returns:
            how many requests were cut off.

        Raises:
            TrioserveError: a front end can't serve at all, and why.
            EngineError: front ends died again and again.
        """
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                for index in range(self.config.api_server_count):
                    nursery.start_soon(self._keep, index)
                await self._all_listen.wait()
                if self.joined is not None:
                    serve = self.joined.serve
                    host, start = self.engine_server, self.start_elsewhere
                    nursery.start_soon(serve, host, start, self.last_word)
                task_status.started()
                await shutdown.wait()
                self._is_draining = True
                if self.joined is not None:
                    self.joined.drain()
                for peer in self.engine_server.peers:
                    peer.tell(Drain())
                # They keep the time themselves; one that is stopped doesn't.
                patience = self.config.shutdown_timeout + END_GRACE
                nursery.cancel_scope.deadline = trio.current_time() + patience
        except BaseExceptionGroup as group:
            failure = sole_exception(group)
        if failure is not None:
            raise failure
        return self._num_cut + (0 if self.joined is None else self.joined.num_cut)

    async def _keep(self, index: int) -> None:
        """Run one front end after the other at a place, until one has drained."""
        deaths = 0
        has_listened = False
        lost_at = trio.current_time()
        while True:
            began = trio.current_time()
            peer: FrontEndSession | None = None
            try:
                async with run_front_end(
                    self._start(index), self.listening.descriptors, last_word=self.last_word
                ) as socket:
                    with self.engine_server.at_home(socket) as peer:
                        if has_listened:
                            _log.info(
                                "front end replaced",
                                front_end=index,
                                seconds=round(trio.current_time() - lost_at, 3),
                                restarts=self.engine_server.front_end_restarts,
                            )
                        else:
                            has_listened = True
                            self._note_listening()
                        if self._is_draining:
                            peer.tell(Drain())
                        self._num_cut += await peer.run()
                return
            except trio.Cancelled:
                self._num_cut += 0 if peer is None else peer.num_lost
                raise
            except TrioserveError as loss:
                if not has_listened:
                    raise
                num_requests = 0 if peer is None else peer.num_lost
                if self._is_draining:
                    self._num_cut += num_requests
                    return
                has_worked = peer is not None and peer.num_ended > num_requests
                if has_worked or trio.current_time() - began >= STABLE_SECONDS:
                    deaths = 0
                deaths += 1
                restarts = self.engine_server.front_end_restarts
                log_loss(
                    loss, index, num_requests, restarts=restarts, deaths_without_progress=deaths
                )
                if deaths > self.config.engine.max_worker_restarts:
                    raise EngineError(f"front ends died {deaths} times: {loss}") from loss
                lost_at = trio.current_time()
            self.engine_server.front_end_restarts += 1
            await trio.sleep(min(FIRST_DELAY * 2 ** (deaths - 1), MAX_DELAY))

    def _start(self, index: int) -> FrontEndStart:
        return FrontEndStart(
            index=index,
            count=self.config.api_server_count,
            config=self.config,
            name=self.name,
            path=self.path,
            files={},
            ready=self.engine_server.ready,
            sockets=self.listening.by_process[index],
            adapters=self.engine_server.adapters,
        )

    def start_elsewhere(self, number: int) -> FrontEndStart:
        """Return what a front end of another host is to serve, with its number among these."""
        start = self._start(0)
        start.index, start.sockets = self.config.api_server_count + number, []
        start.files = self.files
        return start

    def last_word(self) -> Stop | Failed:
        """Return what a front end is told at the end."""
        failure = self.engine_server.failure
        return Stop() if failure is None else Failed(fault_of(failure))

    def _note_listening(self) -> None:
        self._num_listening += 1
        if self._num_listening == self.config.api_server_count:
            self._all_listen.set()
