"""Compiled CPU kernels that a wheel brings, so that no compiler is needed.

They lie beside the package's own code, and are trusted like it: where another user can replace
them, the Python files can be replaced, too. They are used only while the sources that are installed
beside them are those that they were compiled from.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from trioserve.protocol.machine import NO_COMPILER, Machine, compiler_version

_PACKAGE = Path(__file__).resolve().parents[2] / "gpu" / "cpu"
SHIPPED = _PACKAGE / "built"
"""The folder of the kernels in a wheel: a library for each instruction set, and their digest."""
DIGEST = "sources.sha256"
"""The file of that folder with the digest of the sources."""


def library_name(isa: str) -> str:
    """Return the name of the library of an instruction set that it is compiled for."""
    return f"kernels-{isa}.so"


def sources_digest(package: Path = _PACKAGE) -> str:
    """Return a digest of the kernels' sources and of the module that has their options."""
    sources = [*package.glob("csrc/*.cpp"), *package.glob("csrc/*.h"), package / "build.py"]
    digest = hashlib.sha256()
    for path in sorted(sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def shipped_library(isa: str = "*") -> Path | None:
    """Return the library of an instruction set, or of any; None if the wheel brought none.

    A library that was compiled from other sources doesn't count.
    """
    found = next(SHIPPED.glob(library_name(isa)), None)
    try:
        if found is not None and (SHIPPED / DIGEST).read_text() == sources_digest():
            return found
    except OSError:
        pass  # an incomplete installation: the kernels are compiled
    return None


def kernels_obstacle() -> str | None:
    """Return why this machine can't compute with compiled kernels; None if it can."""
    obstacle = Machine().obstacle_to_kernels()
    if obstacle is None and shipped_library() is None and compiler_version() is None:
        return NO_COMPILER
    return obstacle
