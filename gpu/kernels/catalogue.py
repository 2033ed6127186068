"""Every kernel of the product: the ``VARIANTS`` of all modules beside this one."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gpu.kernels import KernelSource, nvrtc
from gpu.kernels.targets import TARGETS

__all__ = ["digests", "sources"]


def sources() -> list[KernelSource]:
    """All variants that the product can ask for, ordered by title.

    Raises:
        ValueError: two variants have one title, so that no table can tell them apart.
    """
    found: list[KernelSource] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "__main__":
            found += getattr(importlib.import_module(f"gpu.kernels.{module.name}"), "VARIANTS", [])
    twice = [title for title, count in Counter(each.title for each in found).items() if count > 1]
    if twice:
        raise ValueError(f"listed twice: {', '.join(sorted(twice))}")
    return sorted(found, key=lambda source: source.title)


def digests(wanted: Iterable[KernelSource]) -> dict[str, str]:
    """Return a digest for each kernel: of all that its variants are compiled from, on every target.

    Raises:
        KernelBuildError: there is no compiler.
    """
    units: dict[str, list[str]] = {}
    for source in wanted:
        for target in TARGETS:
            units.setdefault(source.name, []).append(nvrtc.unit(source, target).digest)
    return {
        name: hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()[:32]
        for name, each in units.items()
    }
