"""Processes that read media, and the arrays that they hand over in shared memory.

:mod:`~trioserve.requests.media.child` is their program.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import attrs
import msgspec
import numpy as np
import trio

from trioserve._util.job_processes import JobProcess, JobProcesses
from trioserve._util.job_server import JobServer
from trioserve.observability.logs import get_logger
from trioserve.protocol.frames import framed
from trioserve.requests.media.messages import ArrayLayout, MediaAnswer, MediaJob, MediaSetup
from trioserve.requests.media.sources import Payload

MAX_WAIT = 120.0
"""Seconds to wait for an answer; long, for a busy machine."""
MAX_START_SECONDS = 300.0
"""Longest time to load the model's processor."""
MAX_ANSWER_BYTES = 16 << 20
"""Most bytes of an answer without its arrays."""
_VARIABLES = {
    # A process for each part is enough, and what libraries would fetch or print isn't wanted.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}

_log = get_logger("trioserve.requests.media")

Array = np.ndarray[Any, Any]


def num_processes() -> int:
    """Return the most processes at a time: a quarter of the cores, from 2 to 8."""
    return min(max(len(os.sched_getaffinity(0)) // 4, 2), 8)


@attrs.frozen
class ReadPart:
    """An answer of a process, with its arrays by name."""

    answer: MediaAnswer
    arrays: dict[str, Array]


class MediaProcesses:
    """A few processes that read media, started on demand until :meth:`aclose`."""

    def __init__(self, setup: MediaSetup) -> None:
        self._setup = framed(setup)
        self._server: JobServer | None = None
        self._starting = trio.Lock()
        self._is_closed = False
        self._processes = JobProcesses(num_processes(), self._start, "read media")
        self._processes.open()

    async def aclose(self) -> None:
        """End all processes. What they read is lost."""
        self._is_closed = True
        await self._processes.aclose()
        if self._server is not None:
            await self._server.end()

    async def read(self, job: MediaJob, payload: Payload | None) -> ReadPart:
        """Return the answer to a job. Cancelling ends the process.

        Raises:
            JobLost: The process died, took too long or too much memory.
            EngineError: The processes are closed, or none can be started.
        """
        pieces = () if payload is None else payload.pieces()
        async with self._processes.take(None) as process:
            body = await process.answer(
                itertools.chain((framed(job),), pieces),
                max_bytes=MAX_ANSWER_BYTES,
                seconds=MAX_WAIT,
            )
            try:
                answer = msgspec.msgpack.decode(body, type=MediaAnswer)
            except msgspec.MsgspecError as error:
                raise EOFError from error
            return ReadPart(answer, await _received(process, answer.arrays))

    async def _start(self, _: object) -> JobProcess:
        server = await self._running_server()
        try:
            return await server.fork()
        except OSError:
            if not server.is_lost:
                raise
        return await (await self._running_server()).fork()

    async def _running_server(self) -> JobServer:
        """Return the process that forks; start one if there is none, or replace a lost one."""
        async with self._starting:
            if self._server is None or self._server.is_lost:
                self._server = await JobServer.start(
                    "trioserve.requests.media.child",
                    _log,
                    "process that reads media",
                    setup=self._setup,
                    seconds=MAX_START_SECONDS,
                    variables=_VARIABLES,
                )
        if self._is_closed:
            await self._server.end()
            raise OSError("the reader is closed")
        return self._server


async def _received(process: JobProcess, layouts: Sequence[ArrayLayout]) -> dict[str, Array]:
    """Return copies of the arrays in a process's memory, which is empty then."""
    if not layouts:
        return {}
    if process.memory < 0:  # ended meanwhile
        raise EOFError
    # The process may be ended while the thread runs, and its descriptor closed.
    return await trio.to_thread.run_sync(copy_arrays, os.dup(process.memory), layouts)


def copy_arrays(memory: int, layouts: Sequence[ArrayLayout]) -> dict[str, Array]:
    """Return the arrays in ``memory``, a descriptor; empty it, and close the descriptor.

    Raises:
        EOFError: The memory doesn't have exactly these arrays.
    """
    try:
        wanted = [(each, _dtype(each), math.prod(each.shape)) for each in layouts]
        if sum(dtype.itemsize * count for _, dtype, count in wanted) != os.fstat(memory).st_size:
            raise EOFError
        arrays: dict[str, Array] = {}
        offset = 0
        for layout, dtype, count in wanted:
            array = np.empty(count, dtype)
            offset += _fill(memory, array, offset)
            arrays[layout.name] = array.reshape(layout.shape)
        os.ftruncate(memory, 0)
        return arrays
    finally:
        os.close(memory)


def _dtype(layout: ArrayLayout) -> np.dtype[Any]:
    """Return the numbers' format of an array.

    Raises:
        EOFError: It isn't one of plain numbers, or a length is negative.
    """
    try:
        dtype = np.dtype(layout.dtype)
    except TypeError as error:
        raise EOFError from error
    if dtype.kind not in "fiub" or min(layout.shape, default=0) < 0:
        raise EOFError
    return dtype


def _fill(memory: int, array: Array, offset: int) -> int:
    """Fill a flat array from ``offset``, and return its bytes.

    Raises:
        EOFError: The memory ends before.
    """
    left = array.view(np.uint8).data
    while left:
        count = os.preadv(memory, [left], offset)
        if not count:
            raise EOFError
        offset += count
        left = left[count:]
    return array.nbytes
