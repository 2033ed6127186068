"""``trioserve doctor``: report what this machine has, what is missing, and how to get it.

This module imports only what the command line needs, so it runs in a broken installation.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.model_files.locate import KNOWN_MODELS, locate
from trioserve.protocol.errors import ModelLoadError
from trioserve.protocol.machine import (
    COMPILER_ADVICE,
    CPU_ISA_VARIABLE,
    PIP_INSTALL,
    Machine,
    compiler_version,
    extra_advice,
)
from trioserve.protocol.shipped_kernels import shipped_library
from trioserve.protocol.version import __version__

if TYPE_CHECKING:
    from rich.table import Table

WORKER_TIMEOUT = 120.0
"""Seconds for the worker's report; importing torch takes most of them."""

_ROOT = Path(__file__).resolve().parents[2]
_STYLES = {"ok": "green", "optional": "yellow", "missing": "bold red"}


@attrs.frozen
class Fact:
    """One finding."""

    name: str
    value: str
    state: str = "ok"
    """``ok``, ``optional`` (absent and not always needed) or ``missing`` (needed)."""
    advice: str = ""
    """Instructions to get it, if the state isn't ``ok``."""


@attrs.frozen
class DoctorReport:
    """All findings by section."""

    sections: dict[str, list[Fact]]

    @property
    def healthy(self) -> bool:
        """True if nothing needed is missing."""
        return all(fact.state != "missing" for facts in self.sections.values() for fact in facts)


def examine() -> DoctorReport:
    """Examine the machine, partly in a short-lived worker process that imports torch."""
    looks: dict[str, Callable[[], Iterator[Fact]]] = {
        "Machine": lambda: machine_facts(Machine()),
        "Packages": lambda: package_facts(requirements()),
        "Worker": lambda: worker_facts([sys.executable, "-P", "-m", "gpu", "--doctor"]),
        "Models": model_facts,
    }
    return DoctorReport({title: list(look()) for title, look in looks.items()})


def as_json(report: DoctorReport) -> str:
    """Return the report as JSON: ``{"healthy": bool, "sections": {title: [fact, ...]}}``."""
    sections = {title: [attrs.asdict(f) for f in facts] for title, facts in report.sections.items()}
    return json.dumps({"healthy": report.healthy, "sections": sections}, indent=2)


def as_table(report: DoctorReport) -> Table:
    """Return the report as a table for people."""
    import rich.table
    from rich.markup import escape

    table = rich.table.Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, facts in report.sections.items():
        table.add_row(f"[underline]{title}[/]", "", "")
        for fact in facts:
            text = escape(fact.value) + (f"\n[dim]{escape(fact.advice)}[/]" if fact.advice else "")
            table.add_row(f"  {escape(fact.name)}", fact.state, text, style=_STYLES[fact.state])
    return table


def machine_facts(machine: Machine) -> Iterator[Fact]:
    """Yield this process's Python, system, cores, memory and compiler."""
    yield Fact("trioserve", __version__)
    yield Fact("Python", f"{platform.python_version()} at {sys.executable}")
    yield Fact("System", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Fact("Processor", machine.cpu_name())
    yield Fact("Cores", f"{machine.cores():g} usable of {os.cpu_count()}")
    yield Fact("Instructions", " ".join(machine.cpu_features()) or "none that matter")
    total, available = machine.memory()
    yield Fact("Memory", f"{available / 2**30:.1f} GiB available of {total / 2**30:.1f}")
    yield from _compiler_facts(machine)


def _compiler_facts(machine: Machine) -> Iterator[Fact]:
    """Yield the requirements of the CPU kernels: instruction sets and a compiler."""
    isa = os.environ.get(CPU_ISA_VARIABLE, "auto")
    obstacle = machine.obstacle_to_kernels(isa)
    compiler = compiler_version()
    if obstacle is not None and isa != "auto":
        advice = f"no model is served on the CPU with {CPU_ISA_VARIABLE}={isa}"
        yield Fact("CPU kernels", f"none: {obstacle}", "missing", advice)
    elif obstacle is not None:
        advice = "torch computes in their place, and needs no compiler"
        yield Fact("CPU kernels", f"none: {obstacle}", "optional", advice)
    shipped = shipped_library() is not None
    if obstacle is None and shipped:
        yield Fact("CPU kernels", f"{machine.kernel_isa(isa)}, compiled in this installation")
    elif obstacle is None and compiler is not None:
        yield Fact("CPU kernels", machine.kernel_isa(isa))
    if compiler is not None:
        yield Fact("C++ compiler", compiler)
    elif obstacle is None and shipped:
        yield Fact("C++ compiler", "none, and none is needed")
    elif obstacle is None:
        advice = f"{COMPILER_ADVICE}: without one, models are 2 to 4 times slower on this processor"
        yield Fact("C++ compiler", "none", "optional", advice)


def requirements() -> list[str]:
    """Return the dependencies that trioserve declares, without extras; none if undeclared."""
    try:
        stated = importlib.metadata.requires("trioserve") or []
    except importlib.metadata.PackageNotFoundError:
        project = _ROOT / "pyproject.toml"  # A source checkout that isn't installed.
        if not project.exists():
            return []
        stated = tomllib.loads(project.read_text())["project"]["dependencies"]
    return sorted((line for line in stated if "extra ==" not in line), key=str.lower)


def package_facts(stated: list[str]) -> Iterator[Fact]:
    """Yield the installed version of each requirement, and if it is sufficient."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        yield Fact("packaging", "not installed", "missing", f"{PIP_INSTALL} packaging")
        return
    for line in stated:
        requirement = Requirement(line)
        advice = f"{PIP_INSTALL} '{requirement.name}{requirement.specifier}'"
        version = _version(requirement.name)
        if version is None:
            yield Fact(requirement.name, "not installed", "missing", advice)
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{version}, but {requirement.specifier} is needed"
            yield Fact(requirement.name, wanted, "missing", advice)
        else:
            yield Fact(requirement.name, version)
    advice = f"only for a GPU: {extra_advice('cuda13')}, or [cuda12] for an older driver"
    yield _optional_fact("cupy", ("cupy-cuda13x", "cupy-cuda12x"), advice)
    yield _optional_fact(
        "ray", ("ray",), f"only for workers that Ray starts: {extra_advice('ray')}"
    )


def _optional_fact(name: str, distributions: Sequence[str], advice: str) -> Fact:
    for each in distributions:
        if (version := _version(each)) is not None:
            return Fact(each, version)
    return Fact(name, "not installed", "optional", advice)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def worker_facts(command: list[str]) -> Iterator[Fact]:
    """Yield the facts that the worker's ``command`` prints."""
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_ROOT), *([inherited] if inherited else [])])
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=WORKER_TIMEOUT,
            env={**os.environ, "PYTHONPATH": path},
            check=True,
        )
        found = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Fact("worker", f"doesn't start: {reason}", "missing", "see Packages above")
    except (subprocess.TimeoutExpired, ValueError) as error:
        yield Fact("worker", f"doesn't answer: {error}", "missing", "see Packages above")
    else:
        for name, value in found.items():
            yield Fact(_words(name), _as_line(name, value))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _as_line(name: str, value: Any) -> str:
    if isinstance(value, dict):
        items = value.items()
        return ", ".join(
            f"{_words(key.removesuffix('_bytes'))} {_as_line(key, item)}" for key, item in items
        )
    if isinstance(value, list):
        between = ", " if all(isinstance(item, str) for item in value) else "\n"
        return between.join(_as_line(name, item) for item in value) or "none"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else str(value)


def model_facts() -> Iterator[Fact]:
    """Yield the models with known names, and the Hub's cache."""
    for name in KNOWN_MODELS:
        try:
            path = locate(name)
        except ModelLoadError as error:
            yield Fact(name, "not installed", "optional", str(error).rpartition(": ")[2])
        else:
            yield Fact(name, f"{path} ({path.stat().st_size / 2**20:.0f} MiB)")
    if importlib.util.find_spec("huggingface_hub") is None:
        return  # The packages report that.
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*")))
    offline = ", offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else ""
    yield Fact("Hub cache", f"{models} models in {cache}{offline}")
