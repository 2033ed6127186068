"""The command that starts a worker process, and its environment."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

BOUNDED_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""Sizes of torch's and oneDNN's caches of compiled matrix products. The default of 1,024, one per
shape, takes most of a gigabyte with prompts of all lengths.
"""
SHORT_SPINS = {"GOMP_SPINCOUNT": "3000"}
"""Iterations for which an OpenMP thread of torch spins before it sleeps: 50 to 150 µs. libgomp's
default is a hundred times as long. If other programs use the same cores, a thread may wait for a
core on which another one spins, and each operation is delayed by a time slice.
"""

PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
"""Folder that holds this package and the worker's."""


def worker_command(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a worker that dials ``url``."""
    return _command("--connect", url)


def node_command() -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of the process of a node.

    It gets a :class:`~trioserve.protocol.node_setup.NodeSetup` on standard input, which other users
    can't read, as they can a command line.
    """
    return _command("--node")


def _command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a process of ``gpu``.

    ``-P`` keeps the current folder off the import path, so that a user's own ``gpu.py`` isn't
    imported.
    """
    environment = {**BOUNDED_CACHES, **package_environment()}
    if "OMP_WAIT_POLICY" not in environment:
        environment = {**SHORT_SPINS, **environment}
    return [sys.executable, "-P", "-m", "gpu", *arguments], environment


def package_environment() -> dict[str, str]:
    """Return the environment of an interpreter that imports the same packages as this one.

    A source checkout isn't on the path of a new interpreter, so its folder is added.
    """
    environment = dict(os.environ)
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if PACKAGES_FOLDER not in installed:
        inherited = environment.get("PYTHONPATH")
        paths = [str(PACKAGES_FOLDER), *([inherited] if inherited else [])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment
