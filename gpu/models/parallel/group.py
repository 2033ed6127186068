"""The group of ranks on one host, over torch.distributed."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from trioserve.protocol.errors import ModelLoadError

EXIT_RANK_LOST = 4
"""Status of a worker whose ranks don't compute the same any more."""
_MOST_ERROR_BYTES = 1024
_SECONDS_TO_END = 1.0
"""Time in which a worker with a lost rank ends in the way in which the rank did."""
_log = logging.getLogger("gpu.worker")
_FOR_EVER = datetime.timedelta(days=3650)
"""Between two steps a rank waits for as long as no request comes. A rank that ends closes its
connections, which ends the others' waiting at once.
"""


class RankGroup:
    """:class:`~gpu.models.parallel.ranks.Ranks` of processes on one host, over gloo.

    Args:
        rendezvous: File in a folder for this user alone, through which the ranks find each other.
        rank: Number of this process.
        size: Number of processes; blocks until all are there.
    """

    def __init__(self, rendezvous: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not to be reached from other hosts
        dist.init_process_group(
            "gloo",
            init_method=rendezvous.resolve().as_uri(),
            rank=rank,
            world_size=size,
            timeout=_FOR_EVER,
        )
        dist.barrier()  # from here on no rank needs the file

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.all_reduce`."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.all_gather`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def agree(self, error: str) -> None:
        """Return once all ranks have come here without an error.

        Raises:
            ModelLoadError: A rank has an ``error``; with that of the first such rank.
        """
        own = torch.zeros(_MOST_ERROR_BYTES, dtype=torch.uint8)
        text = error.encode()[:_MOST_ERROR_BYTES]
        own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        for found in self.all_gather(own[None]).view(self.size, -1):
            said = bytes(found.tolist()).rstrip(b"\0")
            if said:
                raise ModelLoadError(said.decode(errors="replace"))

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """End the worker if the block fails: the other ranks have begun what this one hasn't done.

        No result is sent for such a step, so that the engine counts one loss.
        """
        try:
            yield
        except BaseException:
            _log.exception("a step of several ranks failed")
            logging.shutdown()
            time.sleep(_SECONDS_TO_END)
            os._exit(EXIT_RANK_LOST)

    def send(self, message: bytes) -> None:
        """Send ``message`` from rank 0 to the others, which :meth:`receive` it."""
        dist.broadcast(torch.tensor([len(message)]), src=0)
        dist.broadcast(torch.frombuffer(bytearray(message), dtype=torch.uint8), src=0)

    def receive(self) -> bytes:
        """Return the next message of rank 0; block until it comes."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, src=0)
        message = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(message, src=0)
        return message.numpy().tobytes()
