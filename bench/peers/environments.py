"""Where the peers live: an environment for each under ``bench/.peers``, made once and kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from bench.servers import MODEL

__all__ = ["KEPT", "built_from_sdist", "installed_versions", "model_folder", "python_environment"]

KEPT = Path(__file__).resolve().parents[1] / ".peers"
"""Peers, and files that only they need."""

_HERE = Path(__file__).resolve().parent
_ASK_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({"python": sys.version.split()[0],
                  **{name: importlib.metadata.version(name) for name in sys.argv[1:]}}))
"""


def python_environment(name: str, without: Sequence[str] = ()) -> Path:
    """The python of a virtual environment with ``requirements-<name>.txt``, made if need be.

    ``without`` are packages that are removed again, because they don't fit or aren't needed.

    Raises:
        subprocess.CalledProcessError: installing fails.
    """
    requirements = _HERE / f"requirements-{name}.txt"
    folder = KEPT / name
    python = folder / "bin" / "python"
    wanted = f"{sys.version}\n{requirements.read_text()}{' '.join(without)}"
    if _noted(folder) != wanted:
        print(f"installing {requirements.name}, torch included: some minutes", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip"]
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *quiet, "--requirement", str(requirements)], check=True)
        if without:
            subprocess.run([*pip, "uninstall", *quiet, "--yes", *without], check=True)
        _note(folder, wanted)
    return python


def model_folder() -> Path:
    """The default model as a Hugging Face folder in bfloat16, written if need be.

    Raises:
        subprocess.CalledProcessError: it can't be read or written.
    """
    folder = KEPT / f"{MODEL}-bfloat16"
    if not folder.exists():
        command = [sys.executable, "-m", "bench.hf_folder", MODEL, str(folder)]
        subprocess.run(command, check=True, cwd=_HERE.parents[1])
    return folder


def installed_versions(python: Path, *packages: str) -> dict[str, str]:
    """The versions of Python and of ``packages`` in an environment."""
    answer = subprocess.run(
        [str(python), "-c", _ASK_VERSIONS, *packages], check=True, capture_output=True, text=True
    )
    return dict(json.loads(answer.stdout))


def built_from_sdist(
    name: str, sdist: str, source: str, options: Sequence[str], target: str
) -> Path:
    """The folder of ``target``, built with CMake from ``source`` inside of an ``sdist``.

    The build takes half an hour on two cores; it is niced, and goes on where it was interrupted.

    Args:
        name: the folder to build in, under :data:`KEPT`.
        sdist: the package and its version, as in ``name==1.0``.
        source: the folder with CMake's files inside of the unpacked archive.
        options: for CMake.
        target: what is built; it is expected in ``bin``.

    Raises:
        subprocess.CalledProcessError: there is no CMake, or no compiler, or the build fails.
    """
    folder = KEPT / name
    built = folder / "build" / "bin"
    wanted = f"{sdist}\n{' '.join(options)}"
    if _noted(folder) == wanted:
        return built
    unpacked = _unpacked(folder, sdist)
    print(f"building {sdist}: half an hour on two cores", flush=True)
    configure = ["cmake", "-S", str(unpacked / source), "-B", str(folder / "build"), *options]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    build = ["cmake", "--build", str(folder / "build"), "--target", target]
    jobs = str(len(os.sched_getaffinity(0)))
    subprocess.run(["nice", "-n", "10", *build, "--parallel", jobs], check=True)
    _note(folder, wanted)
    return built


def _unpacked(folder: Path, sdist: str) -> Path:
    package, _, version = sdist.partition("==")
    unpacked = folder / f"{package.replace('-', '_')}-{version}"
    if unpacked.exists():
        return unpacked
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    only = ["--no-deps", "--no-binary", package, "--dest", str(folder), sdist]
    subprocess.run([*pip, *only], check=True)
    part = folder / "part"
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(folder / f"{unpacked.name}.tar.gz") as archive:
        archive.extractall(part, filter="data")
    (part / unpacked.name).rename(unpacked)
    part.rmdir()
    return unpacked


def _noted(folder: Path) -> str | None:
    note = folder / "installed.txt"
    return note.read_text() if note.exists() else None


def _note(folder: Path, wanted: str) -> None:
    (folder / "installed.txt").write_text(wanted)
