"""The engine process: preparation, scheduler and worker for all front ends, and nothing of text.

::

    Home 0, Home 1, … ──▶ preparation ──▶ scheduler ══▶ worker
            ▲                                │   ▲
            └──────────── routing ◀──────────┘   ╚══════ worker
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import attrs
import msgspec
import trio

from trioserve._util.channels import all_waiting
from trioserve._util.feed import Feed, Tail
from trioserve._util.pair_socket import PairSocket
from trioserve.config import EngineConfig, ServerConfig
from trioserve.config.adapter_paths import named_paths
from trioserve.engine.control import Control
from trioserve.engine.idle_check import IdleCheck
from trioserve.engine.sessions.sessions import Sessions
from trioserve.engine.tasks import open_tasks
from trioserve.front_ends.client.scheduler import EngineState
from trioserve.front_ends.clock import SharedClock
from trioserve.front_ends.heartbeat import patience_of
from trioserve.front_ends.messages import Offered
from trioserve.front_ends.server.context import ServerContext
from trioserve.front_ends.server.session import FrontEndSession
from trioserve.http.api.openai.responses.store import KeptResponses
from trioserve.model_files.encoder_files import ModelTask
from trioserve.observability.live import Monitor
from trioserve.observability.live.figures import Tally
from trioserve.observability.live.requests import newest_first
from trioserve.observability.live.schema import TaskNode
from trioserve.observability.metrics import Metrics
from trioserve.observability.metrics.snapshot import MetricsSnapshot, add_up, snapshot_of
from trioserve.observability.scheduler_statistics import SchedulerStatistics
from trioserve.observability.statistics import EngineStatistics
from trioserve.observability.task_dump import reporting
from trioserve.pooling.batcher import Batcher, supervised_batcher
from trioserve.pooling.columns import Columns
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, InvalidRequest, Paused, TrioserveError
from trioserve.requests.adapters import Adapter
from trioserve.requests.admission import DEFAULT_MAX_TOKENS, Admission
from trioserve.requests.request import Request, SequenceOutput
from trioserve.scheduler.cache_events import CacheEvent
from trioserve.scheduler.iterations import Iteration
from trioserve.scheduler.scheduler import Scheduler
from trioserve.text.preparation import Preparation
from trioserve.workers.supervisor import Supervisor

ANSWER_SECONDS = 2.0
"""For a front end to answer. One that doesn't is asked in vain: what it has counted is then what it
said before."""
LOOK_SECONDS = 0.5
"""The same for a picture, of which another will follow soon."""


@attrs.frozen(kw_only=True)
class Collected:
    """What all processes together have counted, and what they do at this moment."""

    snapshot: MetricsSnapshot
    statistics: EngineStatistics


class EngineServer:
    """What front ends are at home in. Made by :func:`open_host`.

    Args:
        config: the server's options.
        ready: what the first worker said of itself.
        scheduler: computes everybody's requests.
        supervisor: keeps its worker alive.
        metrics: this process's own.
        submit: takes a request in for preparation.
        batcher: has texts computed as a whole, if the model is an encoder.
    """

    def __init__(
        self,
        config: ServerConfig,
        ready: wire.Ready,
        scheduler: Scheduler,
        supervisor: Supervisor,
        metrics: Metrics,
        submit: Callable[[Request], None],
        batcher: Batcher | None = None,
    ) -> None:
        self.config: EngineConfig = config.engine
        self.ready = ready
        self.metrics = metrics
        self.failure: EngineError | None = None
        """Why everything is ending, once it is."""
        self._scheduler = scheduler
        self._supervisor = supervisor
        self._batcher = batcher
        self.front_end_restarts = 0
        """Front ends that were replaced."""
        self._homes: dict[FrontEndSession, None] = {}
        scheduler.adapters.on_change = self._tell_adapters
        self._departed = MetricsSnapshot()
        """What front ends had counted that are gone."""
        self._admission = Admission(
            line=scheduler,
            max_requests=self.config.max_num_queued_reqs,
            max_tokens=self.config.max_num_queued_tokens
            or max(DEFAULT_MAX_TOKENS, ready.max_model_len),
        )
        self._control = Control(scheduler, _Open(self._homes), batcher)
        self._iterations = Tail(scheduler.feeds.iterations.feed.subscribe)
        self._cache_events = Tail(scheduler.feeds.cache.feed.subscribe)
        self.sessions = Sessions(scheduler.pins, self.config.max_sessions)
        self._responses = KeptResponses()
        self._clock = SharedClock.now()
        self._closed_requests: Feed[Request] = Feed()
        self.monitor = Monitor(
            scheduler=scheduler,
            departures=self._closed_requests,
            open_requests=lambda: newest_first(reversed(peer.requests) for peer in self._homes),
            statistics=self.statistics,
            tally=lambda: Tally.of_snapshot(self._snapshot()),
            health=self._health,
            weight_version=lambda: self._control.weight_version,
            worker_life=lambda: supervisor.life,
        )
        """What pictures are taken of."""
        self._context = ServerContext(
            scheduler=scheduler,
            enter=self._enter,
            forget=self._forget,
            submit=submit,
            clock=self._clock,
            on_line=self._on_line,
            permits=Counter(),
            max_seats=config.max_requests_per_key or 0,
            sessions=self.sessions,
            monitor=self.monitor,
            look_around=self._look_around,
            patience=patience_of(config.engine),
        )
        self.on_none_open: Callable[[], None] = lambda: None
        """Called whenever the last open request has ended."""

    # ---- front ends

    @contextlib.contextmanager
    def at_home(self, socket: PairSocket) -> Iterator[FrontEndSession]:
        """A home for the front end at ``socket``, for as long as the block lasts."""
        peer = FrontEndSession(
            socket,
            self._context,
            {
                "call": self._call,
                "encode": self._encode,
                "state": self._state,
                "collect": self._collect,
                "pause": self._pause,
                "resume": self._resume,
                "abort": self._abort,
                "flush_cache": self._flush_cache,
                "update_weights": self._update_weights,
                "weight_version": self._weight_version,
                "call_weights": self._call_weights,
                "release_memory": self._release_memory,
                "resume_memory": self._resume_memory,
                "iterations": self._take_iterations,
                "cache_events": self._take_cache_events,
                "load_adapter": self._load_adapter,
                "unload_adapter": self._unload_adapter,
                "keep_response": self._keep_response,
                "kept_conversation": self._kept_conversation,
                "drop_response": self._drop_response,
            },
        )
        self._homes[peer] = None
        # There may be others than when it was told to start.
        peer.tell(Offered(self.adapters))
        try:
            yield peer
        finally:
            del self._homes[peer]
            self._departed = add_up([self._departed, peer.counted.snapshot.lasting])

    @property
    def adapters(self) -> list[Adapter]:
        """Those that requests may name."""
        return list(self._scheduler.adapters.catalogue)

    @property
    def peers(self) -> list[FrontEndSession]:
        """Those of the front ends that are there."""
        return list(self._homes)

    def _enter(self, request: Request) -> None:
        self._check_pause()
        self._admission.enter(request, trio.current_time())

    def _check_pause(self) -> None:
        if self._control.refuses:
            raise Paused("the engine is paused, and takes no requests meanwhile")

    def _forget(self, request: Request) -> None:
        self._admission.forget(request)
        if self._closed_requests.is_wanted:
            self._closed_requests.publish(request)
        if not any(peer.requests for peer in self._homes):
            self.on_none_open()

    def _on_line(self) -> None:
        for peer in self._homes:
            peer.wake()

    async def route(self, outputs: trio.MemoryReceiveChannel[list[SequenceOutput]]) -> None:
        """The task: note at each home what steps gave. Ends when ``outputs`` is closed."""
        async for first in outputs:
            for batch in (first, *all_waiting(outputs)):
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
        for peer in self._homes:
            peer.hosted.end_step(time)

    # ---- what front ends ask

    async def _call(self, arguments: Any) -> Any:
        name, given = arguments
        return await self._scheduler.call(name, given)

    async def _encode(self, arguments: Any) -> bytes:
        message, tenant = arguments
        if self._batcher is None:
            raise InvalidRequest("the model is no encoder")
        self._check_pause()
        return wire.from_floats(await self._batcher.compute(Columns.from_message(message), tenant))

    async def _state(self, _: Any) -> EngineState:
        return EngineState(
            attached=self._scheduler.attached,
            stalled=self._scheduler.stalled,
            paused=self._scheduler.paused,
            memory_released=self._control.memory_released,
            worker_restarts=self._supervisor.restarts,
            scheduler=self._scheduler_statistics(),
        )

    async def _collect(self, _: Any) -> Collected:
        async with trio.open_nursery() as nursery:
            for peer in self._homes:
                nursery.start_soon(_ask_in_time, peer, "count", None, peer.take_count)
        return Collected(snapshot=self._snapshot(), statistics=self.statistics())

    def _snapshot(self) -> MetricsSnapshot:
        """What all processes have counted; front ends, up to when they were asked last."""
        snapshots = [peer.counted.snapshot for peer in self._homes]
        return add_up([snapshot_of(self.metrics), self._departed, *snapshots])

    async def _look_around(self) -> list[TaskNode]:
        async with trio.open_nursery() as nursery:
            for peer in self._homes:
                nursery.start_soon(_ask_in_time, peer, "look", None, peer.take_look, LOOK_SECONDS)
        # In an order that is the same whichever came first.
        told = [peer.tasks for peer in self._homes if peer.tasks is not None]
        return sorted(told, key=lambda tasks: tasks.name)

    async def _pause(self, arguments: Any) -> None:
        mode, refuse = arguments
        await self._control.pause(mode, refuse=refuse)

    async def _resume(self, _: Any) -> None:
        self._control.resume()

    async def _abort(self, arguments: Any) -> int:
        # A front end knows those, too, that are still being tokenized.
        answers: list[int] = []
        async with trio.open_nursery() as nursery:
            for peer in self._homes:
                nursery.start_soon(_ask_in_time, peer, "abort", arguments, answers.append)
        # And these are of front ends that don't answer.
        ids, prefix = arguments
        return sum(answers) + sum(self._control.abort(id, prefix=prefix) for id in ids)

    async def _flush_cache(self, _: Any) -> int:
        return self._control.flush_cache()

    async def _update_weights(self, arguments: Any) -> str:
        await self._control.update_weights(*arguments)
        return self._control.weight_version

    async def _release_memory(self, _: Any) -> None:
        await self._control.release_memory()

    async def _resume_memory(self, _: Any) -> None:
        await self._control.resume_memory()

    async def _weight_version(self, _: Any) -> str:
        return self._control.weight_version

    async def _call_weights(self, version: Any) -> None:
        self._control.weight_version = version

    async def _take_cache_events(self, _: Any) -> list[CacheEvent]:
        return self._cache_events.take()

    async def _take_iterations(self, _: Any) -> list[Iteration]:
        return [
            msgspec.structs.replace(each, time=self._clock.shared(each.time))
            for each in self._iterations.take()
        ]

    async def _load_adapter(self, arguments: Any) -> None:
        await self._scheduler.adapters.load(*arguments)

    async def _unload_adapter(self, name: Any) -> None:
        await self._scheduler.adapters.unload(name)

    async def _keep_response(self, arguments: Any) -> bool:
        return self._responses.keep(*arguments)

    async def _kept_conversation(self, arguments: Any) -> list[bytes]:
        return self._responses.conversation(*arguments)

    async def _drop_response(self, arguments: Any) -> bool:
        return self._responses.drop(*arguments)

    def _tell_adapters(self) -> None:
        for peer in self._homes:
            peer.tell(Offered(self.adapters))

    # ---- what can be seen

    def _health(self) -> str:
        if self._scheduler.stalled:
            return "stalled"
        return "ok" if self._scheduler.attached else "no_worker"

    @property
    def idle(self) -> bool:
        """Whether no request is open, and nothing is computed any more for those that were."""
        return (
            not any(peer.requests for peer in self._homes)
            and self._scheduler.idle
            and (self._batcher is None or self._batcher.idle)
        )

    def _scheduler_statistics(self) -> SchedulerStatistics:
        statistics = self._scheduler.statistics()
        return statistics if self._batcher is None else self._batcher.counted_in(statistics)

    def statistics(self) -> EngineStatistics:
        """Counts of this moment; of what goes on in front ends, as they told when asked last."""
        counted = [peer.counted for peer in self._homes]
        return EngineStatistics(
            scheduler=self._scheduler_statistics(),
            num_tokenizing=sum(each.num_tokenizing for each in counted),
            num_streams=sum(each.num_streams for each in counted),
            stream_bytes=sum(each.stream_bytes for each in counted),
            worker_restarts=self._supervisor.restarts,
            num_sessions=len(self.sessions),
            front_end_restarts=self.front_end_restarts,
            memory_released=self._control.memory_released,
        )

    def check_integrity(self) -> None:
        """Assert the invariants of the scheduler, the page pool, the queue and the sessions.

        Raises:
            AssertionError: one is violated; this is a bug in trioserve.
        """
        self._scheduler.check_integrity()
        self._admission.check_integrity()
        self.sessions.check_integrity()
        if self._batcher is not None:
            self._batcher.check_integrity()
        num_open = sum(len(each.sequences) for peer in self._homes for each in peer.requests)
        assert self._admission.num_entering <= num_open

    async def call_worker(self, name: str, arguments: object = None) -> Any:
        """Ask the worker for something rare, by name, and return its answer.

        Raises:
            EngineError: the worker refused.
            WorkerLost: it died before it answered.
        """
        return await self._scheduler.call(name, arguments)

    def report(self) -> str:
        """What a dump of tasks begins with."""
        num_requests = [len(peer.requests) for peer in self._homes]
        lag = self.metrics.loop_lag.peak
        return (
            f"engine of {len(num_requests)} front ends with {num_requests} requests\n"
            f"{self.statistics().summary()}\nevent loop's worst recent lag: {lag:.3f} s"
        )


@attrs.frozen(eq=False)
class _Open:
    """The requests of all front ends, at any moment."""

    _homes: dict[FrontEndSession, None]

    def __iter__(self) -> Iterator[Request]:
        return itertools.chain.from_iterable(list(peer.requests) for peer in self._homes)


async def _ask_in_time(
    peer: FrontEndSession,
    name: str,
    arguments: object,
    take: Callable[[Any], None],
    seconds: float = ANSWER_SECONDS,
) -> None:
    """Ask a front end, and hand its answer to ``take`` if it comes in time."""
    with contextlib.suppress(TrioserveError), trio.move_on_after(seconds):
        take(await peer.rpc.ask(name, arguments))


@contextlib.asynccontextmanager
async def open_host(
    config: ServerConfig,
    scheduler: Scheduler,
    supervisor: Supervisor,
    metrics: Metrics,
    *,
    task: ModelTask = "generate",
) -> AsyncIterator[EngineServer]:
    """The engine process's nursery; no front end is started yet. ``task`` is the model's.

    Raises:
        ModelLoadError: the model can't be loaded.
        EngineError: the engine failed while the block ran.
    """
    to_preparation, preparation_inbox = trio.open_memory_channel[Request](math.inf)
    to_scheduler, scheduler_inbox = trio.open_memory_channel[Request](math.inf)
    to_routing, routing_inbox = trio.open_memory_channel[list[SequenceOutput]](math.inf)
    engine_server: EngineServer | None = None
    batcher: Batcher | None = None
    if task != "generate":
        batcher = supervised_batcher(config.engine, scheduler, supervisor, metrics)
    preparation = Preparation(
        scheduler, timeout=config.engine.grammar_timeout, observe_grammar=metrics.observe_grammar
    )

    def on_failure(error: EngineError) -> None:
        if engine_server is not None:
            engine_server.failure = error

    async with open_tasks(on_failure) as tasks:
        tasks.start_soon(preparation.run, preparation_inbox, to_scheduler)
        tasks.start_soon(scheduler.run, scheduler_inbox, to_routing)
        ready: wire.Ready = await tasks.start(supervisor.run, scheduler.attach)
        if batcher is not None:
            batcher.set_limits(ready)
            tasks.start_soon(batcher.run)
        submit = to_preparation.send_nowait
        await scheduler.adapters.load_first(named_paths(config.engine.lora_modules))
        engine_server = EngineServer(config, ready, scheduler, supervisor, metrics, submit, batcher)
        engine_server.sessions.start_task = tasks.start_soon
        tasks.is_ready = True
        tasks.start_soon(engine_server.route, routing_inbox)
        metrics.watch(engine_server)
        idle_check = IdleCheck(engine_server, asks_worker=True)
        scheduler.on_idle = engine_server.on_none_open = idle_check.note
        tasks.start_soon(idle_check.run)
        with reporting(engine_server.report):
            yield engine_server
