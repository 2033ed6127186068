"""The processes of the ranks behind rank 0, which is the worker itself.

They are its children. One that ends, ends the worker, and they end with it, stopped ones as well:
to the engine the group is one worker, lost at once, in the way in which the rank was.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import attrs
import msgspec

from gpu.models.parallel.group import EXIT_RANK_LOST, RankGroup
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
    rendezvous: str
    """Path of the file through which the ranks find each other."""
    dtype: str
    num_threads: int
    start: Start


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


def start_ranks(start: Start, dtype: str, num_threads: int) -> RankGroup:
    """Start the other ranks of ``start.tensor_parallel_size``, and return the group as rank 0.

    ``num_threads`` is the number of threads of each. From here on the process ends once a rank has
    ended.
    """
    folder = Path(tempfile.mkdtemp(prefix="trioserve-ranks-"))
    rendezvous = folder / "rendezvous"
    try:
        for rank in range(1, start.tensor_parallel_size):
            order = RankOrder(
                rank=rank,
                parent=os.getpid(),
                rendezvous=str(rendezvous),
                dtype=dtype,
                num_threads=num_threads,
                start=start,
            )
            _start_rank(order, folder)
        return RankGroup(rendezvous, 0, start.tensor_parallel_size)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start_rank(order: RankOrder, folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "gpu", "--rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.write(write_order(order))
    process.stdin.flush()
    threading.Thread(target=_end_with, args=(process, order.rank, folder), daemon=True).start()


def _end_with(process: subprocess.Popen[bytes], rank: int, folder: Path) -> None:
    """Wait until ``process`` ends; then end this one, by the same signal if it was one."""
    status = process.wait()
    _log.error("rank %d of the worker has ended with status %d", rank, status)
    shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    if status < 0:
        number = signal.Signals(-status)
        os.kill(os.getpid(), signal.SIGKILL if number in _IGNORED else number)
    os._exit(EXIT_RANK_LOST)
