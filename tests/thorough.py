"""The digest of all that the thorough tests depend on: ``python -m tests.thorough`` notes it.

Tests that are marked as thorough take a third of the suite's time, and only a change of kernels
or of their tests can break them: each CUDA kernel by itself, in the emulation and its arithmetics;
each CPU kernel by itself, by all instruction sets but the machine's best; sanitizers over the
kernels, planted defects, compilation for every GPU, ARM's kernels under an emulator, and all calls
of a rented GPU and the kernels' benchmark in the emulation. So the suite leaves them out. Models of
several kernels stay in it, by every instruction set, and the other scripts that a rented GPU runs.
``python -m nox -s thorough`` runs them and notes the digest, and ``tests/audit/test_thorough.py``
fails if the noted digest is another one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOTE = Path(__file__).with_name("thorough.sha256")
SOURCES = (
    *("gpu/kernels/*", "gpu/kernels/emulation/*", "gpu/cpu/*.py", "gpu/cpu/csrc/*"),
    *("tests/kernels/*.py", "tests/kernels/*.cu", "tests/gpu/cpu/*.py", "tests/gpu/cpu/*.cpp"),
    # What single kernels are compared with, and what makes their arguments.
    *("gpu/attention/*.py", "gpu/models/rope.py", "gpu/sampling/*.py", "gpu/cuda/sampler.py"),
    *("tests/support/device_draws.py", "tests/support/rounding.py"),
    *("tests/support/kernels.py", "tests/gpu/conftest.py"),
    # The calls of a rented GPU, and the scripts that they run.
    *("bench/lease/*.py", "bench/kernels/*.py", "bench/decode_step/*.py"),
    *("tests/bench/test_lease.py", "tests/bench/test_kernels.py"),
)


def digest(root: Path = ROOT) -> str:
    """Return the digest of the names and contents of all :data:`SOURCES` under ``root``."""
    files = {file for pattern in SOURCES for file in root.glob(pattern) if file.is_file()}
    key = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        key.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return key.hexdigest()


if __name__ == "__main__":
    NOTE.write_text(digest() + "\n")
