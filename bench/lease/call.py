"""One part on the machine that has the GPU: set up, run, archive, sum up."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lease.plan import LIMIT, RESERVE, ROOT, Setting, stages_of
from bench.lease.running import Machine, Outcome, log_name, run_stages

WHEELS, KERNELS = "wheels", "kernels"
"""Folders of what is prepared: packages, and compiled kernels with their notes."""
_LOG_BYTES = 128 << 10
"""The end of a log that is kept: sixty logs stay far below what one file may have."""


class LeaseError(Exception):
    """A folder or an archive that can't be used or made: one line."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call: a ``part`` in ``seconds``, its archive in ``out``."""

    part: int
    on: str
    out: Path
    prepared: Path
    seconds: float = LIMIT
    scratch: Path

    def run(self, began: float, machine: Machine | None = None) -> int:
        """Run the part that ``began`` at that time of the clock; 0 if every step went well."""
        site, cache = self.scratch / "site", self.scratch / "cache"
        work = self.scratch / f"part-{self.part}"
        results, logs, archive = work / "results", work / "logs", f"part-{self.part}.tar.gz"
        shutil.rmtree(work, ignore_errors=True)
        for folder in (self.out, results, logs):
            folder.mkdir(parents=True, exist_ok=True)
        if not self.prepared.exists():
            print(f"{self.prepared} is not there: only what is installed here can be used")
        install = set_up(self.prepared, site, cache)
        setting = Setting(self.on, sys.executable, results, install)
        stages = stages_of(self.part, setting)

        def save(outcomes: Sequence[Outcome]) -> None:
            (work / "summary.md").write_text(summary(self.part, outcomes))
            pack(work, self.out / archive)

        print(f"part {self.part}: {', '.join(stage.name for stage in stages)}", flush=True)
        outcomes = run_stages(
            stages,
            machine or Machine(_environment(site, cache)),
            end=began + self.seconds - RESERVE,
            cores=len(os.sched_getaffinity(0)),
            logs=logs,
            save=save,
        )
        for outcome in outcomes:
            if outcome.verdict == "failed":
                print(f"\n== {outcome.stage}: {outcome.step.name}: failed")
                text = (logs / log_name(outcome.stage, outcome.step)).read_text(errors="replace")
                print("\n".join(text.splitlines()[-25:]))
        for result in sorted(results.glob("*.json")):
            print(f"\n{result.stem}\n\n{json.loads(result.read_text())['table']}")
        save(outcomes)
        print(f"\n{summary(self.part, outcomes)}\nin {self.out / archive}", flush=True)
        return 0 if all(outcome.verdict == "ok" for outcome in outcomes) else 1


def scratch_folder() -> Path:
    """Return this user's folder for what parts share, closed to others."""
    folder = Path(tempfile.gettempdir()) / f"trioserve-lease-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LeaseError(f"{folder} is open to others: remove it")
    return folder


def summary(part: int, outcomes: Sequence[Outcome]) -> str:
    """Return a line for each step that has ended."""
    lines = [f"# Part {part}", "", "| stage | step | verdict | seconds |", "|---|---|---|---|"]
    for one in outcomes:
        lines.append(f"| {one.stage} | {one.step.name} | {one.verdict} | {one.seconds:.0f} |")
    return "\n".join(lines) + "\n"


def pack(work: Path, archive: Path) -> None:
    """Put summary, tables and ends of logs into ``archive``, which is there whole or as it was."""
    part = archive.with_name(f"{archive.name}.part")
    kept = [path for names in ("*.md", "results/*.json", "logs/*.log") for path in work.glob(names)]
    with tarfile.open(part, "w:gz", compresslevel=3) as tar:
        for path in sorted(kept):
            data = path.read_bytes()  # read once: a log may grow meanwhile
            data = data[-_LOG_BYTES:] if path.suffix == ".log" else data
            entry = tarfile.TarInfo(str(path.relative_to(work)))
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    part.replace(archive)


def set_up(prepared: Path, site: Path, cache: Path) -> Sequence[str]:
    """Copy the carried kernels, and return the command that installs the carried packages.

    It is empty where nothing was carried, or where an earlier part installed the same.
    """
    kernels = cache / "trioserve" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (prepared / KERNELS).glob("*"):
        shutil.copyfile(path, kernels / path.name)
    wheels = sorted(str(path) for path in (prepared / WHEELS).glob("*.whl"))
    note = site / f"installed-{hashlib.sha256(' '.join(wheels).encode()).hexdigest()[:12]}"
    if not wheels or note.exists():
        return ()
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--target", str(site), *wheels]
    # The note is last: half an installation is none.
    return ("sh", "-c", 'note=$0; "$@" && touch "$note"', str(note), *pip)


def _environment(site: Path, cache: Path) -> dict[str, str]:
    """Return the variables that children see beside the caller's.

    Where no kernels were carried, those that this user built before are used.
    """
    carried = any((cache / "trioserve" / "kernels").iterdir())
    caches = {"XDG_CACHE_HOME": str(cache), "FLASHINFER_WORKSPACE_BASE": str(cache)}
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(caches if carried else {}),
        "HF_HUB_OFFLINE": "1",
    }
