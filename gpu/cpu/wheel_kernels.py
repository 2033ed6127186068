"""``python -m gpu.cpu.wheel_kernels x86_64 FOLDER``: compile the kernels that a wheel holds.

zig compiles them, because it links for an old glibc and any architecture from any machine, and puts
its C++ library into them. g++ links for the glibc of the machine that it runs on. On a Zen 4
processor 48 products (one shape, 1 to 128 rows) had the same bits from both. Beside g++'s, the
median took the same time, most one-row products up to a tenth more, and single ones from 0.8 to 1.2
times.

Each instruction set has a library of its own. That C++ library leaves templates of plain floats in
the objects, of which a linker would keep one for all instruction sets (``csrc/isa.h``).
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu.cpu.build import ISAS_OF, LibraryBuildError, compile_library
from trioserve.protocol.machine import zig_command
from trioserve.protocol.shipped_kernels import DIGEST, library_name, sources_digest


def compile_for_wheel(machine: str, folder: Path) -> None:
    """Compile the kernels of an architecture's instruction sets into ``folder``.

    Raises:
        LibraryBuildError: it has none, or the compiler failed.
    """
    if machine not in ISAS_OF:
        raise LibraryBuildError(f"no kernels for {machine}: choose from {', '.join(ISAS_OF)}")
    folder.mkdir(parents=True, exist_ok=True)
    for isa in ISAS_OF[machine]:
        print(f"compiling the kernels for {isa}", flush=True)
        compile_library((isa,), folder / library_name(isa), compiler=zig_command(machine))
    (folder / DIGEST).write_text(sources_digest())


if __name__ == "__main__":
    try:
        compile_for_wheel(sys.argv[1], Path(sys.argv[2]))
    except LibraryBuildError as error:
        sys.exit(str(error))
