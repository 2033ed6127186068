"""A process that loads what jobs need once, and forks for each process that does jobs.

A fork starts in milliseconds and shares the memory of what was loaded, so killing one costs little.
:func:`~trioserve._util.job_child.serve_forks` is the child's side.
"""

from __future__ import annotations

import array
import contextlib
import functools
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from trioserve._util.child_process import end_child
from trioserve._util.job_child import MAX_COMMAND_BYTES
from trioserve._util.job_processes import JobProcess, open_program

MAX_REPLY_SECONDS = 10.0
"""Longest time until a fork has begun or ended; long, for a busy machine."""
_FAILURES = (OSError, trio.ClosedResourceError, trio.TooSlowError)


class JobServer:
    """The process that forks. :meth:`start` makes it.

    Attributes:
        is_lost: True if it has died or doesn't answer; it can't fork any more.
    """

    def __init__(self, process: trio.Process, control: trio.socket.SocketType, log: Any, name: str):
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
                await server._reply()
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
            fork = await self._ask(b"fork", (read_end, write_end, memory))
            ours.pop_all()
        return JobProcess(
            trio.lowlevel.FdStream(stdin),
            trio.lowlevel.FdStream(stdout),
            functools.partial(self._kill, fork),
            memory=memory,
        )

    async def end(self) -> None:
        """Kill the process and all of its forks, and wait until it has ended."""
        self.is_lost = True
        with trio.CancelScope(shield=True):
            await end_child(self._process, self._log, self._name)
            assert self._process.stdout is not None
            await self._process.stdout.aclose()
        self._control.close()

    async def _kill(self, fork: bytes) -> None:
        with contextlib.suppress(OSError):  # With this process, its forks have ended.
            await self._ask(fork)

    async def _ask(self, command: bytes, descriptors: Sequence[int] = ()) -> bytes:
        """Send a command, and return the reply to it. Without one, end the process."""
        # A reply that was left unread would be taken for that of the next command.
        with trio.CancelScope(shield=True):
            reply = await self._reply_to(command, descriptors)
        return reply

    async def _reply_to(self, command: bytes, descriptors: Sequence[int]) -> bytes:
        async with self._lock:
            if self.is_lost:
                raise OSError("the process is lost")
            try:
                return await self._exchange(command, descriptors)
            except _FAILURES as error:
                await self.end()
                raise OSError("the process is lost") from error

    async def _exchange(self, command: bytes, descriptors: Sequence[int]) -> bytes:
        inherited = array.array("i", descriptors).tobytes()
        more = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, inherited)] if inherited else []
        with trio.fail_after(MAX_REPLY_SECONDS):
            await self._control.sendmsg([command], more)
            return await self._reply()

    async def _reply(self) -> bytes:
        reply: bytes = await self._control.recv(MAX_COMMAND_BYTES)
        if not reply:
            raise OSError("the process has ended")
        return reply
