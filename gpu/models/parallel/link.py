"""The messages between rank 0 and the others, over sockets that the processes inherit."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from gpu._util.errors import summarize
from gpu.models.parallel.stage_link import StageLink
from trioserve.protocol.errors import ModelLoadError

EXIT_RANK_LOST = 4
"""Status of a worker whose ranks don't compute the same any more."""
SECONDS_TO_END = 0.5
"""Time in which a worker with a lost rank ends in the way in which the rank did."""
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<q")
T = TypeVar("T")
_log = logging.getLogger("gpu.worker")


class RankLink:
    """The connections of one rank: on rank 0 one to each of the others, on these one to rank 0.

    A rank may wait for a message for as long as no request comes. If the layers are split, too,
    ``stages`` are its connections to the other stages. ``pages`` are second connections to the same
    ranks, for what pages hold; none if pages don't leave the ranks.
    """

    def __init__(
        self,
        rank: int,
        sockets: Sequence[socket.socket],
        stages: StageLink | None = None,
        pages: Sequence[socket.socket] = (),
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.pages = pages
        self._sockets = sockets

    @property
    def sockets(self) -> list[socket.socket]:
        """All its sockets: to other ranks, for pages, and to the stages before and behind."""
        ways = () if self.stages is None else self.stages.sockets
        return [*self._sockets, *self.pages, *ways]

    def agree(self, error: str) -> None:
        """Return once all ranks have come here without an error.

        Raises:
            ModelLoadError: A rank has an ``error``; with that of the first such rank.
        """
        if self.rank == 0:
            with self.in_step():
                error = self.first_error(error)
                self.send(error.encode())
        else:
            self.send(error.encode())
            error = self.receive().decode()
        if error:
            raise ModelLoadError(error)

    def first_error(self, own: str) -> str:
        """Return on rank 0 the first error of all ranks, of which it has its ``own``; or ''."""
        others = (receive_message(each).decode() for each in self._sockets)
        return next(filter(None, [own, *others]), "")

    def exchange(self, number: int) -> list[int]:
        """Return the numbers of all ranks, in their order, once all have come here."""
        if self.rank:
            self.send(_NUMBER.pack(number))
            found = self.receive()
        else:
            with self.in_step():
                found = _NUMBER.pack(number) + b"".join(map(receive_message, self._sockets))
                self.send(found)
        return [each for (each,) in _NUMBER.iter_unpack(found)]

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """End the worker if the block fails: the other ranks have begun what this one hasn't done.

        No result is sent for such a step, so that the engine counts one loss.
        """
        try:
            yield
        except (EOFError, ConnectionError):
            end_cut_off()
        except BaseException:
            _log.exception("a step of several ranks failed")
            logging.shutdown()
            time.sleep(SECONDS_TO_END)
            os._exit(EXIT_RANK_LOST)

    def send(self, message: bytes) -> None:
        """Send ``message`` from rank 0 to all others, or from one of these to rank 0."""
        for each in self._sockets:
            send_message(each, message)

    def receive(self) -> bytes:
        """Return the next message of rank 0; block until it comes.

        Raises:
            EOFError: Rank 0 has ended.
        """
        (only,) = self._sockets
        return receive_message(only)


def connect_ranks(num_stages: int, size: int, *, with_pages: bool = False) -> list[RankLink]:
    """Return the links of all ranks of a worker, those of a stage of ``size`` side by side.

    ``with_pages`` asks for connections for pages.
    """
    count = num_stages * size
    stages: list[StageLink | None] = [None] * count
    if num_stages > 1:
        ways = [socket.socketpair() for _ in range(count)]  # from each rank to the stage behind
        stages = [
            StageLink(rank, size, num_stages, (ways[rank - size][1], ways[rank][0]))
            for rank in range(count)
        ]
    pages = _pairs(count) if with_pages else [[] for _ in range(count)]
    return list(map(RankLink, range(count), _pairs(count), stages, pages))


def _pairs(count: int) -> list[list[socket.socket]]:
    """Return the sockets of each rank, of which rank 0 has one to each of the others."""
    pairs = [socket.socketpair() for _ in range(1, count)]
    return [[near for near, _ in pairs], *([far] for _, far in pairs)]


def end_cut_off() -> NoReturn:
    """End this process, whose connection to another rank is closed, as if it was killed.

    No request can have done that, so none is to be suspected.
    """
    time.sleep(SECONDS_TO_END)
    _log.error("the connection to another rank is closed")
    logging.shutdown()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it was killed")


def agreed(link: RankLink, load: Callable[[], T]) -> T:
    """Return what ``load`` returns, once it has returned on all ranks.

    Raises:
        ModelLoadError: It failed on a rank.
    """
    found, error = attempted(link, load)
    link.agree(error)
    return found[0]


def attempted(link: RankLink, load: Callable[[], T]) -> tuple[list[T], str]:
    """Return what ``load`` returns, in a list, or an empty one and the error that it raises."""
    try:
        return [load()], ""
    except ModelLoadError as failure:
        return [], str(failure)
    except Exception as failure:
        return [], f"rank {link.rank} can't load its part: {summarize(failure)}"


def send_message(connection: socket.socket, message: bytes) -> None:
    """Send ``message`` with its length in front."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive_message(connection: socket.socket, longest: int | None = None) -> bytes:
    """Return the next message; block until it comes.

    Raises:
        EOFError: The other side has ended.
        ValueError: It has more than ``longest`` bytes.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if longest is not None and length > longest:
        raise ValueError(f"a message of {length} bytes, where at most {longest} are expected")
    return _read(connection, length)


def _read(connection: socket.socket, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        piece = connection.recv(length - len(found))
        if not piece:
            raise EOFError("the other rank has ended")
        found += piece
    return bytes(found)
