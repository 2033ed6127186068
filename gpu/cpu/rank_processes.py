"""The processes of the ranks behind rank 0, which is the worker itself.

They are its children. One that ends, ends the worker, and they end with it, stopped ones as well:
to the engine the group is one worker, lost at once, in the way in which the rank was.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import attrs
import msgspec

from gpu.models.parallel.link import EXIT_RANK_LOST, RankLink
from trioserve.protocol.wire import Start

_LENGTH = struct.Struct("<Q")
_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""Signals that a worker ignores."""
_log = logging.getLogger("gpu.worker")


@attrs.frozen(kw_only=True)
class RankOrder:
    """The order that a rank gets through its standard input: its number, and what it loads."""

    rank: int
    parent: int
    """Process id of the worker."""
    link: int
    """Descriptor of the socket to rank 0."""
    dtype: str
    num_threads: int
    start: Start
    memory: int = -1
    """Descriptor of the memory that the ranks of the compiled kernels share; torch's have none."""
    rendezvous: str = ""
    """Path of the file through which torch's ranks find each other."""


def write_order(order: RankOrder) -> bytes:
    """Return ``order`` with its length in front."""
    message = msgspec.msgpack.encode(order)
    return _LENGTH.pack(len(message)) + message


def read_order(descriptor: int) -> RankOrder:
    """Return the order that comes through ``descriptor``, which stays open.

    Raises:
        EOFError: It ended before.
    """
    (length,) = _LENGTH.unpack(_read(descriptor, _LENGTH.size))
    return msgspec.msgpack.decode(_read(descriptor, length), type=RankOrder)


def _read(descriptor: int, length: int) -> bytes:
    found = b""
    while len(found) < length:
        piece = os.read(descriptor, length - len(found))
        if not piece:
            raise EOFError("the worker has ended")
        found += piece
    return found


def start_ranks(
    start: Start,
    dtype: str,
    num_threads: int,
    *,
    memory: int | None = None,
    rendezvous: Path | None = None,
) -> RankLink:
    """Start the other ranks of the worker of ``start``, and return the link of rank 0.

    From here on the process ends once a rank has ended.

    Args:
        start: What all ranks load.
        dtype: bfloat16 or float32.
        num_threads: Number of threads of each.
        memory: Descriptor of what ranks of the compiled kernels share.
        rendezvous: File in a folder of its own through which torch's ranks find each other.
    """
    links = []
    for rank in range(1, start.num_ranks):
        own, other = socket.socketpair()
        with other:
            order = RankOrder(
                rank=rank,
                parent=os.getpid(),
                link=other.fileno(),
                dtype=dtype,
                num_threads=num_threads,
                start=start,
                memory=-1 if memory is None else memory,
                rendezvous="" if rendezvous is None else str(rendezvous),
            )
            _start_rank(order, None if rendezvous is None else rendezvous.parent)
        links.append(own)
    return RankLink(0, links)


def _start_rank(order: RankOrder, folder: Path | None) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpu", "--rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[each for each in (order.link, order.memory) if each >= 0],
    )
    assert process.stdin is not None
    process.stdin.write(write_order(order))
    process.stdin.flush()
    threading.Thread(target=_end_with, args=(process, order.rank, folder), daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], rank: int, folder: Path | None) -> None:
    """Wait until ``process`` ends; then end this one, by the same signal if it was one."""
    status = process.wait()
    _log.error("rank %d of the worker has ended with status %d", rank, status)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    if status < 0:
        number = signal.Signals(-status)
        os.kill(os.getpid(), signal.SIGKILL if number in _IGNORED else number)
    os._exit(EXIT_RANK_LOST)
