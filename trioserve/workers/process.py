"""A worker's process: its start, what it loads, and its end.

The worker ends when it gets ``Quit``, when it is killed, or when its standard input ends because
this process is gone. No signal is needed for that. :mod:`trioserve.workers.life` has its life.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import attrs
import trio

from trioserve._util.child_process import end_child
from trioserve.observability.logs import get_logger
from trioserve.observability.task_dump import reporting
from trioserve.protocol import wire
from trioserve.protocol.child_state import wait_ended_or_stopped
from trioserve.protocol.errors import EngineError, NoRoomForWorker, WorkerLost
from trioserve.workers import Link
from trioserve.workers.command import PACKAGES_FOLDER, worker_command
from trioserve.workers.life import OnProgress, run_worker
from trioserve.workers.link import LinkTraffic, NngLink
from trioserve.workers.socket_folder import SocketFolder

HELLO_TIMEOUT = 120.0
"""Seconds for the process to start and import its libraries."""
QUIT_GRACE = 0.5
"""Seconds for a worker to quit when told to."""

SENT_BY_OTHERS = frozenset(
    {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM}
)
"""Signals from outside of the worker; the kernel sends SIGKILL when memory runs out."""

_BEFORE_LOADED = " before it had loaded the model; `trioserve doctor` shows what may be missing"

_log = get_logger("trioserve.worker")


@attrs.define(eq=False)
class WorkerProcess:
    """A worker's process, the link to it, and the folder of the link's socket."""

    process: trio.Process
    link: NngLink
    _folder: SocketFolder
    _has_loaded: bool = False

    @property
    def name(self) -> str:
        """See :attr:`~trioserve.workers.life.StartedWorker.name`."""
        return f"worker process {self.process.pid}"

    async def greet(self) -> None:
        """Receive the worker's Hello; see :meth:`~trioserve.workers.life.StartedWorker.greet`."""
        with trio.move_on_after(HELLO_TIMEOUT) as scope:
            _check_hello(await self.link.receive())
        if scope.cancelled_caught:
            message = f"the worker said nothing within {HELLO_TIMEOUT:g} s of its start"
            raise WorkerLost(message, reason="hung")
        # The name isn't needed after the connection, and would outlive a killed engine.
        self._folder.close()

    async def wait_lost(self) -> WorkerLost:
        """Block until the process has exited, or was stopped, which ends it; return how."""
        pid = self.process.pid
        # The thread ends with the process.
        is_stopped = await trio.to_thread.run_sync(
            wait_ended_or_stopped, pid, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        if is_stopped:
            self.process.kill()
        code = await self.process.wait()
        if is_stopped:
            loss = f"process {pid} was stopped by a signal"
            return WorkerLost(loss, from_outside=True, reason="hung")
        return _exit_loss(pid, code, "" if self._has_loaded else _BEFORE_LOADED)

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Have dumps of tasks include this process, for the block in which it serves."""
        self._has_loaded = True
        with reporting(
            lambda: f"worker process: {self.process.pid}",
            ask=lambda: self.process.send_signal(signal.SIGUSR1),
        ):
            yield

    def identified(self, ready: wire.Ready) -> wire.Ready:
        """Return ``ready`` with the process id."""
        return attrs.evolve(ready, pid=self.process.pid)


@contextlib.asynccontextmanager
@trio.lowlevel.enable_ki_protection
async def open_process(traffic: LinkTraffic | None = None) -> AsyncIterator[WorkerProcess]:
    """Run a worker process for the block. It imports its libraries, and loads nothing yet.

    Raises:
        NoRoomForWorker: The socket or the process can't be created.
    """
    with (
        contextlib.closing(SocketFolder.make()) as folder,
        contextlib.closing(NngLink.listen(folder.url, traffic)) as link,
    ):
        process = await _start_process(folder.url)
        try:
            yield WorkerProcess(process, link, folder)
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process, link)


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
        f"process {pid} {describe_exit(code)}{when}",
        from_outside=-code in SENT_BY_OTHERS,
        reason="crashed",
    )


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
        amend: Returns what the next worker loads: ``start`` with what has changed since.
    """

    start: wire.Start
    start_timeout: float
    on_progress: OnProgress
    amend: Callable[[wire.Start], wire.Start] = lambda start: start
    traffic: LinkTraffic = attrs.field(init=False, factory=LinkTraffic)
    """Measures of the links to all of these workers."""
    _ahead: tuple[WorkerProcess, contextlib.AsyncExitStack] | None = attrs.field(
        default=None, init=False
    )
    """The process of the first worker with its owner, until :meth:`open` takes both."""

    @contextlib.asynccontextmanager
    async def process_ahead(self) -> AsyncIterator[None]:
        """Start the process of the first worker; :meth:`open`, called in the block, takes it.

        So its imports take no time of their own if this process has something else to do first.
        If it can't be started, :meth:`open` tries again and says why.
        """
        async with contextlib.AsyncExitStack() as owner:
            with contextlib.suppress(NoRoomForWorker):
                self._ahead = await owner.enter_async_context(open_process(self.traffic)), owner
            try:
                yield
            finally:
                if self._ahead is not None:
                    # It has no model yet, and would hear that it is to quit only after its imports.
                    self._ahead[0].process.kill()

    @contextlib.asynccontextmanager
    async def _open_process(self) -> AsyncIterator[WorkerProcess]:
        if self._ahead is None:
            async with open_process(self.traffic) as worker:
                yield worker
        else:
            (worker, owner), self._ahead = self._ahead, None
            async with owner.pop_all():
                yield worker

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[tuple[Link, wire.Ready]]:
        """Run the next worker; see :func:`~trioserve.workers.life.run_worker`."""
        async with run_worker(
            self._open_process(),
            self.amend(self.start),
            start_timeout=self.start_timeout,
            on_progress=self.on_progress,
        ) as (link, ready):
            if not self.start.free_memory:
                self.start = attrs.evolve(self.start, free_memory=ready.free_memory)
            yield link, ready
