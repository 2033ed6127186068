"""g++ over one kernel: a shared library, built once for each source, header, option and compiler."""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from gpu.kernels import FOLDER, KernelSource

__all__ = ["build"]

HERE = Path(__file__).parent
SANITIZERS = {
    "": ([], []),
    "address": (
        ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],
        ["-DEMU_ASAN"],
    ),
    "thread": (["-fsanitize=thread"], ["-DEMU_TSAN"]),
}
FLAGS = ["-std=c++20", "-O2", "-g1", "-fPIC", "-DEMULATED", "-ffp-contract=off"]
WARNINGS = ["-Wall", "-Wno-unknown-pragmas", "-Wno-unused-variable"]


def build(source: KernelSource, sanitizer: str = "") -> Path:
    """The shared library of ``source``.

    Raises:
        subprocess.CalledProcessError: it doesn't compile; g++ has said why.
    """
    instrument, core_defines = SANITIZERS[sanitizer]
    defines = [f"-D{name}={value}" for name, value in sorted(source.macros.items())]
    options = [*FLAGS, *WARNINGS, *instrument, *defines]
    files = [source.path, *sorted(FOLDER.glob("*.cuh")), HERE / "cuda.h", HERE / "fibers.cpp"]
    key = hashlib.sha256(repr([source.name, options, _compiler()]).encode())
    for file in files:
        key.update(file.read_bytes())
    library = _folder() / f"{source.name}-{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        unit, core, built = (Path(work) / name for name in ("kernel.cpp", "core.o", "kernel.so"))
        unit.write_text(
            f'#include "{source.path}"\n'
            f'extern "C" void emu_kernel(void** a) '
            f"{{ emu::Thunk<decltype(&{source.name}), &{source.name}>::call(a); }}\n"
        )
        include = [f"-I{FOLDER}", f"-I{HERE}"]
        # The scheduler itself is never instrumented: it tells the sanitizers about its fibers.
        _run(
            "g++", *FLAGS, *core_defines, *include, "-c", str(HERE / "fibers.cpp"), "-o", str(core)
        )
        trivial = ["-ftrivial-auto-var-init=pattern", "-include", "cuda.h", "-shared"]
        _run(
            "g++", *options, *include, *trivial, str(unit), str(core), "-o", str(built), "-lpthread"
        )
        built.replace(library)
    return library


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


@cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout


def _folder() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "trioserve" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
