"""The wall between the two packages: trioserve has no torch, the worker has no trio."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit.layers import SHARED
from tests.support.source_files import ROOT, imports_of, modules_of

FORBIDDEN_IN_TRIOSERVE = {"torch", "cupy", "gpu", "asyncio", "pickle"}
FORBIDDEN_IN_GPU = {"trio", "hypercorn", "quart", "quart_trio", "pynng.trio", "asyncio", "pickle"}
FOR_ASYNCIO = {
    "trioserve/engine/offline/async_generation.py",
    "trioserve/engine/offline/async_llm.py",
}
"""The modules that wait in an asyncio program's loop, and so import asyncio."""

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, {package!r} + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def loaded_by(program: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after ``program``."""
    report = "\nimport sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program + report],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_what_the_worker_shares_loads_neither_trio_nor_torch() -> None:
    program = "import trioserve\n" + "\n".join(f"import {name}" for name in sorted(SHARED))
    assert loaded_by(program).isdisjoint({"trio", "torch", "cupy", "gpu", "asyncio"})


def test_the_command_line_answers_before_it_loads_a_server() -> None:
    program = "import trioserve.cli.flags; from trioserve.cli.parser import parse; "
    loaded = loaded_by(program + "parse(['serve', '--port', '1'])")
    assert loaded.isdisjoint({"trio", "hypercorn", "quart", "rich", "tokenizers", "numpy", "torch"})


def test_no_module_of_trioserve_loads_torch() -> None:
    loaded = loaded_by(IMPORT_ALL.format(package="trioserve"))
    assert {"trio", "hypercorn", "tokenizers", "pynng"} <= loaded
    assert loaded.isdisjoint({"torch", "cupy", "gpu", "transformers"})


def test_no_module_of_the_worker_loads_trio() -> None:
    loaded = loaded_by(IMPORT_ALL.format(package="gpu"))
    assert {"torch", "trioserve"} <= loaded
    assert loaded.isdisjoint({"trio", "hypercorn", "quart", "transformers"})


def test_signals_are_handled_by_the_command_line_and_the_worker_process_alone() -> None:
    handlers = [
        str(path.relative_to(ROOT))
        for package in ("trioserve", "gpu")
        for path in modules_of(package)
        if any(is_under(name, {"signal"}) for name in imports_of(path))
    ]
    commands = ["chat", "commands", "signals", "top/command"]
    # Those that kill, and know what others kill with, and what all processes do at SIGUSR1.
    others = [
        "_util/child_process",
        "_util/job_child",
        "_util/job_server",
        "front_ends/__main__",
        "front_ends/processes/process",
        "observability/signals",
        "workers/process",
        "workers/ray/driver",
    ]
    assert sorted(handlers) == sorted([
        *(f"trioserve/cli/{name}.py" for name in commands),
        *(f"trioserve/{name}.py" for name in others),
        *(f"gpu/cpu/{name}.py" for name in ("following", "node", "rank_processes")),
        "gpu/models/parallel/link.py",
        "gpu/models/transformers_models/tower_process.py",
        "gpu/worker.py",
    ])  # fmt: skip


def is_under(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


@pytest.mark.parametrize(
    "path", modules_of("trioserve"), ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_module_of_trioserve_names_nothing_of_the_worker(path: Path) -> None:
    for_asyncio = str(path.relative_to(ROOT)) in FOR_ASYNCIO
    forbidden = FORBIDDEN_IN_TRIOSERVE - ({"asyncio"} if for_asyncio else set())
    assert [name for name in imports_of(path) if is_under(name, forbidden)] == []


@pytest.mark.parametrize("path", modules_of("gpu"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_of_the_worker_names_nothing_of_the_server(path: Path) -> None:
    names = list(imports_of(path))
    assert [name for name in names if is_under(name, FORBIDDEN_IN_GPU)] == []
    ours = [name for name in names if is_under(name, {"trioserve"})]
    # "from trioserve import wire" names trioserve.wire.
    assert [name for name in ours if not is_under(name, set(SHARED))] == []
