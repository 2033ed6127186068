"""Built kernels on disk, so that each is compiled once on a machine.

A cubin's name holds a digest of all that went into it: the kernel's text, its headers, the
options and macros, the compiler and the target. So a file is never out of date and never
overwritten by another; a file that is damaged is built again. Files appear whole, by renaming, and
any number of processes may share a folder. What others could have put there isn't used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import attrs

from gpu._util.private_files import check_private, make_private_folder
from gpu.kernels import KernelSource, nvrtc
from gpu.kernels.nvrtc import Build, KernelBuildError, KernelUsage
from trioserve.protocol.machine import Machine, cache_folder

_log = logging.getLogger(__name__)


def default_folder() -> Path:
    """``$XDG_CACHE_HOME/trioserve/kernels``, by default under ``~/.cache``."""
    return cache_folder("kernels")


def default_jobs() -> int:
    """Kernels to compile at once: the cores that this process may use."""
    return max(1, int(Machine().cores()))


class CubinCache:
    """The built kernels in ``folder``, which is made when the first one is stored."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = default_folder() if folder is None else folder

    def get(self, source: KernelSource, target: str) -> Build:
        """``source`` built for ``target``: read from the folder, or compiled and stored there.

        A folder that can't be written is no failure. Threads may call this at once.

        Raises:
            KernelBuildError: it doesn't compile, or there is no compiler.
        """
        unit = nvrtc.unit(source, target)
        stem = _stem(unit)
        build = self._read(stem)
        if build is None:
            build = nvrtc.build(unit)
            try:
                self._write(stem, unit, build)
            except OSError as error:
                _log.warning("the kernel cache %s can't be written: %s", self.folder, error)
        return build

    def files(self, source: KernelSource, target: str) -> tuple[Path, Path]:
        """Return where ``source`` is once it is built: the cubin and its note.

        Raises:
            KernelBuildError: there is no compiler.
        """
        stem = _stem(nvrtc.unit(source, target))
        return self.folder / f"{stem}.cubin", self.folder / f"{stem}.json"

    def statistics(self) -> tuple[int, int]:
        """Return how many built kernels there are, and their bytes."""
        sizes = [path.stat().st_size for path in self.folder.glob("*.cubin")]
        return len(sizes), sum(sizes)

    def _read(self, stem: str) -> Build | None:
        try:
            check_private(self.folder / f"{stem}.cubin")
            check_private(self.folder / f"{stem}.json")
            note = json.loads((self.folder / f"{stem}.json").read_bytes())
            cubin = (self.folder / f"{stem}.cubin").read_bytes()
            if hashlib.sha256(cubin).hexdigest() == note["sha256"]:
                return Build(cubin=cubin, usage=KernelUsage(**note["usage"]))
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never built here, damaged, or such that others could have put it there
        return None

    def _write(self, stem: str, unit: nvrtc.Unit, build: Build) -> None:
        note = {
            "kernel": unit.source.title,
            "target": unit.target,
            "compiler": unit.compiler,
            "sha256": hashlib.sha256(build.cubin).hexdigest(),
            "usage": attrs.asdict(build.usage),
        }
        make_private_folder(self.folder)
        # The note is last: what reads it finds its cubin.
        _write_whole(self.folder / f"{stem}.cubin", build.cubin)
        _write_whole(self.folder / f"{stem}.json", json.dumps(note, indent=1).encode())


def _stem(unit: nvrtc.Unit) -> str:
    return f"{unit.source.name}-{unit.target}-{unit.digest[:24]}"


@attrs.frozen
class Outcome:
    """The result for one kernel of :func:`build_all`."""

    source: KernelSource
    target: str
    result: Build | KernelBuildError


def build_all(
    cache: CubinCache,
    wanted: Iterable[tuple[KernelSource, str]],
    jobs: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[Outcome]:
    """Build every source for its target in ``jobs`` threads; the order is that of ``wanted``.

    The compiler doesn't hold Python's lock, so threads are enough. ``progress`` is called in this
    thread, with how many are done and how many there are.
    """

    def one(source: KernelSource, target: str) -> Outcome:
        try:
            return Outcome(source, target, cache.get(source, target))
        except KernelBuildError as error:
            return Outcome(source, target, error)

    with ThreadPoolExecutor(jobs) as threads:
        pending = [threads.submit(one, source, target) for source, target in wanted]
        for done, _ in enumerate(as_completed(pending), 1):
            if progress is not None:
                progress(done, len(pending))
    return [future.result() for future in pending]


def _write_whole(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
