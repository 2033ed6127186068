"""Clients that need an environment of their own, against the real server.

What they ask is in ``tests/clients/programs``: programs for Node.js, and for a Python without the
project. Their packages are installed there on first use, and again when what is pinned has changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.model_server import MODEL, ROOT, Server

CLIENTS = ROOT / "tests" / "clients" / "programs"
NODE = CLIENTS / "node"
PYTHON = ROOT / ".nox" / "clients"
LOCK = ROOT / ".nox" / "clients.lock"


def run(*command: str | Path, folder: Path, **environment: str) -> None:
    """Run a command, with a time limit; what it said is the failure, if it fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        pytest.fail(f"{command[0]} didn't end:\n{said}", pytrace=False)
    if done.returncode:
        pytest.fail(
            f"{command[0]} ended with status {done.returncode}:\n{done.stdout}", pytrace=False
        )


@contextlib.contextmanager
def outdated(folder: Path, *pins: Path) -> Iterator[bool]:
    """Tell whether ``folder`` is outdated; leaving the block notes a fresh installation.

    A lock keeps other processes from installing into it.
    """
    LOCK.parent.mkdir(exist_ok=True)
    wanted = hashlib.sha256(sys.version.encode())
    for file in pins:
        wanted.update(file.read_bytes())
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note = folder / "installed.sha256"
        is_outdated = not note.exists() or note.read_text() != wanted.hexdigest()
        yield is_outdated
        if is_outdated:
            note.write_text(wanted.hexdigest())


@pytest.fixture(scope="module")
def node() -> str:
    """Node.js, with the packages that ``tests/clients/programs/node`` names beside its programs."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.fail("install Node.js 20 or newer, and npm", pytrace=False)
    version = subprocess.check_output([node, "--version"], text=True).strip()
    if int(version.removeprefix("v").split(".")[0]) < 20:
        pytest.fail(f"install Node.js 20 or newer: this is {version}", pytrace=False)
    with outdated(NODE / "node_modules", NODE / "package-lock.json") as is_outdated:
        if is_outdated:
            quiet = ("--no-audit", "--no-fund", "--loglevel", "error")
            run(npm, "ci", "--ignore-scripts", *quiet, folder=NODE)
    return node


@pytest.fixture(scope="module")
def python() -> Path:
    """A Python with the packages of ``tests/clients/programs/requirements.txt``."""
    requirements = CLIENTS / "requirements.txt"
    python = PYTHON / "bin" / "python"
    with outdated(PYTHON, requirements) as is_outdated:
        if is_outdated:
            venv.create(PYTHON, clear=True)
            # All of them are pinned, so nothing is left to resolve.
            pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
            run(*pip, "--no-deps", "--no-compile", "--requirement", requirements, folder=CLIENTS)
    return python


def where(server: Server) -> dict[str, str]:
    """Return what tells a program which server to ask."""
    return {"SERVER_URL": server.url, "SERVER_KEY": "secret", "SERVER_MODEL": MODEL}


@pytest.mark.parametrize("program", sorted(file.name for file in NODE.glob("*.test.js")))
def test_clients_on_node(node: str, server: Server, program: str) -> None:
    run(node, "--test", "--test-reporter=spec", program, folder=NODE, **where(server))


@pytest.mark.parametrize("program", sorted(file.name for file in CLIENTS.glob("with_*.py")))
def test_clients_in_python(python: Path, server: Server, program: str) -> None:
    # Without the project's own configuration, plugins and path: none of it is installed there.
    alone = ("-c", os.devnull, "--rootdir", ".", "--confcutdir", ".", "-p", "no:cacheprovider")
    # A test that waits shows where it does.
    alone += ("-s", "-o", "faulthandler_timeout=180", "-o", "faulthandler_exit_on_timeout=true")
    place = {**where(server), "PYTHONPATH": "", "PYTEST_ADDOPTS": ""}
    run(python, "-m", "pytest", "-q", "--tb=short", *alone, program, folder=CLIENTS, **place)
