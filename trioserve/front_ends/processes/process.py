"""One front end's process: its start, its greeting, its supervision and its end.

It ends as a worker does: when it is told to, when it is killed, or when its standard input ends,
which is how it learns that the engine process is gone.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import trio

from trioserve._util.child_process import end_child
from trioserve._util.exception_groups import sole_exception
from trioserve._util.pair_socket import PairSocket, SocketFailed
from trioserve.front_ends.messages import (
    Failed,
    FrontEndHello,
    FrontEndListening,
    FrontEndStart,
    Stop,
    encode,
)
from trioserve.front_ends.server.session import START_TIMEOUT, STOP_GRACE, receive_from_front_end
from trioserve.observability.logs import get_logger
from trioserve.observability.task_dump import reporting
from trioserve.protocol.errors import EngineError, FrontEndLost, NoRoomForWorker
from trioserve.protocol.version import __version__
from trioserve.workers.command import package_environment
from trioserve.workers.process import describe_exit
from trioserve.workers.socket_folder import SocketFolder

_log = get_logger("trioserve.front_end")


def package_folder() -> str:
    """Return the folder that trioserve was imported from."""
    return str(Path(__file__).resolve().parents[2])


@contextlib.asynccontextmanager
async def run_front_end(
    start: FrontEndStart, descriptors: Sequence[int], *, last_word: Callable[[], Stop | Failed]
) -> AsyncIterator[PairSocket]:
    """Run a front end that listens for as long as the block lasts; the block talks to it.

    Args:
        start: what it is to serve.
        descriptors: listening sockets that it is to inherit, its own among them.
        last_word: gives what it is told at the end.

    Raises:
        FrontEndLost: the process died, hung or spoke nonsense; a block that had begun is cancelled.
        TrioserveError: it says that it can't serve, and why.
    """
    lost: FrontEndLost | None = None
    with (
        contextlib.closing(_make_folder()) as folder,
        contextlib.closing(_listen(folder.url)) as socket,
    ):
        process = await _start_process(folder.url, start.index, descriptors)
        name = f"front end {start.index} (process {process.pid})"

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal lost
            lost = FrontEndLost(f"{name} {describe_exit(await process.wait())}")
            scope.cancel()

        body_error: BaseException | None = None
        is_hung = False
        try:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(watch, nursery.cancel_scope)
                    with trio.fail_after(START_TIMEOUT):
                        await _greet(socket, start)
                    # Connected: a name in the file system would only outlive a killed engine.
                    folder.close()
                    with reporting(
                        lambda: f"{name}",
                        ask=lambda: process.send_signal(signal.SIGUSR1),
                    ):
                        yield socket
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                # The watcher raises nothing, so this can only be the block's own exception.
                body_error = sole_exception(group)
            if isinstance(body_error, trio.TooSlowError):
                message = f"{name} didn't listen within {START_TIMEOUT:g} s of its start"
                raise FrontEndLost(message) from body_error
            if isinstance(body_error, FrontEndLost):
                is_hung = body_error.is_hung
                raise FrontEndLost(f"{name}: {body_error}", is_hung=is_hung) from body_error
            if body_error is not None:
                raise body_error
        finally:
            with trio.CancelScope(shield=True):
                await _stop(process, socket, last_word(), 0.0 if is_hung else STOP_GRACE)
    if lost is not None:
        raise lost


def _make_folder() -> SocketFolder:
    try:
        return SocketFolder.make()
    except NoRoomForWorker as error:
        raise FrontEndLost(str(error)) from error


def _listen(url: str) -> PairSocket:
    try:
        return PairSocket.listen(url)
    except SocketFailed as error:
        raise FrontEndLost(f"no socket for a front end at {url}: {error}") from error


async def _start_process(url: str, index: int, descriptors: Sequence[int]) -> trio.Process:
    command = [sys.executable, "-P", "-m", "trioserve.front_ends", "--connect", url]
    command += ["--index", str(index), "--listen", ",".join(map(str, descriptors))]
    try:
        return await trio.lowlevel.open_process(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=package_environment(),
            pass_fds=descriptors,
            # A Ctrl-C in the terminal is for the engine process, which ends the others in order.
            start_new_session=True,
        )
    except OSError as error:
        raise FrontEndLost(f"a front end can't be started: {error.strerror or error}") from error


async def _greet(socket: PairSocket, start: FrontEndStart) -> None:
    hello = await receive_from_front_end(socket)
    if not isinstance(hello, FrontEndHello):
        raise FrontEndLost(f"it began with {type(hello).__name__} instead of Hello")
    if (hello.package, hello.version) != (package_folder(), __version__):
        raise EngineError(
            f"the front end was loaded from {hello.package} ({hello.version}), "
            f"not from {package_folder()} ({__version__})"
        )
    await socket.send(encode(start))
    listening = await receive_from_front_end(socket)
    if not isinstance(listening, FrontEndListening):
        raise FrontEndLost(f"it sent {type(listening).__name__} before it listened")


async def _stop(
    process: trio.Process, socket: PairSocket, last_word: Stop | Failed, grace: float
) -> None:
    """End the process: politely, then by force. Called shielded; takes at most the two graces."""
    if process.returncode is None:
        socket.send_nowait(encode(last_word))
        with trio.move_on_after(grace):
            await process.wait()
    await end_child(process, _log, "front end")
