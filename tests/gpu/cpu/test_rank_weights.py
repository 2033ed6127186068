"""Weights of several ranks: all are swapped in, between the same steps, or none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu.cpu.rank_weights import FollowingWeights, LeadingWeights
from gpu.models.parallel.link import RankLink, connect_ranks
from gpu.models.parallel.steps import decode_step
from trioserve.protocol.errors import ModelLoadError


class Files:
    """The files at a path."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checksum(self) -> str:
        return f"of {self.path}"


class Rank:
    """A rank whose weights are the path that they were read at; it reads them when it may."""

    def __init__(self, *bad: str) -> None:
        self.weights = "/first"
        self.swapped = threading.Event()
        self.may_read = threading.Event()
        self.may_read.set()
        self._bad = bad

    def read(self, files: Any) -> Callable[[], None]:
        assert self.may_read.wait(60)
        if str(files.path) in self._bad:
            raise ModelLoadError(f"{files.path} is bad")

        def swap() -> None:
            self.weights = str(files.path)
            self.swapped.set()

        return swap


@contextlib.contextmanager
def following(*ranks: Rank) -> Iterator[LeadingWeights]:
    """Yield the weights of the first of ``ranks``, which the others follow."""
    links = connect_ranks(1, len(ranks))
    files_at: Any = Files
    threads = [
        threading.Thread(target=follow, args=(link, FollowingWeights(link, files_at, rank.read)))
        for link, rank in zip(links[1:], ranks[1:], strict=True)
    ]
    for thread in threads:
        thread.start()
    yield LeadingWeights(links[0], files_at, ranks[0].read)
    for each in links[0].sockets:
        each.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for link in links[1:]:
        for each in link.sockets:
            each.close()


def follow(link: RankLink, weights: FollowingWeights) -> None:
    with contextlib.suppress(EOFError):
        while True:
            step: Any = decode_step(link.receive())
            weights.follow(step)


def test_all_ranks_swap() -> None:
    ranks = [Rank(), Rank(), Rank()]
    with following(*ranks) as weights:
        for path in ("/second", "/third"):
            assert weights.reading(path)() == f"of {path}"
            for rank in ranks:
                rank.swapped.clear()
            assert weights.swap(path) == f"of {path}"
            assert all(rank.swapped.wait(60) for rank in ranks)
            assert [rank.weights for rank in ranks] == [path] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_what_one_rank_cannot_read_is_swapped_by_none(failing: int) -> None:
    ranks = [Rank("/bad") if rank == failing else Rank() for rank in range(3)]
    with following(*ranks) as weights:
        with pytest.raises(ModelLoadError, match="/bad is bad"):
            weights.reading("/bad")()
        weights.discard()
        with pytest.raises(ModelLoadError, match="haven't been read"):
            weights.swap("/bad")
        weights.reading("/good")()
        weights.swap("/good")
        assert all(rank.swapped.wait(60) for rank in ranks)
        assert [rank.weights for rank in ranks] == ["/good"] * 3


def test_a_read_that_was_given_up_does_not_disturb_the_next() -> None:
    """The second rank is still at it when the next one is asked for, and fails later."""
    ranks = [Rank(), Rank("/old")]
    with following(*ranks) as weights:
        ranks[1].may_read.clear()
        errors: list[str] = []

        def read_old(read: Callable[[], str]) -> None:
            try:
                read()
            except ModelLoadError as error:
                errors.append(str(error))

        thread = threading.Thread(target=read_old, args=(weights.reading("/old"),))
        thread.start()
        weights.discard()
        read = weights.reading("/new")
        threading.Timer(0.05, ranks[1].may_read.set).start()
        assert read() == "of /new"
        thread.join(60)
        assert errors == ["/old is bad"]
        weights.swap("/new")
        assert all(rank.swapped.wait(60) for rank in ranks)
        assert [rank.weights for rank in ranks] == ["/new", "/new"]
