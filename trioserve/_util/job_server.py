"""A process that loads what jobs need once, and forks for each process that does jobs.

A fork starts in milliseconds and shares the memory of what was loaded, so killing one costs little.
:func:`~trioserve._util.job_child.serve_forks` is the child's side.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import signal
import socket
from collections.abc import Mapping
from typing import Any

import trio

from trioserve._util.child_process import KILL_GRACE, end_child
from trioserve._util.job_child import FORK, FORKED, READY
from trioserve._util.job_processes import JobProcess, open_program

MAX_REPLY_SECONDS = 10.0
"""Longest time until a fork has begun; long, for a busy machine."""
_FD_BYTES = array.array("i").itemsize


class JobServer:
    """The process that forks. :meth:`start` makes it.

    Attributes:
        is_lost: True if it has ended or doesn't answer; it can't fork any more. Its forks go on.
    """

    def __init__(
        self, process: trio.Process, control: trio.socket.SocketType, log: Any, name: str
    ) -> None:
        self.is_lost = False
        self._process = process
        self._control = control
        self._log = log
        self._name = name
        self._lock = trio.Lock()

    @classmethod
    async def start(
        cls,
        module: str,
        log: Any,
        name: str,
        *,
        setup: bytes,
        seconds: float,
        variables: Mapping[str, str] = {},
    ) -> JobServer:
        """Start the process, and wait until it has loaded.

        Args:
            module: Full name of the module, whose ``main`` is called. Its argument is the
                descriptor for :func:`~trioserve._util.job_child.serve_forks`.
            log: Logs a process that doesn't end.
            name: Name of the process in the log.
            setup: Bytes on its standard input.
            seconds: Longest time to load.
            variables: Environment variables beside this process's own.

        Raises:
            OSError: The process can't be started, has died while it loaded, or takes too long.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            try:
                process = await open_program(
                    module, str(descriptor), pass_fds=(descriptor,), variables=variables
                )
            except BaseException:
                ours.close()
                raise
        server = cls(process, trio.socket.from_stdlib_socket(ours), log, name)
        try:
            with trio.fail_after(seconds):
                assert process.stdin is not None
                with contextlib.suppress(trio.BrokenResourceError):
                    await process.stdin.send_all(setup)
                if await server._control.recv(len(READY)) != READY:
                    raise OSError(f"the {name} has ended")
        except trio.TooSlowError as error:
            await server.end()
            raise OSError(f"the {name} takes too long to start") from error
        except BaseException:
            await server.end()
            raise
        return server

    async def fork(self) -> JobProcess:
        """Return a new process for jobs, with an empty memory.

        Raises:
            OSError: There is no room for another process, or this one is lost.
        """
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            read_end, stdin = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, read_end)
            ours.callback(os.close, stdin)
            stdout, write_end = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, write_end)
            ours.callback(os.close, stdout)
            memory = os.memfd_create("jobs", os.MFD_CLOEXEC)
            ours.callback(os.close, memory)
            fork = await self._reference(array.array("i", (read_end, write_end, memory)))
            ours.pop_all()
        return JobProcess(
            trio.lowlevel.FdStream(stdin),
            trio.lowlevel.FdStream(stdout),
            functools.partial(self._kill, fork),
            memory=memory,
        )

    async def end(self) -> None:
        """Kill the process and its forks, and wait until it has ended. A lost one is left alone."""
        if self.is_lost:
            return
        self.is_lost = True
        with trio.CancelScope(shield=True):
            await end_child(self._process, self._log, self._name)
            await self._close()

    async def _close(self) -> None:
        self._control.close()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        await self._process.stdin.aclose()
        await self._process.stdout.aclose()

    async def _reference(self, inherited: array.array[int]) -> int:
        """Return a descriptor that refers to a new fork, which gets the descriptors ``inherited``.

        Raises:
            OSError: The process is lost.
        """
        # A reply that was left unread would be taken for that of the next fork.
        with trio.CancelScope(shield=True), trio.move_on_after(MAX_REPLY_SECONDS):
            async with self._lock:
                if self.is_lost:
                    raise OSError(f"the {self._name} has ended")
                more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, inherited.tobytes())]
                with contextlib.suppress(OSError, trio.ClosedResourceError):
                    await self._control.sendmsg([FORK], more)
                    _, received, _, _ = await self._control.recvmsg(
                        len(FORKED), socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
                    )
                    for _, _, data in received:
                        return int.from_bytes(data[:_FD_BYTES], "little")
        await self._drop()
        raise OSError(f"the {self._name} has ended or doesn't answer")

    async def _drop(self) -> None:
        """Kill the process without its forks, because some may have jobs."""
        self.is_lost = True
        with trio.CancelScope(shield=True):
            self._process.kill()
            with trio.move_on_after(KILL_GRACE):
                await self._process.wait()
            await self._close()

    async def _kill(self, fork: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fork, signal.SIGKILL)
        with trio.move_on_after(KILL_GRACE) as grace:
            await trio.lowlevel.wait_readable(fork)
        if grace.cancelled_caught:
            self._log.error(f"{self._name} can't be killed", seconds=KILL_GRACE)
        os.close(fork)
