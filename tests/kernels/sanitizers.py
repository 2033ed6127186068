"""The start of Python for kernels that are built with a sanitizer."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

__all__ = ["environment", "without_address_randomization"]

_LIBRARIES = {"": [], "address": ["asan", "ubsan"], "thread": ["tsan"]}
_OPTIONS = {
    # Python keeps memory to its end, and its own stacks are none of the fibers'.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99:report_signal_unsafe=0",
}
_ADDR_NO_RANDOMIZE = 0x0040000


def environment(sanitizer: str) -> dict[str, str]:
    """Return the environment variables for a process with ``sanitizer``: "", "address" or "thread".

    Raises:
        FileNotFoundError: g++ has no run-time library for it.
    """
    paths = []
    for name in _LIBRARIES[sanitizer]:
        file = f"lib{name}.so"
        command = ["g++", f"-print-file-name={file}"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        if found == file:  # g++ repeats a name that it doesn't know
            raise FileNotFoundError(f"g++ has no {file}: install its sanitizers' libraries")
        paths.append(str(Path(found).resolve()))
    variables = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", **_OPTIONS)
    if paths:
        variables["LD_PRELOAD"] = ":".join(paths)
    return variables


def without_address_randomization() -> Callable[[], None]:
    """For ``preexec_fn``: ThreadSanitizer has fixed places for memory, which random ones miss.

    Where a sandbox forbids it, nothing is changed: most random places suit it.
    """
    personality = ctypes.CDLL(None).personality

    def disable() -> None:
        personality(_ADDR_NO_RANDOMIZE)

    return disable
