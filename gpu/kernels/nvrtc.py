"""NVRTC, CUDA's compiler in a library, through CuPy: one kernel in, one cubin and its costs out.

Nothing here needs a GPU or a driver. CuPy is imported when the first kernel is compiled, because
trioserve also runs without it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import re
import struct
from functools import cache
from typing import Any

import attrs

from gpu.kernels import FOLDER, KernelSource
from trioserve.protocol.machine import extra_advice

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

_LOG_LINES = 12
"""Lines of a failed build's log in an error, from the first error on."""


class KernelBuildError(RuntimeError):
    """A kernel can't be built: there is no compiler, or it refuses the source."""


@attrs.frozen(kw_only=True)
class KernelUsage:
    """The resources of a kernel as ptxas reports them; dynamic shared memory is not included."""

    registers: int
    """Registers of a thread."""
    stack: int
    """Bytes of local memory of a thread: spilled registers, and arrays indexed at run time."""
    spills: int
    """Bytes of spill stores and loads in the code of a thread."""
    static_shared: int
    """Bytes of a block."""


@attrs.frozen(kw_only=True)
class Build:
    """A compiled kernel: an ELF file for one target."""

    cubin: bytes
    usage: KernelUsage


@attrs.frozen(kw_only=True)
class Unit:
    """One compilation: all that its result depends on, read once."""

    source: KernelSource
    target: str
    text: str
    headers: dict[str, bytes] = attrs.field(eq=False)
    options: tuple[str, ...]
    compiler: str

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change with anything that may change the result."""
        digest = hashlib.sha256()
        parts = [repr((self.source.name, self.options, self.compiler)).encode(), self.text.encode()]
        for name, text in self.headers.items():
            parts += [name.encode(), text]
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()


def unit(source: KernelSource, target: str) -> Unit:
    """Return the compilation of ``source`` for ``target``, such as ``"sm_90"``.

    Raises:
        KernelBuildError: CuPy or NVRTC is missing.
    """
    text = source.path.read_text()
    return Unit(
        source=source,
        target=target,
        text=text,
        headers=_headers_of(text),
        options=options(source, target),
        compiler=compiler(),
    )


def build(unit: Unit) -> Build:
    """Compile. Other threads run meanwhile.

    Raises:
        KernelBuildError: the source doesn't compile; the message has the first lines of the log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(
        unit.text,
        unit.source.path.name,
        tuple(unit.headers.values()),
        tuple(name.encode() for name in unit.headers),
    )
    try:
        nvrtc.compileProgram(program, unit.options)
        return Build(
            cubin=_whole(nvrtc.getCUBIN(program)),
            usage=usage_in(nvrtc.getProgramLog(program)),
        )
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).strip() or str(error)
        title = f"{unit.source.title} for {unit.target}"
        raise KernelBuildError(f"{title}: {_first_errors(log)}") from None
    finally:
        nvrtc.destroyProgram(program)


def options(source: KernelSource, target: str) -> tuple[str, ...]:
    """Everything that the compiler is told besides the text of the kernel and its headers.

    What speeds arithmetic up at the price of accuracy stays off (``--use_fast_math``, ``--ftz``,
    which CuPy would add): a kernel that wants an approximation calls it by name, and subnormal
    numbers stay what they are in the reference. Products and sums are fused into FMAs, NVRTC's
    default.
    """
    return (
        f"--gpu-architecture={target}",
        "--std=c++20",  # as the emulation compiles the same text
        "--ptxas-options=-v",  # for Usage
        "--generate-line-info",  # for profilers and compute-sanitizer; changes no instruction
        "--no-source-include",  # only the headers that are part of the cache's key
        # A result from the driver's own cache, which came with 12.9, has no ptxas report.
        *(("--no-cache",) if version() >= (12, 9) else ()),
        *(f"--define-macro={name}={value}" for name, value in sorted(source.macros.items())),
    )


@cache
def version() -> tuple[int, int]:
    """NVRTC's version.

    Raises:
        KernelBuildError: CuPy or NVRTC is missing.
    """
    try:
        major, minor = _nvrtc().getVersion()
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise KernelBuildError(f"CuPy finds no NVRTC: {reason}") from error
    return int(major), int(minor)


@cache
def compiler() -> str:
    """NVRTC's version as exactly as it is known, such as ``"NVRTC 13.0.88"``."""
    major, minor = version()
    for package in (f"nvidia-cuda-nvrtc-cu{major}", "nvidia-cuda-nvrtc"):
        try:
            exactly = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if exactly.startswith(f"{major}.{minor}."):
            return f"NVRTC {exactly}"
    return f"NVRTC {major}.{minor}"


def capabilities() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC has code for, ``90`` for 9.0, ascending."""
    version()
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def usage_in(log: str) -> KernelUsage:
    """Return the report in the log of a compilation of one kernel.

    Raises:
        KernelBuildError: there is no such report in ``log``.
    """
    memory = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
    )
    used = re.search(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?", log)
    if memory is None or used is None:
        raise KernelBuildError(f"NVRTC's log has no report of ptxas:\n{_first_errors(log)}")
    stack, stored, loaded = map(int, memory.groups())
    return KernelUsage(
        registers=int(used[1]),
        stack=stack,
        spills=stored + loaded,
        static_shared=int(used[2] or 0),
    )


@cache
def _nvrtc() -> Any:
    try:
        return importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        advice = f"{extra_advice('cuda13')}, or [cuda12] for an older driver"
        raise KernelBuildError(f"CUDA kernels are built with CuPy: {advice}") from error


def _headers_of(text: str) -> dict[str, bytes]:
    """Return what ``text`` includes, and what that includes; the compiler sees no other header."""
    headers: dict[str, bytes] = {}
    wanted = _INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        path = FOLDER / name
        if name not in headers and path.exists():  # what is missing, the compiler names
            headers[name] = path.read_bytes()
            wanted += _INCLUDE.findall(headers[name].decode())
    return dict(sorted(headers.items()))


def _first_errors(log: str) -> str:
    lines = log.splitlines()
    errors = [at for at, line in enumerate(lines) if "error" in line.lower()]
    start = errors[0] if errors else 0
    more = len(lines) - start - _LOG_LINES
    shown = lines[start : start + _LOG_LINES] + ([f"... {more} more lines"] if more > 0 else [])
    return "\n".join(shown)


def _whole(cubin: bytes) -> bytes:
    """Return the file with its last byte, which CuPy 14 takes for a terminator and drops.

    An ELF file ends with one of its two header tables, so its own header tells its length. The
    byte is the highest of a small little-endian number, hence 0.
    """
    program_table, section_table = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", cubin, 54)
    length = max(program_table + program_size * programs, section_table + section_size * sections)
    return cubin + b"\0" if len(cubin) == length - 1 else cubin
