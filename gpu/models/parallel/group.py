"""The group of ranks on one host, over torch.distributed."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist

_FOR_EVER = datetime.timedelta(days=3650)
"""Between two steps a rank waits for as long as no request comes. A rank that ends closes its
connections, which ends the others' waiting at once.
"""


class RankGroup:
    """:class:`~gpu.models.parallel.ranks.Ranks` of processes on one host, over gloo.

    Args:
        meeting: File in a folder for this user alone, through which the ranks find each other.
        rank: Number of this process.
        size: Number of processes; blocks until all are there.
    """

    def __init__(self, meeting: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # not to be reached from other hosts
        dist.init_process_group(
            "gloo",
            init_method=meeting.resolve().as_uri(),
            rank=rank,
            world_size=size,
            timeout=_FOR_EVER,
        )
        dist.barrier()  # from here on no rank needs the file

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.sum`."""
        dist.all_reduce(x)
        return x

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.join`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

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
