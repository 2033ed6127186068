"""The sums of torch over the ranks on one host, by torch.distributed.

Those of GPUs are queued in the current stream, and may be captured in a CUDA graph: the host
doesn't wait for them. A rank that waits on its GPU for another one, which has ended, ends with it.
"""

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
    """:class:`~gpu.models.parallel.ranks.Ranks` of processes on one host, over gloo or NCCL.

    Args:
        rendezvous: File in a folder for this user alone, through which the ranks find each other.
        rank: Number of this process; those of a stage follow each other.
        size: Number of processes of a stage.
        num_stages: Number of stages; blocks until the processes of all are there.
        gpu: GPU of this process; None if the tensors are on the CPU.
    """

    def __init__(
        self,
        rendezvous: Path,
        rank: int,
        size: int,
        num_stages: int = 1,
        gpu: torch.device | None = None,
    ) -> None:
        self.stage, self.rank = divmod(rank, size)
        self.size = size
        for library in ("GLOO", "NCCL"):
            os.environ[f"{library}_SOCKET_IFNAME"] = "lo"  # not to be reached from other hosts
        dist.init_process_group(
            "gloo" if gpu is None else "nccl",
            init_method=rendezvous.resolve().as_uri(),
            rank=rank,
            world_size=size * num_stages,
            timeout=_FOR_EVER,
            device_id=gpu,
        )
        self._own = dist.group.WORLD
        if num_stages > 1:
            stages = [
                dist.new_group(list(range(first, first + size)), timeout=_FOR_EVER)
                for first in range(0, size * num_stages, size)
            ]
            self._own = stages[self.stage]
        dist.barrier()  # from here on no rank needs the file

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.all_reduce`."""
        dist.all_reduce(x, group=self._own)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.all_gather`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self._own)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`~gpu.models.parallel.ranks.Ranks.broadcast`."""
        dist.broadcast(x, self.stage * self.size, group=self._own)
        return x
