"""g++ over the kernels of the CPU: one shared library, compiled once on a machine and kept.

The library's name holds a digest of all that went into it: the sources, the options, the compiler
and the processor, since it is compiled for the very instructions that this processor has. So it is
never out of date. It appears whole, by renaming, and any number of processes may share the folder.

A library that is loaded is code that runs. So one is taken from the folder only where no other user
of the machine could have put it there (:mod:`gpu._util.private_files`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from gpu._util.private_files import check_private, make_private_folder
from trioserve.protocol.machine import (
    COMPILER_ADVICE,
    Machine,
    cache_folder,
    compiler_command,
    compiler_version,
)

SOURCES = Path(__file__).parent / "csrc"
OPTIONS = (
    *("-std=c++20", "-O3", "-march=native", "-pthread", "-fPIC", "-fno-semantic-interposition"),
    # A sum is what the source says, in every variant of a function that a compiler makes of it:
    # results would otherwise depend on how many rows are computed together. Of the options that
    # make mathematics fast, these two change no number.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    # gcc before 13 takes the undefined operands inside its own intrinsics for a mistake.
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized"),
)

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
    on_progress: OnProgress | None = None,
    *,
    sources: Path = SOURCES,
    folder: Path | None = None,
    machine: Machine | None = None,
) -> Path:
    """Return the library of all ``*.cpp`` in ``sources``: found in ``folder``, or compiled and kept
    there.

    Where the folder can't be written, or others can write to it, the library lies in a temporary
    folder, and its caller may delete it once it is loaded: see :func:`is_temporary`.

    Raises:
        BuildError: the processor lacks instructions, there is no compiler, or it failed.
    """
    stem = _stem(sources, Machine() if machine is None else machine)
    try:
        folder = default_folder() if folder is None else folder
        found = _find(folder, stem)
        if found is not None:
            return found
        make_private_folder(folder)
        with _lock(folder, stem):
            # Another process may have built it meanwhile.
            return _find(folder, stem) or _build(folder, stem, sources, on_progress)
    except OSError as error:
        _log.warning("built kernels can't be kept: %s", error)
    try:
        return _build_temporarily(stem, sources, on_progress)
    except OSError as error:
        raise LibraryBuildError(f"the kernels can't be built: {error}") from error


def _build_temporarily(stem: str, sources: Path, on_progress: OnProgress | None) -> Path:
    temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY))
    try:
        check_private(temporary)
        return _build(temporary, stem, sources, on_progress)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def built() -> Path | None:
    """Return the library that :func:`build` would find; None if it would have to compile it.

    Raises:
        BuildError: it can't.
    """
    stem = _stem(SOURCES, Machine())
    try:
        return _find(default_folder(), stem)
    except OSError as error:
        raise LibraryBuildError(str(error)) from error


def is_temporary(library: Path) -> bool:
    """Return whether no later process will look for a library that :func:`build` returned."""
    return library.parent.name.startswith(_TEMPORARY)


def _stem(sources: Path, machine: Machine) -> str:
    """Return the name of the library of ``sources`` for this machine, without its ending."""
    obstacle = machine.obstacle_to_kernels()
    if obstacle is not None:
        raise LibraryBuildError(obstacle)
    compiler = compiler_version()
    if compiler is None:
        raise LibraryBuildError(f"there is no C++ compiler: {COMPILER_ADVICE}")
    digest = hashlib.sha256(repr((compiler, OPTIONS, machine.cpu_identity())).encode())
    for path in sorted([*sources.glob("*.cpp"), *sources.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"kernels-{digest.hexdigest()[:24]}"


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


def _build(folder: Path, stem: str, sources: Path, on_progress: OnProgress | None) -> Path:
    library = folder / f"{stem}.so"
    # Left by a build that was killed: this process has the lock.
    for left in folder.glob(f".{stem}-*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{stem}-") as work:
        objects = _compile(sorted(sources.glob("*.cpp")), Path(work), on_progress)
        linked = Path(work) / library.name
        _run(["-shared", "-pthread", "-Wl,-z,defs", *map(str, objects), "-o", str(linked)])
        note = Path(work) / "note"
        note.write_text(hashlib.sha256(linked.read_bytes()).hexdigest())
        linked.chmod(0o755)
        note.chmod(0o644)
        linked.replace(library)
        # The note is last: what reads it finds its library.
        note.replace(folder / f"{stem}.sha256")
    return library


def _compile(sources: list[Path], work: Path, on_progress: OnProgress | None) -> list[Path]:
    """Return every source in a process of its own, as many at once as there are cores."""

    def one(source: Path) -> Path:
        built = work / f"{source.stem}.o"
        _run([*OPTIONS, "-c", str(source), "-o", str(built)])
        return built

    report = on_progress or (lambda _done, _total: None)
    report(0, len(sources))
    with ThreadPoolExecutor(max(1, int(Machine().cores()))) as threads:
        # The longest take longest, and so begin first.
        by_size = sorted(sources, key=lambda source: -source.stat().st_size)
        try:
            pending = [threads.submit(one, source) for source in by_size]
        except RuntimeError as error:
            raise LibraryBuildError(f"no compiler can be started: {error}") from error
        try:
            for done, future in enumerate(as_completed(pending), 1):
                future.result()
                report(done, len(sources))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in pending]


def _run(arguments: Sequence[str]) -> None:
    command = compiler_command()
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
