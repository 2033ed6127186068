"""A first-time reader's path on a clean machine, timed: ``python -m bench.first_time``.

From a fresh clone of this tree's last commit and an empty environment: the README's command until
the server listens, a first reply, the console, Ctrl-C, the second start, and the tutorial's
program with an engine of its own. Packages are downloaded again unless ``--pip-cache`` is given,
and kernels compiled again. What a start prints goes to a pipe, or with ``--terminal`` to a
pseudo-terminal; the longest time without any output is noted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from bench.report import markdown, run_script

ROOT = Path(__file__).parent.parent
_LISTENS = re.compile(r"Serving .* at (\S+)\r?\n")
"""On a terminal, what took the progress bars away stands before it."""
INSTALL = "python -m pip install nox && python -m nox -s serve -- --port 0"
AGAIN = "python -m nox -s serve -- --port 0"
QUESTION = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 30,
}


@attrs.frozen
class Part:
    """A part of the path, and how long it took."""

    what: str
    seconds: float


@contextlib.contextmanager
def timed(parts: list[Part], what: str) -> Iterator[None]:
    """Add the time that the block takes to ``parts``."""
    begun = time.perf_counter()
    yield
    parts.append(Part(what, time.perf_counter() - begun))
    print(f"{parts[-1].seconds:8.1f} s  {what}", file=sys.stderr, flush=True)


@attrs.frozen
class Server:
    """A server at ``url``; ``silence`` is its longest time without output before it listened."""

    process: subprocess.Popen[bytes]
    url: str
    silence: float

    def stop(self) -> None:
        """Send Ctrl-C, as a terminal does, and wait until all has ended."""
        os.killpg(self.process.pid, signal.SIGINT)
        self.process.wait()


@attrs.define
class _Reader:
    """The output of a command, read by a thread until its end, so that no pipe fills."""

    descriptor: int
    text: str = ""
    silence: float = 0.0
    """The longest time without output until the server listened."""
    _listens: threading.Event = attrs.field(factory=threading.Event)

    def url(self) -> str | None:
        """Block until the server listens, and return its address; None if it has ended."""
        threading.Thread(target=self._read, daemon=True).start()
        self._listens.wait()
        found = _LISTENS.search(self.text)
        return found[1] if found else None

    def _read(self) -> None:
        last = time.perf_counter()
        # A pseudo-terminal that everything has closed fails to be read.
        with contextlib.suppress(OSError):
            while given := os.read(self.descriptor, 65536):
                if self._listens.is_set():
                    continue
                now = time.perf_counter()
                self.silence, last = max(self.silence, now - last), now
                self.text += given.decode("utf-8", "replace")
                if _LISTENS.search(self.text):
                    self._listens.set()
        self._listens.set()


def started(
    command: str, folder: Path, environment: Mapping[str, str], *, terminal: bool = False
) -> Server:
    """Start a command and return the server that came of it, once it listens."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    how = {"cwd": folder, "env": environment, "start_new_session": True}
    process = subprocess.Popen(["bash", "-c", command], stdout=theirs, stderr=theirs, **how)
    os.close(theirs)
    reader = _Reader(ours)
    url = reader.url()
    if url is None:
        end = reader.text[-2000:]
        raise RuntimeError(f"no server came of {command}: exit code {process.wait()}\n{end}")
    return Server(process, url, reader.silence)


def ask(url: str) -> str:
    """Return a first reply."""
    headers = {"Content-Type": "application/json"}
    asked = {"data": json.dumps(QUESTION).encode(), "headers": headers}
    request = urllib.request.Request(f"{url}/v1/chat/completions", **asked)
    with urllib.request.urlopen(request) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def open_console(url: str) -> int:
    """Read the console's page and the files that it names; return how many came."""
    with urllib.request.urlopen(f"{url}/console") as response:
        base, page = response.url, response.read().decode()
    files = re.findall(r'(?:src|href)="([^":]+\.\w+)"', page)
    for file in files:
        with urllib.request.urlopen(urllib.parse.urljoin(base, file)) as response:
            response.read()
    return 1 + len(files)


def stories() -> str:
    """Return the tutorial's program."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [each for each in programs if "def tell" in each]
    return program


def walk(folder: Path, *, pip_cache: bool, terminal: bool = False) -> list[Part]:
    """Walk the whole path, below an empty folder."""
    parts: list[Part] = []
    clone, own = folder / "trioserve", folder / "python"
    left_out = ("PYTHONPATH", "HF_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    path, cache = f"{own / 'bin'}:{os.environ['PATH']}", str(folder / "cache")
    environment |= {"PATH": path, "XDG_CACHE_HOME": cache}
    if not pip_cache:
        environment["PIP_NO_CACHE_DIR"] = "1"
    subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
    with timed(parts, "clone the project"):
        subprocess.run(["git", "clone", "--quiet", ROOT.as_uri(), str(clone)], check=True)
    with timed(parts, "the README's command: install everything, start, listen"):
        server = started(INSTALL, clone, environment, terminal=terminal)
    shown = f"{parts[-1].what} (at most {server.silence:.0f} s without a sign)"
    parts[-1] = attrs.evolve(parts[-1], what=shown)
    with timed(parts, "a first reply"):
        ask(server.url)
    with timed(parts, "the console's page and files"):
        open_console(server.url)
    with timed(parts, "Ctrl-C, until all has ended"):
        server.stop()
    with timed(parts, "the second start"):
        server = started(AGAIN, clone, environment, terminal=terminal)
    server.stop()
    (clone / "stories.py").write_text(stories())
    with timed(parts, "the tutorial's program: an engine of its own, three stories, the end"):
        program = [str(clone / ".nox" / "serve" / "bin" / "python"), "stories.py"]
        subprocess.run(program, check=True, cwd=clone, env=environment, stdout=subprocess.DEVNULL)
    return parts


def table(parts: Sequence[Part]) -> str:
    """Return what took how long, as Markdown."""
    lines = [[part.what, f"{part.seconds:.2f}"] for part in parts]
    lines.append(["**all of it**", f"**{sum(part.seconds for part in parts):.0f}**"])
    return markdown(["what", "seconds"], lines)


def measure(options: argparse.Namespace) -> str:
    """Walk, and return a table."""
    with tempfile.TemporaryDirectory(prefix="first-time-") as folder:
        return table(walk(Path(folder), pip_cache=options.pip_cache, terminal=options.terminal))


def main(arguments: Sequence[str] | None = None) -> int:
    """Walk and print a table."""
    return run_script("first_time", measure, arguments, pip_cache=False, terminal=False)


if __name__ == "__main__":
    sys.exit(main())
