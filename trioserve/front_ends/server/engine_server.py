"""The engine process: validation, scheduler and worker for all front ends, and nothing of text.

::

    session 0, session 1, … ──▶ validation ──▶ scheduler ══▶ worker
               ▲                                   │   ▲
               └────────────── routing ◀───────────┘   ╚══════ worker
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import attrs
import trio

from trioserve._util.channels import receive_waiting
from trioserve._util.feed import Feed
from trioserve._util.pair_socket import MessageSocket
from trioserve.config import EngineConfig, ServerConfig
from trioserve.engine.control import Control
from trioserve.engine.engine_worker import MakeWorker
from trioserve.engine.idle_check import IdleCheck
from trioserve.engine.media import worker_encoder
from trioserve.engine.sessions.sessions import Sessions
from trioserve.engine.tasks import open_tasks
from trioserve.engine.worker_group import WorkerGroup
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.heartbeat import patience_of
from trioserve.front_ends.messages import Offered
from trioserve.front_ends.server.administration import HostedAdministration
from trioserve.front_ends.server.context import ServerContext
from trioserve.front_ends.server.peers import Peers
from trioserve.front_ends.server.session import FrontEndSession
from trioserve.model_files.encoder_files import ModelTask
from trioserve.observability.live import Monitor
from trioserve.observability.live.figures import Tally
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.snapshot import MetricsSnapshot, snapshot_of
from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.task_dump import reporting
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, Paused
from trioserve.requests.adapters import Adapter
from trioserve.requests.admission import DEFAULT_MAX_TOKENS, Admission
from trioserve.requests.request import Request, SequenceOutput
from trioserve.text.worker_validation import WorkerValidation
from trioserve.workers.remote.port import WorkersPort


class EngineServer:
    """The engine process's part of a server with front ends. Made by :func:`open_host`.

    Args:
        config: the server's options.
        ready: the first worker's device and limits.
        workers: compute the requests of all front ends.
        metrics: this process's own.
        submit: takes a request in for validation.
    """

    def __init__(
        self,
        config: ServerConfig,
        ready: wire.Ready,
        workers: WorkerGroup,
        metrics: Metrics,
        submit: Callable[[Request], None],
    ) -> None:
        self.config: EngineConfig = config.engine
        self.ready = ready
        self.metrics = metrics
        self.failure: EngineError | None = None
        """Why everything is ending, once it is."""
        self.worker_group = workers
        self.schedulers = schedulers = workers.schedulers
        self.front_end_restarts = 0
        """Front ends that were replaced."""
        self._peers = Peers()
        schedulers.adapters.on_change = self._tell_adapters
        self._admission = Admission(
            queue=schedulers,
            max_requests=self.config.max_num_queued_reqs,
            max_tokens=self.config.max_num_queued_tokens
            or max(DEFAULT_MAX_TOKENS, ready.max_model_len),
        )
        self.control = Control(schedulers, self._peers)
        self.sessions = Sessions(schedulers.pins, self.config.max_sessions)
        self._clock = SharedClock.now()
        self._closed_requests: Feed[Request] = Feed()
        self.monitor = Monitor(
            workers=workers,
            departures=self._closed_requests,
            open_requests=self._peers.newest_requests,
            statistics=self.statistics,
            tally=lambda: Tally.of_snapshot(self._snapshot()),
            health=self._health,
            weight_version=lambda: self.control.weight_version,
        )
        """The source of snapshots."""
        self._context = self._make_context(config, submit)
        self._administration = HostedAdministration(
            engine=self,
            peers=self._peers,
            clock=self._clock,
            snapshot=self._snapshot,
            check_pause=self._check_pause,
        )
        self.on_none_open: Callable[[], None] = lambda: None
        """Called whenever the last open request has ended."""

    def _make_context(
        self, config: ServerConfig, submit: Callable[[Request], None]
    ) -> ServerContext:
        """Return the parts of this process that front ends share."""
        return ServerContext(
            schedulers=self.schedulers,
            enter=self._enter,
            forget=self._forget,
            submit=submit,
            clock=self._clock,
            on_queue_change=self._on_queue_change,
            permits=Counter(),
            max_seats=config.max_requests_per_key or 0,
            sessions=self.sessions,
            monitor=self.monitor,
            caches=self.schedulers.cache_feed,
            media=worker_encoder(config.engine, self.schedulers, self.metrics),
            look_around=self._peers.look_around,
            patience=patience_of(config.engine),
        )

    # ---- front ends

    @contextlib.contextmanager
    def at_home(self, socket: MessageSocket) -> Iterator[FrontEndSession]:
        """Open a session for the front end at ``socket`` for as long as the block lasts."""
        peer = FrontEndSession(socket, self._context, self._administration)
        with self._peers.connected(peer):
            # There may be others than when it was told to start.
            peer.tell(Offered(self.adapters))
            yield peer

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters that requests may name, without embeddings."""
        return [attrs.evolve(each, spans=()) for each in self.schedulers.adapters.catalogue]

    @property
    def peers(self) -> list[FrontEndSession]:
        """The sessions of the connected front ends."""
        return self._peers.sessions

    def _enter(self, request: Request) -> None:
        self._check_pause()
        self._admission.enter(request, trio.current_time())

    def _check_pause(self) -> None:
        if self.control.refuses:
            raise Paused("the engine is paused, and takes no requests meanwhile")

    def _forget(self, request: Request) -> None:
        self._admission.forget(request)
        if self._closed_requests.is_wanted:
            self._closed_requests.publish(request)
        if not self._peers.have_requests:
            self.on_none_open()

    def _on_queue_change(self) -> None:
        for peer in self._peers.sessions:
            peer.wake()

    async def route(self, outputs: trio.MemoryReceiveChannel[list[SequenceOutput]]) -> None:
        """Give each front end its outputs until ``outputs`` is closed. This is a task."""
        async for first in outputs:
            for batch in (first, *receive_waiting(outputs)):
                self._take_apart(batch)

    def _take_apart(self, outputs: list[SequenceOutput]) -> None:
        # This is done for every token. All sequences here are hosted.
        for output in outputs:
            sequence: Any = output.sequence
            token_ids = output.token_ids
            if sequence.is_plain and output.finish is None and len(token_ids) == 1:
                owner = sequence.owner
                owner.numbers.append(sequence.number)
                owner.tokens.append(token_ids[0])
            else:
                sequence.owner.take(sequence, output)
        time = self._clock.shared(trio.current_time())
        for peer in self._peers.sessions:
            peer.hosted.end_step(time)

    def _tell_adapters(self) -> None:
        for peer in self._peers.sessions:
            peer.tell(Offered(self.adapters))

    # ---- what can be seen

    def _snapshot(self) -> MetricsSnapshot:
        """Return the counts of all processes, those of front ends as of their last answers."""
        return self._peers.counted(snapshot_of(self.metrics))

    def _health(self) -> str:
        if self.schedulers.stalled:
            return "stalled"
        return "ok" if self.schedulers.attached else "no_worker"

    @property
    def idle(self) -> bool:
        """True if no request is open, and nothing more is computed for closed ones."""
        return not self._peers.have_requests and self.schedulers.idle

    def statistics(self) -> EngineStatistics:
        """Return the counts of this moment, those of front ends as of their last answers."""
        counted = [peer.counted for peer in self._peers.sessions]
        return EngineStatistics(
            scheduler=self.schedulers.statistics(),
            num_tokenizing=sum(each.num_tokenizing for each in counted),
            num_streams=sum(each.num_streams for each in counted),
            stream_bytes=sum(each.stream_bytes for each in counted),
            worker_restarts=self.worker_group.num_restarts,
            num_sessions=len(self.sessions),
            front_end_restarts=self.front_end_restarts,
            memory_released=self.control.memory_released,
            workers=tuple(self.worker_group.reports()),
        )

    def check_integrity(self) -> None:
        """Assert the invariants of the scheduler, the page pool, the queue and the sessions.

        Raises:
            AssertionError: one is violated; this is a bug in trioserve.
        """
        self.schedulers.check_integrity()
        self._admission.check_integrity()
        self.sessions.check_integrity()
        num_open = sum(len(each.sequences) for each in self._peers)
        assert self._admission.num_entering <= num_open

    def report(self) -> str:
        """Return the beginning of a dump of tasks."""
        num_requests = [len(peer.requests) for peer in self._peers.sessions]
        lag = self.metrics.loop_lag.peak
        return (
            f"engine of {len(num_requests)} front ends with {num_requests} requests\n"
            f"{self.statistics().summary()}\nevent loop's worst recent lag: {lag:.3f} s"
        )


@contextlib.asynccontextmanager
async def open_host(
    config: ServerConfig,
    make_worker: MakeWorker,
    metrics: Metrics,
    *,
    task: ModelTask = "generate",
    port: WorkersPort | None = None,
) -> AsyncIterator[EngineServer]:
    """Run the engine process's tasks. No front end is started yet. ``task`` is the model's.

    ``port`` is for workers of other hosts.

    Raises:
        ModelLoadError: the model can't be loaded.
        EngineError: the engine failed while the block ran.
    """
    to_validation, validation_inbox = trio.open_memory_channel[Request](math.inf)
    to_scheduler, scheduler_inbox = trio.open_memory_channel[Request](math.inf)
    to_routing, routing_inbox = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    engine_server: EngineServer | None = None
    workers = WorkerGroup.of(
        config.engine, metrics, make_worker, encodes=task in ("embed", "classify"), port=port
    )
    schedulers = workers.schedulers
    validation = WorkerValidation(
        schedulers, timeout=config.engine.grammar_timeout, observe_grammar=metrics.observe_grammar
    )

    def on_failure(error: EngineError) -> None:
        if engine_server is not None:
            engine_server.failure = error

    async with open_tasks(on_failure) as tasks:
        tasks.start_soon(validation.run, validation_inbox, to_scheduler)
        tasks.start_soon(schedulers.run, scheduler_inbox, to_routing)
        ready = await workers.start(tasks, config.engine)
        submit = to_validation.send_nowait
        engine_server = EngineServer(config, ready, workers, metrics, submit)
        engine_server.sessions.start_task = tasks.start_soon
        tasks.is_ready = True
        tasks.start_soon(engine_server.route, routing_inbox)
        metrics.watch(engine_server)
        idle_check = IdleCheck(engine_server, schedulers)
        engine_server.on_none_open = idle_check.note
        schedulers.notify_idle(idle_check.note)
        tasks.start_soon(idle_check.run)
        with reporting(engine_server.report):
            yield engine_server
