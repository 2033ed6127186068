"""Limits of this machine for a process: cores, memory, instruction sets, a compiler. Linux only.

All files are read below a root folder, so that a test can lay out a machine of its own.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs

from trioserve.protocol.devices import cores_from

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_AVX512_BF16 = (*_AVX512, "avx512_bf16")
_NEON = ("asimd", "atomics", "asimddp")
KERNEL_FEATURES = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "amx_tile", "amx_bf16", "amx_int8"),
    "neon": _NEON,
    "neon_bf16": (*_NEON, "bf16", "i8mm"),
}
"""Instruction sets of the compiled CPU kernels, the slowest of an architecture first, and the
processor features that each needs, as /proc/cpuinfo spells them."""
KERNEL_ISAS = tuple(KERNEL_FEATURES)
"""Instruction sets that the compiled CPU kernels can be told to use."""
ARCHITECTURES = {
    "x86-64": ("avx2", "avx512", "avx512_bf16", "amx"),
    "AArch64": ("neon", "neon_bf16"),
}
"""Architectures of processors, and which of :data:`KERNEL_ISAS` belong to each."""
_INTEL_ORDER = ("avx2", "avx512_bf16", "avx512", "amx")
CPU_FEATURES = (*KERNEL_FEATURES["amx"], "avx_vnni", *KERNEL_FEATURES["neon_bf16"])
"""Processor features that make a difference to a model."""
PIP_INSTALL = f"{shlex.quote(sys.executable)} -m pip install"
"""Command that installs a package for this process's Python, which need not be on the PATH."""
COMPILER_ADVICE = (
    f"install one (the quick way is `{PIP_INSTALL} ziglang`; or `apt install g++`, "
    "`dnf install gcc-c++`), or name one in CXX"
)
"""Advice on how to get a C++ compiler."""
NO_COMPILER = f"there is no C++ compiler: {COMPILER_ADVICE}"
COMPILERS = ("g++", "c++", "clang++")
"""Programs that compile C++, the preferred first."""

_ARM_NAMES = {
    ("0x41", "0xd0b"): "ARM Cortex-A76",
    ("0x41", "0xd0c"): "ARM Neoverse N1",
    ("0x41", "0xd40"): "ARM Neoverse V1",
    ("0x41", "0xd49"): "ARM Neoverse N2",
    ("0x41", "0xd4f"): "ARM Neoverse V2",
}
"""Names of frequent ARM processors by their maker and part: /proc/cpuinfo has no others."""
CPU_ISA_VARIABLE = "TRIOSERVE_CPU_ISA"
"""Variable of the option ``--cpu-isa``, for reports without options."""
_NO_LIMIT = 1 << 60
"""Threshold of "no limit": version 1 of control groups then reports a number near 2**63."""


@attrs.frozen
class Machine:
    """A machine, described by the files below ``root``."""

    root: Path = Path("/")

    def cores(self) -> float:
        """Return the number of cores by this process's affinity and its control groups' quota."""
        return min([float(len(os.sched_getaffinity(0))), *self._cpu_quotas()])

    def nodes(self) -> list[list[int]]:
        """Return the cores of each NUMA node that this process's affinity allows, some at least."""
        allowed = os.sched_getaffinity(0)
        folders = (self.root / "sys/devices/system/node").glob("node[0-9]*")
        numbered = sorted(folders, key=lambda folder: int(folder.name.removeprefix("node")))
        nodes = [cores_from(self._read(folder / "cpulist") or "") for folder in numbered]
        usable = [[core for core in node if core in allowed] for node in nodes]
        return [node for node in usable if node] or [sorted(allowed)]

    def memory(self) -> tuple[int, int]:
        """Return the total and the available memory in bytes, within the control groups' limits."""
        fields = self._table("proc/meminfo")
        total, available = (
            int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable")
        )
        for limit, used in self._memory_limits():
            total = min(total, limit)
            available = min(available, max(limit - used, 0))
        return total, available

    def cpu_name(self) -> str:
        """Return the processor's name, or "unknown"."""
        fields = self._table("proc/cpuinfo")
        name = fields.get("model name")
        if name is None and "CPU part" in fields:
            maker, part = fields.get("CPU implementer", "0x0"), fields["CPU part"]
            name = _ARM_NAMES.get((maker, part), f"ARM processor {part} of maker {maker}")
        return name or "unknown"

    def cpu_features(self) -> list[str]:
        """Return the :data:`CPU_FEATURES` that the processor has."""
        fields = self._table("proc/cpuinfo")
        flags = fields.get("flags", fields.get("Features", "")).split()
        return [name for name in CPU_FEATURES if name in flags]

    def architecture(self) -> str:
        """Return which of :data:`ARCHITECTURES` the processor is of; x86-64 if of none."""
        return "AArch64" if "Features" in self._table("proc/cpuinfo") else "x86-64"

    def obstacle_to_kernels(self, isa: str = "auto") -> str | None:
        """Return a text about missing :data:`KERNEL_FEATURES`; None if the processor has all.

        ``isa`` is one of :data:`KERNEL_ISAS`, or ``auto`` for any of them.
        """
        architecture = self.architecture()
        possible = ARCHITECTURES[architecture]
        if isa == "auto":
            isa = possible[0]
        if isa not in possible:
            there = ", ".join(self.kernel_isas()) or "none that the kernels use"
            return f"the processor is {architecture}, without {isa}; it has {there}"
        missing = [name for name in KERNEL_FEATURES[isa] if name not in self.cpu_features()]
        return f"the processor has no {', '.join(missing)}" if missing else None

    def kernel_isa(self, isa: str) -> str:
        """Return ``isa``, or the processor's fastest for ``auto``; there must be no obstacle."""
        return self.kernel_isas()[-1] if isa == "auto" else isa

    def kernel_isas(self) -> list[str]:
        """Return those of :data:`KERNEL_ISAS` that the processor has, the slowest first.

        Intel's vector units start a product of pairs of bfloat16 in every second cycle, and two of
        float32 in each. So on processors of Intel's ``avx512_bf16`` is slower than ``avx512``.
        """
        possible = ARCHITECTURES[self.architecture()]
        isas = [isa for isa in possible if self.obstacle_to_kernels(isa) is None]
        if self._table("proc/cpuinfo").get("vendor_id") == "GenuineIntel":
            isas.sort(key=_INTEL_ORDER.index)
        return isas

    def _table(self, path: str) -> dict[str, str]:
        """Return a file of ``name: value`` lines as a dict; a name's first line counts."""
        fields: dict[str, str] = {}
        for line in (self._read(self.root / path) or "").splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
        return fields

    def _cpu_quotas(self) -> Iterator[float]:
        for group in self._groups("cpu"):
            quota, _, period = (self._read(group / "cpu.max") or "max 1").partition(" ")
            if quota != "max":
                yield int(quota) / int(period)
            old_quota = self._number(group / "cpu.cfs_quota_us")
            old_period = self._number(group / "cpu.cfs_period_us")
            if old_quota is not None and old_period and old_quota > 0:
                yield old_quota / old_period

    def _memory_limits(self) -> Iterator[tuple[int, int]]:
        for group in self._groups("memory"):
            for limit_file, used_file in (
                ("memory.max", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ):
                limit = self._number(group / limit_file)
                if limit is not None and limit < _NO_LIMIT:
                    yield limit, self._number(group / used_file) or 0

    def _groups(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's control groups, from the innermost outwards."""
        top = self.root / "sys/fs/cgroup"
        for line in (self._read(self.root / "proc/self/cgroup") or "").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = top / controller if controllers else top
            inner = Path(path.lstrip("/"))
            # In a container the path may be the host's; a missing file is skipped.
            for folder in (inner, *inner.parents):
                yield base / folder

    def _number(self, path: Path) -> int | None:
        text = self._read(path)
        return int(text) if text is not None and text.lstrip("-").isdigit() else None

    @staticmethod
    def _read(path: Path) -> str | None:
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return None


def extra_advice(extra: str) -> str:
    """Return the command that installs one of the project's extras into this environment."""
    return f"{PIP_INSTALL} '.[{extra}]' in a clone of trioserve"


def cache_folder(name: str) -> Path:
    """Return ``$XDG_CACHE_HOME/trioserve/name``, by default under ``~/.cache``; it may not exist.

    Raises:
        OSError: this user has no home, and no variable says where else.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "trioserve" / name
    except RuntimeError as error:
        raise OSError("this user has no home: set XDG_CACHE_HOME") from error


def compiler_version() -> str | None:
    """Return the C++ compiler with its version; None if none runs."""
    command = compiler_command()
    if command == zig_command():
        return f"{shlex.join(command)} {importlib.metadata.version('ziglang')}"
    if shutil.which(command[0]) is None:
        return None
    for option in ("-dumpfullversion", "-dumpversion"):  # clang knows the second only
        try:
            done = subprocess.run([*command, option], capture_output=True, text=True, check=False)
        except OSError:  # no program
            return None
        if done.returncode == 0:
            return f"{shlex.join(command)} {done.stdout.strip()}"
    return None


def compiler_command() -> list[str]:
    """Return the C++ compiler's command.

    It is ``$CXX``, maybe with arguments, or the first of :data:`COMPILERS` that is installed, or
    that of the package ziglang.
    """
    given = os.environ.get("CXX", "")
    try:
        named = shlex.split(given)
    except ValueError:  # a quotation mark without its end: a program's strange name, perhaps
        named = [given]
    if named:
        return named
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    return zig_command() if importlib.util.find_spec("ziglang") is not None else [COMPILERS[0]]


def zig_command(machine: str | None = None) -> list[str]:
    """Return the command of the C++ compiler in the package ziglang.

    ``machine`` is the processor's architecture as ``uname -m`` has it; this machine's by default.
    """
    # Without a target zig would compile for the processor at hand and no other. The glibc is the
    # oldest that it links for; the C++ library is linked statically. Its symbols are left out.
    target = f"{machine or platform.machine()}-linux-gnu.2.17"
    # -P: no folder named ziglang in the working directory is run.
    return [sys.executable, "-P", "-m", "ziglang", "c++", "-target", target, "-g0", "-s"]
