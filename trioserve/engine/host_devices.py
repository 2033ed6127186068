"""The devices of the engine's host: which of its workers computes where.

Workers that have joined from other hosts have devices of their own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import attrs

from trioserve.config import EngineConfig
from trioserve.engine.core_shares import CoreShare, share_among_ranks
from trioserve.protocol.devices import CPU_OR_GPU, split_device
from trioserve.protocol.errors import InvalidRequest
from trioserve.protocol.machine import Machine


@attrs.frozen(kw_only=True)
class WorkerDevice:
    """The device of one worker, with the fields of :class:`~trioserve.protocol.wire.Start`."""

    device: str
    cores: tuple[int, ...] = ()
    num_threads: int = 0
    rank_cores: tuple[tuple[int, ...], ...] = ()
    place: int | None = None
    """Its place among the options or the numbers; None if the worker was given a device."""

    @property
    def gpu(self) -> str:
        """Number of its first GPU, or of what that is if there are GPUs; empty for a CPU."""
        return self.device.partition(":")[2]


@attrs.define(eq=False)
class HostDevices:
    """The devices of this host's workers.

    A GPU has one worker at most, and a worker of several ranks has as many GPUs, from the one with
    its number on. A worker gets the first device of the options that no other one
    has; without such options, the GPUs with the least numbers. Only a worker finds out if there are
    GPUs. Without GPUs the number chooses a share of the cores.
    """

    _listed: Sequence[str]
    """The devices of the options; empty if each worker gets a number."""
    _default: str
    """``auto``, ``cpu`` or ``cuda``."""
    _shares: Sequence[CoreShare]
    _num_gpus: int = 1
    """GPUs of each worker, if it has any."""
    _taken: dict[int, WorkerDevice] = attrs.field(init=False, factory=dict)
    """The device of each worker, by the worker's number."""

    @classmethod
    def of(cls, config: EngineConfig, machine: Machine) -> HostDevices:
        """Return the devices that the options and the machine have."""
        shares = share_among_ranks(
            machine.nodes(), max(config.num_workers, 1), config.num_ranks, machine.cores()
        )
        return cls(config.worker_devices, config.device, shares, config.num_ranks)

    def take(self, index: int, device: str | None = None) -> WorkerDevice:
        """Return the device of worker ``index``, which has it from now on.

        Raises:
            InvalidRequest: There is none for it, or another worker has the GPU ``device``.
        """
        found = self._first_free() if device is None else self._named(device, len(self._taken))
        owner = self._owner(found)
        if owner is not None:
            raise InvalidRequest(
                f"{device} has worker {owner} already: remove that one, or name another device",
                param="device",
            )
        self._taken[index] = found
        return found

    def free(self, index: int) -> None:
        """Note that worker ``index`` is gone. Idempotent."""
        self._taken.pop(index, None)

    def _owner(self, device: WorkerDevice) -> int | None:
        """Return the number of a worker that has one of these GPUs; None for none."""
        for index, each in self._taken.items():
            if each.gpu and device.gpu and abs(int(each.gpu) - int(device.gpu)) < self._num_gpus:
                return index
        return None

    def _first_free(self) -> WorkerDevice:
        taken = {each.place for each in self._taken.values()}
        for place in range(len(self._listed)) if self._listed else itertools.count():
            found = self._at(place)
            if place not in taken and self._owner(found) is None:
                return found
        raise InvalidRequest(
            f"all of worker_devices have workers ({', '.join(self._listed)}): remove a worker, or "
            "name another device",
            param="device",
        )

    def _at(self, place: int) -> WorkerDevice:
        """Return the device at a place among the options, or with this number."""
        if self._listed:
            return attrs.evolve(self._named(self._listed[place], place), place=place)
        gpu = f"{self._default}:{place * self._num_gpus}"
        device = "cpu" if self._default == "cpu" else gpu
        return attrs.evolve(self._named("cpu", place), device=device, place=place)

    def _named(self, device: str, place: int) -> WorkerDevice:
        """Return a device by its name; on a CPU without cores, with the share of ``place``."""
        form, wanted = CPU_OR_GPU
        if not re.fullmatch(form, device):
            raise InvalidRequest(f"device must be {wanted}; got {device!r}", param="device")
        name, cores = split_device(device)
        if name == "cpu" and not cores:
            share = self._shares[place % len(self._shares)]
            return WorkerDevice(
                device=name,
                cores=share.cores,
                num_threads=share.num_threads,
                rank_cores=share.rank_cores,
            )
        return WorkerDevice(device=name, cores=tuple(cores))
