"""Child processes that do one job after another, with limits, and can be killed.

A process is started on demand. It is replaced if it dies, takes too long, or loses the caller that
waits for its job. :mod:`~trioserve._util.job_child` is the child's side.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import trio

from trioserve._util.child_process import end_child
from trioserve.protocol.errors import EngineError
from trioserve.protocol.frames import HEAD

CHUNK = 1 << 20
"""Most bytes that are read or encoded at once."""
_PREFIX = "TRIOSERVE_"
"""Beginning of the variables that set options."""
_ROOT = Path(__file__).resolve().parents[2]


class JobLost(Exception):
    """The process has died, or didn't answer in time; the job has no result."""


async def open_program(
    module: str, *arguments: str, pass_fds: Sequence[int] = (), variables: Mapping[str, str] = {}
) -> trio.Process:
    """Start a process that calls ``main`` of a module of this package.

    Its standard input and output are pipes. It leads a process group. Options of this server, keys
    among them, aren't in its environment, because it works on data of strangers.

    Args:
        module: Full name of the module.
        arguments: Command-line arguments.
        pass_fds: Descriptors that it inherits, under the same numbers.
        variables: Environment variables beside this process's own.

    Raises:
        OSError: The process can't be started.
    """
    # The child imports the package from the same place, whatever the environment says.
    program = f"import sys; sys.path.insert(0, {str(_ROOT)!r}); from {module} import main; main()"
    own = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    return await trio.lowlevel.open_process(
        [sys.executable, "-P", "-c", program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=pass_fds,
        env={**own, **variables},
    )


class JobProcess:
    """A child process, which answers each job on its standard output.

    Args:
        stdin: Stream that it reads.
        stdout: Stream that it writes.
        kill: Kills the process and waits until it has ended; called once, shielded.
        key: Kind of the jobs that it can do; the pool gives it no others.
        setup: Bytes that it reads before its first job.
        memory: Descriptor of memory that it shares, -1 without any. It is closed with the process.
    """

    def __init__(
        self,
        stdin: trio.abc.SendStream,
        stdout: trio.lowlevel.FdStream,
        kill: Callable[[], Awaitable[None]],
        *,
        key: object = None,
        setup: bytes = b"",
        memory: int = -1,
    ) -> None:
        self.key = key
        self.memory = memory
        self._stdin = stdin
        self._stdout = stdout
        self._kill = kill
        self._unsent = setup
        self._ending = trio.Lock()
        self._has_ended = False

    @classmethod
    async def start(
        cls, module: str, log: Any, name: str, *, key: object = None, setup: bytes = b""
    ) -> JobProcess:
        """Start a process of its own for jobs.

        Args:
            module: Full name of the module, whose ``main`` is called.
            log: Logs a process that doesn't end.
            name: Name of the process in the log.
            key: Kind of the jobs that it can do.
            setup: Bytes that it reads before its first job.

        Raises:
            OSError: The process can't be started.
        """
        process = await open_program(module)
        assert process.stdin is not None
        assert isinstance(process.stdout, trio.lowlevel.FdStream)
        kill = functools.partial(end_child, process, log, name)
        return cls(process.stdin, process.stdout, kill, key=key, setup=setup)

    async def answer(
        self, pieces: Iterable[bytes | memoryview], *, max_bytes: int, seconds: float
    ) -> bytearray:
        """Send ``pieces``, and return the message that answers them.

        Args:
            pieces: A framed job, and what follows it.
            max_bytes: Most bytes of the answer.
            seconds: Longest time until the answer.

        Raises:
            EOFError: The process has died, or its answer is too long.
            trio.BrokenResourceError: The process died before it read the job.
            trio.TooSlowError: No answer came in time.
        """
        setup, self._unsent = self._unsent, b""
        with trio.fail_after(seconds):
            for piece in itertools.chain((setup,), pieces):
                await self._stdin.send_all(piece)
            size = int.from_bytes(await self._receive(HEAD), "little")
            if size > max_bytes:
                raise EOFError
            return await self._receive(size)

    def is_idle(self) -> bool:
        """Return whether the process waits for a job: it has neither ended nor written anything."""
        poll = select.poll()
        poll.register(self._stdout.fileno(), select.POLLIN)
        return not poll.poll(0)

    async def end(self) -> None:
        """Kill the process and wait until it has ended. Idempotent."""
        with trio.CancelScope(shield=True):
            async with self._ending:
                if self._has_ended:
                    return
                await self._kill()
                await self._stdin.aclose()
                await self._stdout.aclose()
                if self.memory >= 0:
                    os.close(self.memory)
                    self.memory = -1
                self._has_ended = True

    async def _receive(self, size: int) -> bytearray:
        received = bytearray()
        while len(received) < size:
            chunk = await self._stdout.receive_some(min(size - len(received), CHUNK))
            if not chunk:
                raise EOFError
            received += chunk
        return received


class JobProcesses:
    """A few processes, owned by the task :meth:`run` or by a caller of :meth:`open`.

    Args:
        max_processes: Most processes at a time, each with one job.
        start: Starts a process that has this key; raises OSError if it can't.
        name: Work of the processes, as in "no process can be started to render in".
    """

    def __init__(
        self, max_processes: int, start: Callable[[Any], Awaitable[JobProcess]], name: str
    ) -> None:
        self._turns = trio.CapacityLimiter(max_processes)
        self._start = start
        self._name = name
        self._idle: list[JobProcess] = []
        self._all: set[JobProcess] = set()
        self._is_open = False

    async def run(self) -> None:
        """Open, and close when cancelled."""
        self.open()
        try:
            await trio.sleep_forever()
        finally:
            await self.aclose()

    def open(self) -> None:
        """Allow :meth:`take` to start processes until :meth:`aclose`."""
        self._is_open = True

    async def aclose(self) -> None:
        """End all processes. Jobs that they have are lost."""
        self._is_open = False
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for child in self._all:
                    nursery.start_soon(child.end)

    @contextlib.asynccontextmanager
    async def take(self, key: object) -> AsyncIterator[JobProcess]:
        """Yield a process for one job. It is reused, unless the block fails or is cancelled.

        Processes with an equal ``key`` are reused.

        Raises:
            JobLost: The process died or didn't answer in the block.
            EngineError: No process can be started, or they aren't open.
        """
        async with self._turns:
            child = await self._take(key)
            is_usable = False
            try:
                yield child
                is_usable = True
            except (
                EOFError,
                trio.BrokenResourceError,
                trio.ClosedResourceError,
                trio.TooSlowError,
            ) as error:
                if not self._is_open:
                    raise EngineError("the engine is closed") from None
                raise JobLost from error
            finally:
                if is_usable and self._is_open:
                    self._idle.append(child)
                else:
                    await self._end(child)

    async def _take(self, key: object) -> JobProcess:
        """Return an idle process of ``key``, or a new one."""
        if self._idle:
            child = self._idle.pop()
            if child.key == key and child.is_idle():
                return child
            await self._end(child)
        if not self._is_open:
            raise EngineError("the engine is closed")
        try:
            child = await self._start(key)
        except OSError as error:
            raise EngineError(f"no process can be started to {self._name} in: {error}") from error
        self._all.add(child)
        if not self._is_open:  # closed meanwhile
            await self._end(child)
            raise EngineError("the engine is closed")
        return child

    async def _end(self, child: JobProcess) -> None:
        self._all.discard(child)
        await child.end()
