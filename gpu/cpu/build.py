"""A C++ compiler over the kernels of the CPU: one shared library, compiled once and kept.

The library holds the kernels of one or several instruction sets. It depends on no property of the
processor that compiles it, so it runs wherever one of them is there. From a source tree only the
instruction set that is used is compiled.

The library's name holds the instruction sets and a digest of all that went into it: the sources,
the options and the compiler. So it is never out of date. It appears whole, by renaming, and any
number of processes may share the folder.

A library that is loaded is code that runs. So one is taken from the folder only where no other user
of the machine could have put it there (:mod:`gpu._util.private_files`). A library that came with a
wheel is taken first, and trusted like the wheel's code (:mod:`trioserve.protocol.shipped_kernels`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs

from gpu._util.private_files import check_private, make_private_folder
from trioserve.protocol.machine import (
    NO_COMPILER,
    Machine,
    cache_folder,
    compiler_command,
    compiler_version,
)
from trioserve.protocol.shipped_kernels import shipped_library

SOURCES = Path(__file__).parent / "csrc"
OPTIONS = (
    *("-std=c++20", "-O3", "-pthread", "-fPIC", "-fno-semantic-interposition"),
    # A sum is what the source says, in every variant of a function that a compiler makes of it:
    # results would otherwise depend on how many rows are computed together. Of the options that
    # make mathematics fast, these two change no number.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # gcc before 13 takes the undefined operands inside its own intrinsics for a mistake. clang
    # doesn't know one of these warnings, nor need it.
    *("-Wall", "-Wextra", "-Wno-unknown-warning-option"),
    *("-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni")
KERNELS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "neon": ("-march=armv8.2-a+dotprod",),
    "neon_bf16": ("-march=armv8.2-a+dotprod+bf16+i8mm",),
}
"""Instruction sets that the kernels can be compiled for, and the options of each."""
COMMON = ("detection.cpp",)
"""Sources that are compiled once, for every processor."""
ISAS_OF = {
    "x86_64": ("avx2", "avx512", "avx512_bf16"),
    "aarch64": ("neon", "neon_bf16"),
}
"""The :data:`KERNELS` of a processor's architecture: what its wheels hold."""

OnProgress = Callable[[int, int], None]
"""Called with how many of how many sources are compiled."""

_TEMPORARY = "trioserve-kernels-"
_log = logging.getLogger(__name__)


class LibraryBuildError(Exception):
    """Why there is no library: one line."""


def default_folder() -> Path:
    """Return where built libraries are."""
    return cache_folder("cpu")


def build(
    isas: Sequence[str],
    on_progress: OnProgress | None = None,
    *,
    sources: Path = SOURCES,
    folder: Path | None = None,
) -> Path:
    """Return the library of all ``*.cpp`` in ``sources``: shipped with the package, found in
    ``folder``, or compiled and kept there.

    Where the folder can't be written, or others can write to it, the library lies in a temporary
    folder, and its caller may delete it once it is loaded: see :func:`is_temporary`.

    Args:
        isas: those of :data:`KERNELS` that the library is to hold.
        on_progress: called while it is compiled.
        sources: where the kernels are.
        folder: where libraries are kept; :func:`default_folder` unless given.

    Raises:
        LibraryBuildError: there is no compiler, or it failed.
    """
    recipe = _Recipe(tuple(isas), sources)
    shipped = recipe.shipped()
    if shipped is not None:
        return shipped
    stem = recipe.stem()
    try:
        folder = default_folder() if folder is None else folder
        found = _find(folder, stem)
        if found is not None:
            return found
        make_private_folder(folder)
        with _lock(folder, stem):
            # Another process may have built it meanwhile.
            return _find(folder, stem) or _build(folder, recipe, on_progress)
    except OSError as error:
        _log.warning("built kernels can't be kept: %s", error)
    try:
        return _build_temporarily(recipe, on_progress)
    except OSError as error:
        raise LibraryBuildError(f"the kernels can't be built: {error}") from error


def _build_temporarily(recipe: _Recipe, on_progress: OnProgress | None) -> Path:
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    try:
        check_private(temporary)
        return _build(temporary, recipe, on_progress)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def built(isas: Sequence[str]) -> Path | None:
    """Return the library that :func:`build` would find; None if it would have to compile it.

    Raises:
        LibraryBuildError: it can't.
    """
    recipe = _Recipe(tuple(isas), SOURCES)
    try:
        return recipe.shipped() or _find(default_folder(), recipe.stem())
    except OSError as error:
        raise LibraryBuildError(str(error)) from error


def is_temporary(library: Path) -> bool:
    """Return whether no later process will look for a library that :func:`build` returned."""
    return library.parent.name.startswith(_TEMPORARY)


@attrs.frozen
class _Recipe:
    """All that a library depends on."""

    isas: tuple[str, ...]
    sources: Path

    def shipped(self) -> Path | None:
        """Return the library that came with the package, if one did. It holds one set."""
        if self.sources != SOURCES or len(self.isas) != 1:
            return None
        return shipped_library(self.isas[0])

    def stem(self) -> str:
        """Return the name of the library, without its ending."""
        compiler = compiler_version()
        if compiler is None:
            raise LibraryBuildError(NO_COMPILER)
        options = [KERNELS[isa] for isa in self.isas]
        digest = hashlib.sha256(repr((compiler, OPTIONS, options, platform.machine())).encode())
        for path in sorted([*self.sources.glob("*.cpp"), *self.sources.glob("*.h")]):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return f"kernels-{'+'.join(self.isas)}-{digest.hexdigest()[:24]}"


def _find(folder: Path, stem: str) -> Path | None:
    """Return a library that is there and whole."""
    library = folder / f"{stem}.so"
    try:
        check_private(library)
        noted = (folder / f"{stem}.sha256").read_text()
        if hashlib.sha256(library.read_bytes()).hexdigest() == noted:
            return library
    except (OSError, ValueError):
        pass  # never built here, damaged, or such that others could have put it there
    return None


def _build(folder: Path, recipe: _Recipe, on_progress: OnProgress | None) -> Path:
    stem = recipe.stem()
    library = folder / f"{stem}.so"
    # Left by a build that was killed: this process has the lock.
    for left in folder.glob(f".{stem}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{stem}-") as work:
        linked = Path(work) / library.name
        compile_library(recipe.isas, linked, sources=recipe.sources, on_progress=on_progress)
        note = Path(work) / "note"
        note.write_text(hashlib.sha256(linked.read_bytes()).hexdigest())
        linked.chmod(0o755)
        note.chmod(0o644)
        linked.replace(library)
        # The note is last: what reads it finds its library.
        note.replace(folder / f"{stem}.sha256")
    return library


def compile_library(
    isas: Sequence[str],
    out: Path,
    *,
    sources: Path = SOURCES,
    compiler: Sequence[str] | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Compile the kernels of some instruction sets and link them into the library ``out``.

    Args:
        isas: of :data:`KERNELS`.
        out: the file to be written.
        sources: where the kernels are.
        compiler: command of a C++ compiler; :func:`compiler_command` unless given.
        on_progress: called with each source that is compiled.

    Raises:
        LibraryBuildError: the compiler can't be run, or failed.
    """
    command = compiler_command() if compiler is None else list(compiler)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.stem}-") as work:
        jobs = list(_compilations(isas, sources, Path(work)))
        objects = _compile(command, jobs, on_progress)
        linking = ["-shared", "-pthread", "-Wl,-z,defs", *map(str, objects), "-o", str(out)]
        _run(command, linking)


@attrs.frozen
class _Compilation:
    """A source, the options that it is compiled with, and the object that becomes of it."""

    source: Path
    options: tuple[str, ...]
    object: Path


def _compilations(isas: Sequence[str], sources: Path, work: Path) -> Iterator[_Compilation]:
    for source in sorted(sources.glob("*.cpp")):
        if source.name in COMMON:
            yield _Compilation(source, OPTIONS, work / f"{source.stem}.o")
            continue
        for isa in isas:
            options = (*OPTIONS, *KERNELS[isa], f"-DTRIOSERVE_ISA={isa}")
            yield _Compilation(source, options, work / f"{isa}-{source.stem}.o")


def _compile(
    command: Sequence[str], jobs: Sequence[_Compilation], on_progress: OnProgress | None
) -> list[Path]:
    """Return every object, each compiled in a process of its own, as many at once as cores."""

    def one(job: _Compilation) -> Path:
        options = _in_words_of(command, job.options)
        _run(command, [*options, "-c", str(job.source), "-o", str(job.object)])
        return job.object

    report = on_progress or (lambda _done, _total: None)
    report(0, len(jobs))
    with ThreadPoolExecutor(max(1, int(Machine().cores()))) as threads:
        # The longest take longest, and so begin first.
        by_size = sorted(jobs, key=lambda job: -job.source.stat().st_size)
        try:
            pending = [threads.submit(one, job) for job in by_size]
        except RuntimeError as error:
            raise LibraryBuildError(f"no compiler can be started: {error}") from error
        try:
            for done, future in enumerate(as_completed(pending), 1):
                future.result()
                report(done, len(jobs))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in pending]


def _in_words_of(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return options as the compiler spells them. zig names an ARM architecture by ``-mcpu``."""
    if "ziglang" not in command:
        return list(options)
    march, mcpu = r"^-march=armv(\d)\.(\d)-a", r"-mcpu=generic+v\1_\2a"
    return [re.sub(march, mcpu, option) for option in options]


def _run(command: Sequence[str], arguments: Sequence[str]) -> None:
    compiler = shlex.join(command)
    try:
        done = subprocess.run(
            [*command, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise LibraryBuildError(f"{compiler} can't be run: {error.strerror or error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[0] if lines else "nothing")
        raise LibraryBuildError(f"{compiler} failed with status {done.returncode}: {said}")
    if done.stderr:
        _log.warning("%s: %s", compiler, done.stderr.strip())


@contextlib.contextmanager
def _lock(folder: Path, stem: str) -> Iterator[None]:
    """Keeps other processes from building meanwhile what they would find afterwards.

    Locks are never removed, since one may be waited for; there are 256 at most.
    """
    with open(folder / f".lock-{stem[-2:]}", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
