"""The peers' environments, each in a folder under ``bench/.peers``, made once and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

KEPT = Path(__file__).resolve().parents[1] / ".peers"
"""Peers, and files that only they need."""
_ASK_VERSIONS = """
import importlib.metadata, json, sys
print(json.dumps({"python": sys.version.split()[0],
                  **{name: importlib.metadata.version(name) for name in sys.argv[1:]}}))
"""


def python_environment(name: str, without: Sequence[str] = ()) -> Path:
    """Return the Python of an environment with ``requirements-<name>.txt``, made if need be.

    ``without`` are packages that are removed again, because they don't fit or aren't needed.
    """
    requirements = Path(__file__).resolve().parent / f"requirements-{name}.txt"
    folder = KEPT / name
    python = folder / "bin" / "python"
    wanted = f"{sys.version}\n{requirements.read_text()}{' '.join(without)}"
    if _noted(folder) != wanted:
        print(f"installing {requirements.name}: some minutes where torch is among it", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip"]
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *quiet, "--requirement", str(requirements)], check=True)
        if without:
            subprocess.run([*pip, "uninstall", *quiet, "--yes", *without], check=True)
        (folder / "installed.txt").write_text(wanted)
    return python


def installed_versions(python: Path, *packages: str) -> dict[str, str]:
    """Return the versions of Python and of ``packages`` in an environment."""
    command = [str(python), "-c", _ASK_VERSIONS, *packages]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(answer.stdout))


def built_from_sdist(
    name: str, sdist: str, source: str, options: Sequence[str], target: str
) -> Path:
    """Return the folder of ``target``, built with CMake from ``source`` inside of an ``sdist``.

    The build takes half an hour on two cores; it is niced, and goes on where it was interrupted,
    since unpacked files have the times that they have in the archive.
    """
    folder = KEPT / name
    build = folder / "build"
    wanted = f"{sdist}\n{' '.join(options)}"
    if _noted(folder) != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        package, _, version = sdist.partition("==")
        root = folder / f"{package.replace('-', '_')}-{version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        only = ["--no-deps", "--no-binary", package, "--dest", str(folder), sdist]
        subprocess.run([*pip, *only], check=True)
        with tarfile.open(f"{root}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
        print(f"building {sdist}: half an hour on two cores", flush=True)
        configure = ["cmake", "-S", str(root / source), "-B", str(build), *options]
        subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
        make = ["nice", "-n", "10", "cmake", "--build", str(build), "--target", target]
        jobs = str(len(os.sched_getaffinity(0)))
        subprocess.run([*make, "--parallel", jobs], check=True)
        (folder / "installed.txt").write_text(wanted)
    return build / "bin"


def _noted(folder: Path) -> str | None:
    note = folder / "installed.txt"
    return note.read_text() if note.exists() else None
