"""The catalogue of kernels: the ``VARIANTS`` of all modules beside this one."""

from __future__ import annotations

import hashlib
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import attrs

from gpu.kernels import KernelSource, nvrtc
from gpu.kernels.targets import TARGETS

_LITERAL_COMMENT_OR_BLANKS = re.compile(
    r"""(?P<literal>"(?:\\.|[^"\\\n])*"|(?<!\w)'(?:\\.|[^'\\\n])*')|//[^\n]*|/\*.*?\*/|[ \t]+""",
    re.DOTALL,
)


def sources() -> list[KernelSource]:
    """Return all variants that the product can ask for, ordered by title.

    Raises:
        ValueError: two variants have the same title.
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
    """Return a digest of the code of each kernel: all its variants, on every target.

    Comments, white space and the emulation's lines don't count.

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
    """Return the digest of the code in ``unit`` that a GPU's compiler sees."""
    headers = {name: _gpu_code(text.decode()).encode() for name, text in unit.headers.items()}
    return attrs.evolve(unit, text=_gpu_code(unit.text), headers=headers).digest


def _gpu_code(text: str) -> str:
    return code_only(without_emulation(text))


def code_only(text: str) -> str:
    """Return a source without comments, blank lines, and white space that separates no tokens.

    Lines stay lines, because a preprocessor's directive ends with its line.
    """
    code = _LITERAL_COMMENT_OR_BLANKS.sub(lambda match: match["literal"] or " ", text)
    return "\n".join(line for each in code.splitlines() if (line := each.strip()))


def without_emulation(text: str) -> str:
    """Return a source without its lines between ``#ifdef EMULATED`` and the matching ``#else``.

    Without an ``#else``, everything up to ``#endif`` is dropped.
    """
    kept = []
    left = 0  # depth of conditions in a dropped part, itself included
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
