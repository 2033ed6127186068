"""Fills the folder that is carried to the rented machine: wheels and compiled kernels."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bench.kernels.planted import NAMES, planted_source
from bench.lease.call import KERNELS, WHEELS, LeaseError
from bench.lease.plan import ROOT
from gpu.kernels.catalogue import sources
from gpu.kernels.cubins import CubinCache, build_all, default_jobs
from gpu.kernels.nvrtc import Build

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
CARRIED_BYTES = 64 << 20
"""Bytes that travel with one command: this tree and the prepared folder together."""
_GLIBC = ("2_39", "2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")


def prepare(folder: Path, *, python: str, target: str) -> None:
    """Fill ``folder`` anew for a machine with ``python`` and a GPU of ``target``.

    Raises :class:`LeaseError` if pip or a kernel fails, or the folder is too large to be carried.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for name in (WHEELS, KERNELS):
        (folder / name).mkdir(parents=True)
    print(f"downloading wheels for Python {python}")
    download(python, folder / WHEELS)
    print(f"compiling the kernels for {target}, unless they are in the cache")
    compile_kernels(target, folder / KERNELS)
    carried, tree = (size / 2**20 for size in (folder_bytes(folder), tree_bytes()))
    print(f"{folder}: {carried:.1f} MiB; the tree: {tree:.1f} MiB")
    if carried + tree > CARRIED_BYTES / 2**20:
        raise LeaseError(
            f"{carried + tree:.1f} MiB would be carried, "
            f"and {CARRIED_BYTES / 2**20:.0f} MiB is the limit"
        )


def download(python: str, folder: Path) -> None:
    """Put all wheels for another machine's ``python`` into ``folder``."""
    platforms = [f"manylinux_{version}_x86_64" for version in _GLIBC]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", python]
    for platform in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    command += ["--dest", str(folder), "--requirement", str(REQUIREMENTS)]
    if subprocess.run(command, check=False).returncode:
        raise LeaseError("pip could not download the wheels")


def compile_kernels(target: str, folder: Path) -> None:
    """Put every kernel and planted fault, compiled for ``target``, into ``folder``."""
    cache, kernels = CubinCache(), [*sources(), *map(planted_source, NAMES)]
    for each in build_all(cache, [(source, target) for source in kernels], default_jobs()):
        if not isinstance(each.result, Build):
            raise LeaseError(str(each.result))
        for path in cache.files(each.source, target):
            shutil.copyfile(path, folder / path.name)


def folder_bytes(folder: Path) -> int:
    """Return the bytes of the files in ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def tree_bytes() -> int:
    """Return the bytes of this repository's files that travel: tracked, or not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return sum(path.stat().st_size for path in paths if path.is_file())
