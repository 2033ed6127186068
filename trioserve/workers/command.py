"""The command that starts a worker process, and its environment."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

BOUNDED_CACHES = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""Sizes of torch's and oneDNN's caches. By default each keeps 1,024 compiled products, one per
shape, and prompts of all lengths make that most of a gigabyte.
"""
SHORT_SPINS = {"GOMP_SPINCOUNT": "3000"}
"""Iterations, some 50 to 150 µs, for which an OpenMP thread of torch spins before it sleeps.
libgomp's default is a hundred times as long. Beside other work on the same cores, a thread may have
to wait for a core that another one spins on, which would delay each operation by a turn of the
system's scheduler.
"""

PACKAGES_FOLDER = Path(__file__).resolve().parents[2]
"""Folder that holds this package and the worker's."""


def worker_command(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a worker that dials ``url``.

    ``-P`` keeps the current folder off the import path, so that a user's own ``gpu.py`` isn't
    imported.
    """
    environment = {**BOUNDED_CACHES, **package_environment()}
    if "OMP_WAIT_POLICY" not in environment:
        environment = {**SHORT_SPINS, **environment}
    return [sys.executable, "-P", "-m", "gpu", "--connect", url], environment


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
