"""What a server's processes use, all together, as ``/proc`` tells it (Linux only)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import attrs

__all__ = ["Family", "busy_seconds", "family"]

_TICKS = os.sysconf("SC_CLK_TCK")


def family(ancestor: int) -> list[int]:
    """A process and all that descend from it; a worker may be in a session of its own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_stat(int(entry.name))[1]), []).append(int(entry.name))
    family = [ancestor]
    for member in family:
        family += children.get(member, [])
    return family


def busy_seconds() -> float:
    """Seconds that all cores together have computed since the machine started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _idle, _iowait, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / _TICKS


@attrs.frozen
class Family:
    """The processes that descend from one, and itself; found anew at each question."""

    ancestor: int

    def cpu_seconds(self) -> float:
        """Seconds of CPU that its processes and their ended children have used."""
        ticks = 0
        for pid in family(self.ancestor):
            with contextlib.suppress(OSError):
                # utime, stime, and the same of children that were waited for
                ticks += sum(int(field) for field in _stat(pid)[11:15])
        return ticks / _TICKS

    def cpu_by_command(self) -> list[tuple[str, float]]:
        """The command line of each process, and the seconds of CPU that it has used itself."""
        used = []
        for pid in family(self.ancestor):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                used.append((command, sum(int(field) for field in _stat(pid)[11:13]) / _TICKS))
        return used

    def pss_bytes(self, kind: str = "Pss") -> int:
        """Memory: a page that several processes share counts for each with its part.

        ``kind`` is as the system calls it: ``Pss`` for all of it, ``Pss_Anon`` for what is written,
        ``Pss_File`` for what is mapped from files, ``Pss_Shmem`` for what is shared on purpose.
        """
        return sum(_kib(pid, "smaps_rollup", f"{kind}:") for pid in family(self.ancestor)) * 1024

    def peak_resident_bytes(self) -> int:
        """The most memory that each of its processes held at some time, added up."""
        return sum(_kib(pid, "status", "VmHWM:") for pid in family(self.ancestor)) * 1024


def _stat(pid: int) -> list[str]:
    """The fields from the third on: the name before may hold anything, spaces too."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _kib(pid: int, file: str, name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1])
    return 0
