"""Results of a run on a GPU: card and versions, a table for people, JSON for machines."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import torch

from bench.kernels.roofline import Ceilings
from bench.report import RESULTS, commit

_PACKAGES = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "flashinfer-python")
_SMI_FIELDS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Add the options that all scripts for a GPU have."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--on", choices=["gpu", "emulation"], default="gpu")
    bound = "nothing new starts after so many"
    parser.add_argument("--seconds", type=float, default=seconds, help=bound)


def describe_device() -> dict[str, Any]:
    """Return the card, its driver, CUDA, versions, and this tree's revision."""
    installed = {each.name: each.version for each in importlib.metadata.distributions()}
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "packages": {name: installed[name] for name in _PACKAGES if name in installed},
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
    }
    if not torch.cuda.is_available():
        return {**facts, "device": "none: the kernels ran in the emulation, and nothing was timed"}
    properties = torch.cuda.get_device_properties(0)
    return {
        **facts,
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cache_bytes": properties.L2_cache_size,
        "nvidia_smi": _nvidia_smi(),
    }


def _nvidia_smi() -> dict[str, str]:
    """Return the driver's version and the card's state as it is found; nothing is changed."""
    command = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": str(error)}
    first = output.stdout.partition("\n")[0].split(",")
    return dict(zip(_SMI_FIELDS.split(","), (value.strip() for value in first), strict=False))


def describe_ceilings(ceilings: Ceilings) -> str:
    """Return a line for the head of a table."""
    return (
        f"copy {ceilings.copy / 1e12:.2f} TB/s (read plus written), "
        f"matrix product {ceilings.matrix / 1e12:.0f} TFLOP/s (bf16, random numbers)"
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with columns that line up in a terminal, too."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    padded = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    first, *rest = (f"| {line} |" for line in padded)
    return "\n".join([first, rule, *rest])


@attrs.frozen(kw_only=True)
class ResultFile:
    """A result that grows: each :meth:`save` replaces what was written before."""

    path: Path
    device: Mapping[str, Any]
    began: datetime

    @classmethod
    def start(cls, folder: Path, name: str) -> ResultFile:
        """Name ``name-<time>.json`` in ``folder``, which is made; nothing is written yet."""
        now = datetime.now(UTC)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.json"
        return cls(path=path, device=describe_device(), began=now)

    def save(self, *, ceilings: Ceilings | None, table: str, details: Mapping[str, Any]) -> None:
        """Write the JSON, and a Markdown page with ``table`` beside it; each is there whole."""
        rates = attrs.asdict(ceilings) if ceilings else None
        time = self.began.isoformat(timespec="seconds")
        result = {"time": time, **self.device, "ceilings": rates, "table": table, **details}
        _replace(self.path, json.dumps(result, indent=2))
        about = f"{self.device['device']}, {self.began:%Y-%m-%d}, revision {self.device['commit']}."
        lines = [f"# {self.path.stem[:-16]}", "", about]
        if ceilings:
            lines += ["", f"Measured in the same run: {describe_ceilings(ceilings)}."]
        facts = [f"- {key}: {value}" for key, value in self.device.items()]
        _replace(self.path.with_suffix(".md"), "\n".join([*lines, "", table, "", *facts]))


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text + "\n")
    part.replace(path)
