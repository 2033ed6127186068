"""g++ over the emulator and over single kernels: shared libraries in a cache on disk.

A library's name holds a hash of everything that goes into it, so it is never stale. The emulator
itself is compiled once for each sanitizer, and each kernel's library is linked to it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from gpu._util.private_files import make_private_folder
from gpu.kernels import FOLDER, KernelSource

HERE = Path(__file__).parent
OLDEST_COMPILER = 12  # the first g++ that fills variables with a pattern
DAYS_KEPT = 14

# What the emulator is told of a sanitizer, and how the kernels are instrumented.
SANITIZERS: dict[str, tuple[list[str], list[str]]] = {
    "": ([], []),
    "address": (
        ["-DEMU_ADDRESS"],
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
    ),
    "thread": (["-DEMU_THREAD"], ["-fsanitize=thread"]),
}
# Which products and sums are fused into one operation: none that the source doesn't name, or all
# that can be, as NVRTC does. g++ looks for them among its expensive optimizations only.
CONTRACTIONS = {
    False: ["-ffp-contract=off"],
    True: ["-ffp-contract=fast", "-mfma", "-fexpensive-optimizations"],
}
COMMON = ["-std=c++20", "-fPIC", "-shared", "-g1", "-Wall"]
EMULATOR = ["-O3", "-Wextra", "-pthread"]
KERNEL = [
    "-O1",
    "-DEMULATED",
    # What was never written to is a large number, not a lucky zero.
    "-ftrivial-auto-var-init=pattern",
    # Kernels have pragmas for another compiler, and names of lanes that one variant doesn't use.
    "-Wno-unknown-pragmas",
    "-Wno-unused-variable",
    "-Wno-unused-but-set-variable",
]


class BuildError(Exception):
    """There is no g++ to build the emulation with, or it refused a source and said why."""


class BuildWarning(UserWarning):
    """A warning of g++ about a source that it accepted."""


def build_emulator(sanitizer: str = "") -> Path:
    """Return the shared library of the emulator.

    Raises:
        BuildError: see there.
    """
    defines, _ = SANITIZERS[sanitizer]
    options = [*COMMON, *EMULATOR, *defines]
    sources = sorted(HERE.glob("*.cpp"))
    key = _key(options, [*sources, *sorted(HERE.glob("*.h"))])

    def command(work: Path) -> list[str]:
        return [*options, *map(str, sources)]

    return _build(f"emulator-{key}.so", command)


def build_kernel(
    source: KernelSource, *, folder: Path = FOLDER, sanitizer: str = "", fused: bool = False
) -> Path:
    """Return the shared library of ``source``, with its file and headers from ``folder``.

    ``fused`` makes products and sums into fused multiply-adds.

    Raises:
        BuildError: see there; or this processor has no fused multiply-add.
    """
    if fused and " fma " not in Path("/proc/cpuinfo").read_text():
        raise BuildError("this processor has no fused multiply-add")
    _, instrument = SANITIZERS[sanitizer]
    emulator = build_emulator(sanitizer)
    defines = [f"-D{name}={value}" for name, value in sorted(source.macros.items())]
    options = [*COMMON, *KERNEL, *CONTRACTIONS[fused], *instrument, *defines, "-include", "cuda.h"]
    files = _with_headers(folder / source.file, [folder])
    key = _key([source.name, emulator.name, *options], [*files, *sorted(HERE.glob("*.h"))])

    def command(work: Path) -> list[str]:
        unit = work / "kernel.cpp"
        unit.write_text(
            f'#include "{folder / source.file}"\n'
            'extern "C" void emu_kernel(const void* parameters) {\n'
            f"  {source.name}(*static_cast<const Parameters*>(parameters));\n"
            "}\n"
        )
        link = [str(emulator), "-Wl,-rpath,$ORIGIN"]
        if not sanitizer:  # a sanitizer's run-time library isn't linked but preloaded
            link.append("-Wl,-z,defs")
        return [*options, f"-I{folder}", f"-I{HERE}", str(unit), *link]

    return _build(f"{source.name}-{key}.so", command)


def _build(name: str, command: Callable[[Path], list[str]]) -> Path:
    """Return the library ``name`` of the cache; if missing, run ``command(work folder)`` first."""
    library = _folder() / name
    if library.exists():
        return library
    with _lock(name):
        if library.exists():  # another process was faster
            return library
        with tempfile.TemporaryDirectory(dir=library.parent) as work:
            built = Path(work) / name
            arguments = ["g++", *command(Path(work)), "-o", str(built)]
            done = subprocess.run(arguments, capture_output=True, text=True)
            if done.returncode:
                raise BuildError(f"g++ refused {name}:\n{done.stderr}")
            if done.stderr:
                warnings.warn(f"{name}:\n{done.stderr}", BuildWarning, stacklevel=3)
            built.replace(library)
        _forget_old_libraries()
    return library


def _key(options: list[str], files: list[Path]) -> str:
    key = hashlib.sha256(repr([_compiler(), *options]).encode())
    for file in files:
        key.update(file.read_bytes())
    return key.hexdigest()[:20]


def _with_headers(file: Path, folders: list[Path]) -> list[Path]:
    """``file`` and what it includes from ``folders``, directly or not."""
    found = [file]
    for reached in found:
        for header in re.findall(r'^#include "(.*)"', reached.read_text(), re.MULTILINE):
            paths = [folder / header for folder in folders if (folder / header).exists()]
            found += [path for path in paths if path not in found]
    return found


@cache
def _compiler() -> str:
    """Version and target of g++."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise BuildError("kernels are emulated on Linux on x86-64 processors only")
    if not shutil.which("g++"):
        raise BuildError("kernels are emulated with g++, which is not installed (or not in PATH)")
    version = subprocess.run(
        ["g++", "-dumpfullversion"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if int(version.split(".")[0]) < OLDEST_COMPILER:
        raise BuildError(f"kernels are emulated with g++ {OLDEST_COMPILER} or newer, not {version}")
    return version


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "trioserve" / "emulation"
    make_private_folder(folder)
    return folder


@contextmanager
def _lock(name: str) -> Iterator[None]:
    """Keeps other processes from building the same library meanwhile."""
    # Few files, which are never removed: removing a lock that another process waits for is a race.
    number = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 64
    with open(_folder() / f"lock-{number:02}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _forget_old_libraries() -> None:
    oldest = time.time() - DAYS_KEPT * 24 * 3600
    for library in _folder().glob("*.so"):
        try:
            if library.stat().st_mtime < oldest:
                library.unlink()
        except FileNotFoundError:  # another process forgot it as well
            continue
