"""The ranks of a group as threads of one process, for tests of models without processes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import attrs
import torch

from gpu.models.parallel.link import RankLink, connect_ranks
from gpu.models.parallel.ranks import Ranks

__all__ = ["ThreadLink", "links_of", "on_ranks"]

T = TypeVar("T")


@attrs.define(eq=False)
class _Meeting:
    """The tensors that the ranks have brought to the place where all of them wait."""

    barrier: threading.Barrier
    brought: dict[int, torch.Tensor] = attrs.field(factory=dict)

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.brought[rank] = x.clone()
        self.barrier.wait(60)
        found = [self.brought[number] for number in range(self.barrier.parties)]
        self.barrier.wait(60)
        return found


@attrs.frozen(eq=False)
class _ThreadRank:
    """:class:`gpu.models.parallel.ranks.Ranks` of one thread."""

    rank: int
    meeting: _Meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for each in self.meeting.exchange(self.rank, x):
            total += each
        return total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, x), dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self.meeting.exchange(self.rank, x)[0])


class ThreadLink(RankLink):
    """The link of a thread, which mustn't end the process."""

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            raise RuntimeError("another rank has ended") from error

    def close(self) -> None:
        """End the waiting of the others."""
        for each in self.sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # also that of a thread of this rank
            each.close()


def links_of(size: int, num_stages: int = 1) -> list[ThreadLink]:
    """Return the links of all ranks by their numbers, ``size`` in each stage."""
    links = connect_ranks(num_stages, size)
    return [ThreadLink(each.rank, each._sockets, each.stages) for each in links]


def on_ranks(size: int, compute: Callable[[int, Ranks], T], num_stages: int = 1) -> list[T]:
    """Return what ``compute`` returns on each rank, ``size`` in each stage; it gets its number."""
    meetings = [_Meeting(threading.Barrier(size)) for _ in range(num_stages)]

    def run(number: int) -> T:
        stage, rank = divmod(number, size)
        try:
            return compute(number, _ThreadRank(rank, meetings[stage]))
        except BaseException:
            meetings[stage].barrier.abort()  # or the others wait for it
            raise

    with ThreadPoolExecutor(size * num_stages) as pool:
        return list(pool.map(run, range(size * num_stages)))
