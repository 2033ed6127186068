"""Results of a run on a GPU: the card, its rates and all versions beside the table."""

from __future__ import annotations

import argparse
import gc
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import attrs
import torch

from bench.kernels.roofline import Ceilings
from bench.report import RESULTS, commit, own_versions, parser_of, save, table_of

Row = dict[str, Any]
"""A row of a table by column, with further facts in mappings."""
_SMI_FIELDS = "name,driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"


def gpu_options(
    about: str | None, arguments: Sequence[str] | None, seconds: float, **more: Any
) -> argparse.Namespace:
    """Parse ``more`` options and those of all scripts for a GPU; exit where there is none.

    ``deadline`` is when nothing new starts, by default after so many ``seconds``.
    """
    parser = parser_of(about, **more, on="gpu", out=RESULTS, seconds=seconds)
    options = parser.parse_args(arguments)
    options.deadline = time.monotonic() + options.seconds
    if options.on == "gpu" and not torch.cuda.is_available():
        parser.exit(1, "no GPU was found; --on emulation runs the same code without one\n")
    return options


def run_jobs(
    options: argparse.Namespace,
    kind: str,
    jobs: Mapping[str, Callable[[], Sequence[Row]]],
    ceilings: Ceilings | None = None,
) -> tuple[list[Row], bool]:
    """Run ``jobs`` by name until the deadline; return their rows, and whether all were run.

    After each job the table of all so far is written to ``kind-<time>.json`` with its facts.
    """
    kind = kind if options.on == "gpu" else f"{kind}-emulated"
    name = f"{kind}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    facts = {"ceilings": attrs.asdict(ceilings) if ceilings else None, **describe_device()}
    rows: list[Row] = []
    left_out = []
    for title, job in jobs.items():
        began = time.monotonic()
        if began > options.deadline:
            left_out.append(title)
            continue
        rows += job()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        path = save(options.out, name, table_of(rows), rows=rows, **facts)
        print(f"{title} [{time.monotonic() - began:.1f} s] in {path}", flush=True)
    print(f"\n{table_of(rows)}\n\nout of time, not run: {', '.join(left_out) or 'none'}")
    return rows, not left_out


def describe_device() -> dict[str, Any]:
    """Return the card and its state as it is found, versions, and this tree's revision."""
    packages = ("cupy-cuda13x", "cupy-cuda12x", "nvidia-cuda-nvrtc", "flashinfer-python")
    facts: dict[str, Any] = {"commit": commit(), "versions": own_versions(*packages)}
    if not torch.cuda.is_available():
        return {**facts, "device": "none: the kernels ran in the emulation, and nothing was timed"}
    properties = torch.cuda.get_device_properties(0)
    command = ["nvidia-smi", f"--query-gpu={_SMI_FIELDS}", "--format=csv"]
    state = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    facts |= {"cuda": torch.version.cuda, "nvidia_smi": state.stdout.splitlines()}
    return {**facts, "device": properties.name, "properties": str(properties)}
