"""Every kernel of the product: the ``VARIANTS`` of all modules beside this one."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from pathlib import Path

from gpu.kernels import KernelSource

__all__ = ["sources"]


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
