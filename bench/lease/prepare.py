"""Fills the folder that is carried to the rented machine: wheels, cubins and a manifest."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.kernels.planted import NAMES, planted_source
from bench.lease.manifest import CUBINS, WHEELS, Manifest, PreparedError, file_digest
from bench.lease.plan import ROOT
from bench.report import commit
from gpu.kernels import KernelSource, nvrtc
from gpu.kernels.catalogue import sources
from gpu.kernels.cubins import CubinCache, build_all, default_jobs
from gpu.kernels.nvrtc import Build

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CARRIED_BYTES = 64 << 20
"""Bytes that travel with one command: this tree and the prepared folder together."""
_GLIBC = ("2_39", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")


def packages_in(requirements: str) -> list[str]:
    """Return the ``name==version`` lines."""
    lines = (line.strip() for line in requirements.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def pip_command(python: str, folder: Path) -> list[str]:
    """Return the command that puts all wheels for another machine's ``python`` into ``folder``."""
    platforms = [f"manylinux_{version}_x86_64" for version in _GLIBC]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python]
    for platform in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    return [*command, "--dest", str(folder), "--requirement", str(REQUIREMENTS)]


def prepare(
    folder: Path,
    *,
    python: str,
    target: str,
    run: Callable[[Sequence[str]], None] | None = None,
    kernels: Sequence[KernelSource] | None = None,
    show: Callable[[str], None] = print,
) -> Manifest:
    """Fill ``folder`` anew for a machine with ``python`` and a GPU of ``target``.

    ``run`` runs pip; ``kernels`` are those of the whole catalogue. Raises :class:`PreparedError`
    if pip or a kernel fails, or the folder is too large to be carried.
    """
    wheels = folder / WHEELS
    shutil.rmtree(folder, ignore_errors=True)
    wheels.mkdir(parents=True)
    show(f"downloading wheels for Python {python}")
    (run or _run)(pip_command(python, wheels))
    if kernels is None:
        kernels = [*sources(), *(planted_source(name) for name in NAMES)]
    show(f"compiling {len(kernels)} kernels for {target}, unless they are in the cache")
    _pack_cubins(kernels, target, folder / CUBINS)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = Manifest(
        python=python,
        target=target,
        compiler=nvrtc.compiler(),
        commit=commit(),
        packages=packages_in(REQUIREMENTS.read_text()),
        files={str(path.relative_to(folder)): file_digest(path) for path in files},
    )
    manifest.write(folder)
    carried, tree = sum(path.stat().st_size for path in files), tree_bytes()
    show(f"{folder}: {carried / 2**20:.1f} MiB; the tree: {tree / 2**20:.1f} MiB")
    if carried + tree > CARRIED_BYTES:
        raise PreparedError(
            f"{(carried + tree) / 2**20:.1f} MiB would be carried, "
            f"and {CARRIED_BYTES / 2**20:.0f} MiB is the limit"
        )
    return manifest


def tree_bytes() -> int:
    """Return the bytes of this repository's files that travel: tracked, or not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())


def _pack_cubins(kernels: Sequence[KernelSource], target: str, archive: Path) -> None:
    cache = CubinCache()
    outcomes = build_all(cache, [(source, target) for source in kernels], default_jobs())
    failed = [str(each.result) for each in outcomes if not isinstance(each.result, Build)]
    if failed:
        raise PreparedError("\n".join(failed))
    with tarfile.open(archive, "w:gz") as tar:
        for each in outcomes:
            for path in cache.files(each.source, each.target):
                entry = tarfile.TarInfo(path.name)
                data = path.read_bytes()
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PreparedError(f"pip: {last[0]}")
