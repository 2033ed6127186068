"""Machine instructions of a cubin, counted with nvdisasm; no GPU is needed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_INSTRUCTION_BYTES = 16
_BYTES_FOLLOW = 4
_PARAMETER_BYTES = 0x19  # EIATTR_CBANK_PARAM_SIZE, as cuobjdump --dump-elf names it
_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][\w.]*)")


class SassError(RuntimeError):
    """nvdisasm is missing or fails."""


class Instructions(Counter[str]):
    """Counts of the instructions in a kernel's code, by name with all modifiers."""

    def like(self, pattern: str) -> int:
        """Return how many there are of an opcode with at least the modifiers that ``pattern``
        names.

        ``"LDGSTS.128"`` counts ``LDGSTS.E.BYPASS.LTC128B.128.ZFILL``: a 16-byte asynchronous copy.
        """
        opcode, *modifiers = pattern.split(".")
        total = 0
        for name, count in self.items():
            first, *rest = name.split(".")
            if first == opcode and set(modifiers) <= set(rest):
                total += count
        return total


def disassemble(cubins: Sequence[bytes], target: str) -> list[Instructions]:
    """Return the instructions of every cubin; all must be for ``target``.

    Raises:
        SassError: nvdisasm is missing or fails.
    """
    return [Instructions(names) for names in listings(cubins, target)]


def listings(cubins: Sequence[bytes], target: str) -> list[list[str]]:
    """Return the names of every cubin's instructions in their order; all must be for ``target``.

    nvdisasm takes half a second to start and one file, so the code of all goes through it at once.

    Raises:
        SassError: nvdisasm is missing or fails.
    """
    codes = [_code(cubin) for cubin in cubins]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        architecture = target.replace("sm_", "SM")
        command = [str(nvdisasm()), "--no-dataflow", "--binary", architecture, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SassError(f"nvdisasm fails for {target}: {done.stderr.strip()}")
    names = [found[2] for line in done.stdout.splitlines() if (found := _LINE.match(line))]
    expected = sum(map(len, codes)) // _INSTRUCTION_BYTES
    if len(names) != expected:
        raise SassError(f"nvdisasm lists {len(names)} of {expected} instructions for {target}")
    listed, start = [], 0
    for code in codes:
        end = start + len(code) // _INSTRUCTION_BYTES
        listed.append(names[start:end])
        start = end
    return listed


def parameter_bytes(cubin: bytes) -> int:
    """Return how many bytes of parameters the kernel takes, as the driver will read it.

    Raises:
        SassError: the cubin doesn't say.
    """
    info = _section(cubin, b".nv.info.")
    at = 0
    while at < len(info):
        # A form, what it is about, and a number: the value, or how many bytes of it follow.
        form, attribute, number = struct.unpack_from("<BBH", info, at)
        if attribute == _PARAMETER_BYTES:
            return int(number)
        at += 4 + (number if form == _BYTES_FOLLOW else 0)
    raise SassError("the cubin says nothing of its parameters")


@cache
def nvdisasm() -> Path:
    """Return the program: of the Python package, else of a CUDA toolkit.

    Raises:
        SassError: there is none.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nvdisasm":
            return Path(str(file.locate()))
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"])
    installed = shutil.which("nvdisasm", path=path)
    if installed is None:
        raise SassError("there is no nvdisasm: pip install nvidia-cuda-nvdisasm")
    return Path(installed)


def _code(cubin: bytes) -> bytes:
    """Return the ELF section of the kernel's instructions."""
    return _section(cubin, b".text.")


def _section(cubin: bytes, prefix: bytes) -> bytes:
    """Return the first ELF section with a name that begins with ``prefix``."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    # Of each section: name, type, flags, address, offset, size.
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + at * size) for at in range(count)]
    start_of_names = sections[names][4]
    for name, *_, offset, length in sections:
        if cubin.startswith(prefix, start_of_names + name):
            return cubin[offset : offset + length]
    raise SassError(f"the cubin has no section {prefix.decode()}")
