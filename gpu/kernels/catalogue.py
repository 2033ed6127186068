"""Every kernel of the product: the ``VARIANTS`` of all modules beside this one."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs

from gpu.kernels import KernelSource, nvrtc
from gpu.kernels.targets import TARGETS


def sources() -> list[KernelSource]:
    """All variants that the product can ask for, ordered by title.

    Raises:
        ValueError: two variants have one title, so that no table can tell them apart.
    """
    found: list[KernelSource] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name != "__main__" and not module.ispkg:
            found += getattr(importlib.import_module(f"gpu.kernels.{module.name}"), "VARIANTS", [])
    twice = [title for title, count in Counter(each.title for each in found).items() if count > 1]
    if twice:
        raise ValueError(f"listed twice: {', '.join(sorted(twice))}")
    return sorted(found, key=lambda source: source.title)


def digests(wanted: Iterable[KernelSource]) -> dict[str, str]:
    """Return a digest for each kernel: of all that its variants are compiled from, on every target.

    What only the emulation compiles is left out.

    Raises:
        KernelBuildError: there is no compiler.
    """
    units: dict[str, list[str]] = {}
    for source in wanted:
        for target in TARGETS:
            units.setdefault(source.name, []).append(_for_gpu(nvrtc.unit(source, target)))
    return {
        name: hashlib.sha256("\n".join(sorted(each)).encode()).hexdigest()[:32]
        for name, each in units.items()
    }


def _for_gpu(unit: nvrtc.Unit) -> str:
    """Return the digest of ``unit`` without the text that the emulation has to itself."""
    headers = {
        name: without_emulation(text.decode()).encode() for name, text in unit.headers.items()
    }
    return attrs.evolve(unit, text=without_emulation(unit.text), headers=headers).digest


def without_emulation(text: str) -> str:
    """Return a source without its lines between ``#ifdef EMULATED`` and its ``#else``.

    A part without an ``#else`` goes as a whole.
    """
    kept = []
    left = 0  # conditions within a part that is left out, itself counted
    for line in text.splitlines(keepends=True):
        word = line.replace("# ", "#").strip()
        if not left:
            kept.append(line)
            left = int(word == "#ifdef EMULATED")
        elif word.startswith("#if"):
            left += 1
        elif word.startswith("#endif") or (left == 1 and word.startswith("#else")):
            left -= 1
            if not left:
                kept.append(line)
    return "".join(kept)
