"""Puts compiled kernels into a wheel, if asked for; otherwise the wheel is pure Python.

hatchling runs this file by its path, where the project's dependencies need not be installed. So it
imports nothing of the project, and `nox -s wheel` compiles the kernels before.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "TRIOSERVE_WHEEL_KERNELS"
"""Names the folder of :mod:`gpu.cpu.wheel_kernels`; its own name is the architecture."""


class KernelsHook(BuildHookInterface[Any]):
    """Adds the folder's files, and the platform to the wheel's name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Do so, unless the variable is unset or the wheel is an editable one."""
        given = os.environ.get(VARIABLE)
        if not given or version == "editable":
            return
        folder = Path(given).resolve()
        files = {path: f"gpu/cpu/built/{path.name}" for path in folder.iterdir()}
        if not files:
            raise ValueError(f"{VARIABLE}: {folder} is empty")
        build_data["force_include"].update({str(path): name for path, name in files.items()})
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{folder.name}"
