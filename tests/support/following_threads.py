"""The ranks behind rank 0 as threads of one process, over the sockets that processes have."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from gpu.cpu.following_steps import FollowingModel, FollowingSteps
from gpu.models.parallel.link import RankLink
from trioserve.model_files import ModelFiles

__all__ = ["followed"]

SECONDS = 60


@contextlib.contextmanager
def followed(
    links: Sequence[RankLink], others: Sequence[FollowingModel], files: ModelFiles
) -> Iterator[RankLink]:
    """Yield the first of ``links``, that of rank 0; the other ranks follow until the block ends.

    An error on another rank ends the process, as it ends a worker.
    """
    threads = [
        threading.Thread(target=_follow, args=(link, model, files), daemon=True)
        for link, model in zip(links[1:], others, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield links[0]
    finally:
        _close(links[0])
        for thread in threads:
            thread.join(SECONDS)
        for link in links[1:]:
            _close(link)
    assert not any(thread.is_alive() for thread in threads)


def _close(link: RankLink) -> None:
    for each in link.sockets:
        each.close()


def _follow(link: RankLink, model: FollowingModel, files: ModelFiles) -> None:
    with link.in_step(), contextlib.suppress(EOFError):
        FollowingSteps(link, model, files).follow()
