"""The supervisor, which starts the worker process, watches it, and replaces it when it dies.

A worker's life is a block. :func:`run_worker` opens it when the worker has loaded its model, and
leaves it with :exc:`~trioserve.protocol.errors.WorkerLost` when the process exits. The worker ends
when it gets ``Quit``, when it is killed, or when its standard input ends because this process is
gone. No signal is needed for that.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import attrs
import trio

from trioserve._util.child_process import end_child
from trioserve._util.exception_groups import sole_exception
from trioserve.observability.logs import get_logger
from trioserve.observability.task_dump import reporting
from trioserve.protocol import wire
from trioserve.protocol.errors import EngineError, ModelLoadError, NoRoomForWorker, WorkerLost
from trioserve.workers import Link
from trioserve.workers.command import PACKAGES_FOLDER, worker_command
from trioserve.workers.link import NngLink
from trioserve.workers.power import WorkerPower
from trioserve.workers.socket_folder import SocketFolder

HELLO_TIMEOUT = 120.0
"""Seconds for the process to start and import its libraries."""
QUIT_GRACE = 0.5
"""Seconds for a worker to quit when told to."""
FIRST_RESTART_DELAY = 0.05
MAX_RESTART_DELAY = 5.0

SENT_BY_OTHERS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM}
)
"""Signals from outside of the worker; the kernel sends SIGKILL when memory runs out."""

_log = get_logger("trioserve.worker")

Attach = Callable[[Link, wire.Ready], Awaitable[None]]
OnProgress = Callable[[wire.LoadingProgress], None]


@contextlib.asynccontextmanager
async def run_worker(
    start: wire.Start, *, start_timeout: float, on_progress: OnProgress
) -> AsyncIterator[tuple[Link, wire.Ready]]:
    """Run a loaded worker process for the block.

    Args:
        start: What the worker loads.
        start_timeout: Most seconds without progress while it loads.
        on_progress: Called with each sign of progress while it loads.

    Raises:
        ModelLoadError: The worker can't load the model.
        EngineError: The process runs another package named gpu, or another version.
        WorkerLost: The process died, or hung while loading; a block that had begun is cancelled.
        NoRoomForWorker: The socket or the process can't be created.
    """
    lost: WorkerLost | None = None
    with (
        contextlib.closing(SocketFolder.make()) as folder,
        contextlib.closing(NngLink.listen(folder.url)) as link,
    ):
        process = await _start_process(folder.url)

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal lost
            code = await process.wait()
            lost = _exit_loss(process.pid, code, when)
            scope.cancel()

        body_error: BaseException | None = None
        when = " before it had loaded the model; `trioserve doctor` shows what may be missing"
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch, nursery.cancel_scope)
                    await _greet(link, start)
                    # The name isn't needed after the connection, and would outlive a killed engine.
                    folder.close()
                    ready = await _load(link, start_timeout, on_progress)
                    when = ""
                    with reporting(
                        lambda: f"worker process: {process.pid}",
                        ask=lambda: process.send_signal(signal.SIGUSR1),
                    ):
                        yield link, attrs.evolve(ready, pid=process.pid)
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                # The watcher raises nothing, so this can only be the block's own exception.
                body_error = sole_exception(group)
            if isinstance(body_error, WorkerLost):
                message = f"worker {process.pid}: {body_error}"
                raise WorkerLost(message, reason=body_error.reason) from body_error
            if body_error is not None:
                raise body_error
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process, link)
    if lost is not None:
        raise lost


async def _start_process(url: str) -> trio.Process:
    command, environment = worker_command(url)
    try:
        return await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C in the terminal must reach only the parent, which ends its workers in order.
            start_new_session=True,
        )
    except OSError as error:
        raise NoRoomForWorker(f"the worker can't be started: {error.strerror or error}") from error


def describe_exit(code: int) -> str:
    """Return a description of how a process ended, to follow its name."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _exit_loss(pid: int, code: int, when: str) -> WorkerLost:
    """Return the loss of a process that has ended by itself or by a signal."""
    return WorkerLost(
        f"worker {pid} {describe_exit(code)}{when}",
        from_outside=-code in SENT_BY_OTHERS,
        reason="crashed",
    )


async def _greet(link: Link, start: wire.Start) -> None:
    with trio.move_on_after(HELLO_TIMEOUT) as scope:
        _check_hello(await link.receive())
        await link.send(start)
    if scope.cancelled_caught:
        message = f"the worker said nothing within {HELLO_TIMEOUT:g} s of its start"
        raise WorkerLost(message, reason="hung")


async def _load(link: Link, start_timeout: float, on_progress: OnProgress) -> wire.Ready:
    while True:
        with trio.move_on_after(start_timeout) as scope:
            message = await link.receive()
        if scope.cancelled_caught:
            raise WorkerLost(
                f"the worker made no progress for {start_timeout:g} s while loading "
                "(--worker-start-timeout)",
                reason="hung",
            )
        match message:
            case wire.LoadingProgress():
                on_progress(message)
            case wire.Ready():
                return message
            case wire.Failure():
                raise ModelLoadError(message.message)
            case _:
                raise WorkerLost(f"the worker sent {type(message).__name__} while loading")


def _check_hello(message: wire.Message) -> None:
    if not isinstance(message, wire.WorkerHello):
        raise WorkerLost(f"the worker began with {type(message).__name__} instead of Hello")
    expected = PACKAGES_FOLDER / "gpu"
    if Path(message.package).resolve() != expected:
        raise EngineError(
            f"the worker was loaded from {message.package}, not from {expected}: "
            "another package named gpu is on the import path"
        )
    if (message.protocol, message.schema) != (wire.PROTOCOL_VERSION, wire.schema_hash()):
        raise EngineError(
            f"the worker at {message.package} speaks protocol {message.protocol} "
            f"({message.schema}), not {wire.PROTOCOL_VERSION} ({wire.schema_hash()}): "
            "the installation is mixed from two versions"
        )


async def _stop(process: trio.Process, link: NngLink) -> None:
    """End the process: first by a message, then by force. Call this in a shielded scope.

    It takes at most the sum of both grace periods.
    """
    if process.returncode is None:
        link.send_nowait(wire.Quit())
        with trio.move_on_after(QUIT_GRACE):
            await process.wait()
    await end_child(process, _log, "worker")


@attrs.define(eq=False, kw_only=True)
class Workers:
    """A series of workers for one model.

    Args:
        start: What each worker loads.
        start_timeout: Most seconds without progress while it loads.
        on_progress: Called with each sign of progress while it loads.
        weights: Returns the present path of the weights: see
            :attr:`~trioserve.protocol.wire.Start.weights`.
    """

    start: wire.Start
    start_timeout: float
    on_progress: OnProgress
    weights: Callable[[], str] = lambda: ""

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        """Run the next worker; see :func:`run_worker`."""
        start = attrs.evolve(self.start, weights=self.weights())
        async with run_worker(
            start, start_timeout=self.start_timeout, on_progress=self.on_progress
        ) as (link, ready):
            if not self.start.free_memory:
                self.start = attrs.evolve(self.start, free_memory=ready.free_memory)
            yield link, ready


@attrs.frozen(kw_only=True)
class WorkerLife:
    """The state of the worker."""

    state: str = "starting"
    """``starting`` (the first one loads), ``running``, ``restarting`` or ``released``."""
    since: float = 0.0
    """Time of the last change, in seconds on trio's clock."""
    pid: int | None = None
    """Process id while the worker runs."""
    last_loss: str | None = None
    """Reason of the last loss, without confidential text."""


OpenWorker = Callable[[], AbstractAsyncContextManager[tuple[Link, wire.Ready]]]


@attrs.define(eq=False, kw_only=True)
class Supervisor:
    """The task that keeps one worker alive.

    Args:
        open_worker: Opens one worker's life, as :func:`run_worker` does.
        max_restarts: Number of deaths without progress that are tolerated.
        judge: Called with every loss; returns the number of losses since there was progress, this
            one included.
        on_loss: Called with every loss, after ``judge``.
        on_replaced: Called with the seconds between a loss and the attachment of the next worker.
        worker_power: State that says if a worker is wanted.
    """

    open_worker: OpenWorker
    max_restarts: int
    judge: Callable[[WorkerLost], int]
    on_loss: Callable[[WorkerLost], None] = lambda _: None
    on_replaced: Callable[[float], None] = lambda _: None
    worker_power: WorkerPower = attrs.field(factory=WorkerPower)
    restarts: int = attrs.field(default=0, init=False)
    """Number of workers replaced since the start."""
    life: WorkerLife = attrs.field(init=False, factory=WorkerLife)
    """State of the present worker."""
    _lost_at: float | None = attrs.field(default=None, init=False)
    """Time of the first loss since a worker was ready."""

    async def run(
        self, attach: Attach, task_status: trio.TaskStatus[wire.Ready] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Run workers until cancelled, each served by ``attach``.

        ``task_status`` gets the first worker's :class:`~trioserve.protocol.wire.Ready`.

        Raises:
            ModelLoadError: The model can't be loaded.
            EngineError: The process that was started is not this package's worker.
            WorkerLost: The first worker never got ready, or workers died ``max_restarts + 1`` times
                without progress in between.
        """
        try:
            await self._run(attach, task_status)
        finally:
            self.worker_power.end()

    async def _run(self, attach: Attach, task_status: trio.TaskStatus[wire.Ready]) -> None:
        started = False
        attempts = 0
        while True:
            if not self.worker_power.is_on:
                self._note_life("released")
            await self.worker_power.wait_on()
            if not started or self.life.state == "released":
                self._note_life("restarting" if started else "starting")
            serving = trio.CancelScope()
            try:
                async with self.open_worker() as (link, ready):
                    attempts = 0
                    self._note_replaced()
                    self._note_life("running", ready.pid or None)
                    if not started:
                        started = True
                        task_status.started(ready)
                    with self.worker_power.attached() as serving:
                        await attach(link, ready)
            except NoRoomForWorker as error:
                if not started:
                    raise
                # No request caused this, and freeing space takes longer than a few attempts.
                attempts += 1
                _log.error("no worker can be started", reason=str(error), attempts=attempts)
                await trio.sleep(_delay(attempts))
                continue
            except WorkerLost as error:
                if serving.cancelled_caught:
                    continue  # It was stopped on request.
                deaths = self._count(error)
                if deaths > self.max_restarts or not started:
                    raise
            except ModelLoadError as error:
                if not started:
                    raise
                # An earlier worker could load it, so the cause may be temporary.
                if (deaths := self._count(WorkerLost(str(error)))) > self.max_restarts:
                    raise
            else:
                assert serving.cancelled_caught, "a worker was let go that wasn't lost"
                _log.info("worker sent away")
                continue
            self.restarts += 1
            self._note_life("restarting")
            await trio.sleep(_delay(deaths))

    def _count(self, loss: WorkerLost) -> int:
        deaths = self.judge(loss)
        _log.warning(
            "worker lost",
            reason=str(loss),
            kind=loss.reason,
            restarts=self.restarts,
            deaths_without_progress=deaths,
        )
        if self._lost_at is None:
            self._lost_at = trio.current_time()
        # A failed worker's message may have confidential text, so it is only logged.
        told = "it failed; the log tells why" if loss.reason == "failed" else str(loss)
        self.life = attrs.evolve(self.life, last_loss=told)
        self.on_loss(loss)
        return deaths

    def _note_life(self, state: str, pid: int | None = None) -> None:
        self.life = attrs.evolve(self.life, state=state, since=trio.current_time(), pid=pid)

    def _note_replaced(self) -> None:
        if self._lost_at is not None:
            seconds = trio.current_time() - self._lost_at
            self._lost_at = None
            _log.info("worker replaced", seconds=round(seconds, 3), restarts=self.restarts)
            self.on_replaced(seconds)


def _delay(attempts: int) -> float:
    """Return the seconds to wait after ``attempts`` failed attempts in a row."""
    return float(min(FIRST_RESTART_DELAY * 2 ** max(attempts - 1, 0), MAX_RESTART_DELAY))
