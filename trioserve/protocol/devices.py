"""Names of devices: ``auto``, ``cpu``, ``cuda``, a GPU (``cuda:1``), cores (``cpu:0-3+8-11``)."""

from __future__ import annotations

from collections.abc import Iterable

_CORES = r"\d{1,4}(-\d{1,4})?(\+\d{1,4}(-\d{1,4})?)*"
CPU_OR_GPU = (
    rf"cpu(:{_CORES})?|cuda:(0|[1-9]\d{{0,2}})",
    "a GPU such as cuda:1, cpu, or cores such as cpu:0-3+8-11",
)
"""Regular expression of a worker's device, and its meaning in words."""
ANY_DEVICE = (
    rf"auto|cuda|{CPU_OR_GPU[0]}",
    "auto, cuda, a GPU such as cuda:1, cpu, or cores such as cpu:0-3+8-11",
)
"""Regular expression of the device of a worker that may choose, and its meaning in words."""


def split_device(device: str) -> tuple[str, list[int]]:
    """Return the device without its cores, and the cores; ``cpu:0-1`` is ``cpu`` and ``[0, 1]``."""
    name, _, cores = device.partition(":")
    return (name, cores_from(cores.replace("+", ","))) if name == "cpu" else (device, [])


def cores_from(text: str) -> list[int]:
    """Return the numbers that ``0-3,8`` stands for, in the form of Linux, sorted."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        ends = [int(end) for end in part.split("-")]
        cores.update(range(min(ends), max(ends) + 1))
    return sorted(cores)


def cores_text(cores: Iterable[int]) -> str:
    """Return the shortest text for sorted ``cores``: the reverse of :func:`cores_from`."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], core]
        else:
            spans.append([core])
    return ",".join("-".join(map(str, span)) for span in spans)
