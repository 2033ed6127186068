"""The sums of torch over the ranks, by torch.distributed.

Those of GPUs are queued in the current stream, and may be captured in a CUDA graph: the host
doesn't wait for them. A rank that waits on its GPU for another one, which has ended, ends with it.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import socket
import struct
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

_FOR_EVER = datetime.timedelta(days=3650)
"""Between two steps a rank waits for as long as no request comes. A rank that ends closes its
connections, which ends the others' waiting at once.
"""
_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR: the IPv4 address of an interface."""


class RankGroup:
    """:class:`~gpu.models.parallel.ranks.Ranks` of processes, over gloo or NCCL.

    Args:
        rendezvous: URL through which the ranks find each other: of a file in a folder for this user
            alone, or of an address of rank 0's host, if they are on several hosts.
        rank: Number of this process; those of a stage follow each other.
        size: Number of processes of a stage.
        num_stages: Number of stages; blocks until the processes of all are there.
        gpu: GPU of this process; None if the tensors are on the CPU.
    """

    def __init__(
        self,
        rendezvous: str,
        rank: int,
        size: int,
        num_stages: int = 1,
        gpu: torch.device | None = None,
    ) -> None:
        self.stage, self.rank = divmod(rank, size)
        self.size = size
        _choose_interface(urlsplit(rendezvous).hostname)
        dist.init_process_group(
            "gloo" if gpu is None else "nccl",
            init_method=rendezvous,
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


def _choose_interface(host: str | None) -> None:
    """Choose the network interface for sums: the loopback one, or that on the way to ``host``.

    Ranks of one host can't be reached from others. The operator may choose another one in
    ``GLOO_SOCKET_IFNAME`` for several hosts. Of an IPv6 address, gloo finds it by itself.
    """
    interface = "lo" if host is None else _interface_to(host)
    for library in ("GLOO", "NCCL"):
        name = f"{library}_SOCKET_IFNAME"
        if interface is not None and (host is None or name not in os.environ):
            os.environ[name] = interface


def _interface_to(host: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 1))  # Nothing is sent.
        except OSError:
            return None
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode())
                found = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
                if socket.inet_ntoa(found[20:24]) == own:
                    return name
    return None
