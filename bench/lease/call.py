"""One part on the machine that has the GPU: set up, run, archive, sum up."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lease.archive import pack
from bench.lease.manifest import CUBINS, MANIFEST, WHEELS, Manifest, PreparedError
from bench.lease.plan import LIMIT, RESERVE, ROOT, Setting, stages_of
from bench.lease.running import Machine, Outcome, World, log_name, run_stages


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call: a ``part`` in ``seconds``, its archive in ``out``."""

    part: int
    on: str
    out: Path
    prepared: Path
    seconds: float = LIMIT
    scratch: Path


def scratch_folder() -> Path:
    """Return this user's folder for what parts share, closed to others."""
    folder = Path(tempfile.gettempdir()) / f"trioserve-lease-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PreparedError(f"{folder} is open to others: remove it")
    return folder


def run_part(call: Call, began: float, world: World | None = None) -> int:
    """Run one part that ``began`` at that time of the world's clock; 0 if every step went well.

    Raises :class:`PreparedError` if the prepared folder is damaged, or is for another Python.
    """
    site, cache, work = _folders(call)
    install = _set_up(call, site, cache)
    prepared = (call.prepared / MANIFEST).exists()
    world = world or Machine(_environment(site, cache if prepared else None))
    setting = Setting(on=call.on, python=sys.executable, results=work / "results", install=install)
    archive = call.out / f"part-{call.part}.tar.gz"
    stages = stages_of(call.part, setting)

    def save(outcomes: Sequence[Outcome]) -> None:
        (work / "summary.md").write_text(summary(call.part, outcomes))
        pack(work, archive)

    print(f"part {call.part}: {', '.join(stage.name for stage in stages)}", flush=True)
    outcomes = run_stages(
        stages,
        world,
        end=began + call.seconds - RESERVE,
        cores=len(os.sched_getaffinity(0)),
        logs=work / "logs",
        save=save,
    )
    for outcome in outcomes:
        if outcome.verdict == "failed":
            _show_log(work / "logs", outcome)
    for table in sorted((work / "results").glob("*.md")):
        print(f"\n{table.read_text()}")
    save(outcomes)
    print(f"\n{summary(call.part, outcomes)}\nin {archive}", flush=True)
    return 0 if all(outcome.verdict == "ok" for outcome in outcomes) else 1


def summary(part: int, outcomes: Sequence[Outcome]) -> str:
    """Return a line for each step that has ended."""
    lines = [f"# Part {part}", "", "| stage | step | verdict | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        cells = (outcome.stage, outcome.step.name, outcome.verdict, f"{outcome.seconds:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _folders(call: Call) -> tuple[Path, Path, Path]:
    """Return where packages, built kernels and this part's files go; the last is emptied."""
    site, cache = call.scratch / "site", call.scratch / "cache"
    work = call.scratch / f"part-{call.part}"
    shutil.rmtree(work, ignore_errors=True)
    for folder in (call.out, cache, work / "results", work / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    return site, cache, work


def _set_up(call: Call, site: Path, cache: Path) -> tuple[str, ...]:
    """Unpack the carried kernels, and return the command that installs the carried packages.

    It is empty where nothing was carried, or where an earlier part installed the same.
    """
    if not (call.prepared / MANIFEST).exists():
        print(f"{call.prepared} is not there: only what is installed here can be used", flush=True)
        return ()
    manifest = Manifest.read(call.prepared)
    here = ".".join(platform.python_version_tuple()[:2])
    if manifest.python != here:
        raise PreparedError(
            f"{call.prepared} is for Python {manifest.python}, this one is {here}: "
            f"prepare again with --python {here}"
        )
    if (compiler := _compiler()) != manifest.compiler:
        print(
            f"kernels are from {manifest.compiler}; here is {compiler}, which compiles them again"
        )
    kernels = cache / "trioserve" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tarfile.open(call.prepared / CUBINS) as tar:
        tar.extractall(kernels, filter="data")
    wheels = sorted(str(path) for path in (call.prepared / WHEELS).glob("*.whl"))
    return _install(site, wheels, manifest.digest)


def _compiler() -> str:
    """Return this machine's NVRTC as the kernels' cache calls it, if it is a package."""
    try:
        return f"NVRTC {importlib.metadata.version('nvidia-cuda-nvrtc')}"
    except importlib.metadata.PackageNotFoundError:
        return "another one"


def _install(site: Path, wheels: Sequence[str], digest: str) -> tuple[str, ...]:
    note = site / f"installed-{digest}"
    if not wheels or note.exists():
        return ()
    shutil.rmtree(site, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    pip += ["--no-compile", "--no-cache-dir", "--target", str(site), *wheels]
    # The note is last: half an installation is none.
    script = 'note=$0; "$@" && touch "$note"'
    return ("sh", "-c", script, str(note), *pip)


def _environment(site: Path, cache: Path | None) -> dict[str, str]:
    """Return the variables that children see beside the caller's.

    Without a ``cache``, kernels that this user built before are used.
    """
    caches = {"XDG_CACHE_HOME": str(cache), "FLASHINFER_WORKSPACE_BASE": str(cache)}
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        **(caches if cache else {}),
        "HF_HUB_OFFLINE": "1",
    }


def _show_log(logs: Path, outcome: Outcome) -> None:
    log = logs / log_name(outcome.stage, outcome.step)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    print(f"\n== {outcome.stage}: {outcome.step.name}: {outcome.verdict}")
    print("\n".join(lines[-25:]), flush=True)
