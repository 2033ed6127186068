"""A first-time reader's path on a clean machine, timed: ``python -m bench.first_time``.

From a fresh clone of this tree's last commit and an empty environment: the README's command until
the server listens, a first reply, the console, Ctrl-C, the second start, and the tutorial's
program with an engine of its own. Packages are downloaded and kernels compiled again. A start
prints to a pseudo-terminal; the longest time without any output is noted.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import httpx

from bench.report import markdown, script

ROOT = Path(__file__).parent.parent
_LISTENS = re.compile(r"Serving .* at (\S+)\r?\n")
"""A line that removes the progress bars stands before it."""
INSTALL = "python -m pip install nox && python -m nox -s serve -- --port 0"
AGAIN = "python -m nox -s serve -- --port 0"
_ASKED = {"role": "user", "content": "What is the capital of France?"}
QUESTION = {"messages": [_ASKED], "temperature": 0, "max_tokens": 30}


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


def started(command: str, folder: Path, environment: Mapping[str, str]) -> Server:
    """Start a command and return the server that came of it, once it listens."""
    ours, theirs = pty.openpty()
    how = {"cwd": folder, "env": environment, "start_new_session": True}
    process = subprocess.Popen(["bash", "-c", command], stdout=theirs, stderr=theirs, **how)
    os.close(theirs)
    text, silence, last = "", 0.0, time.perf_counter()
    for part in _output(ours):
        now = time.perf_counter()
        silence, last, text = max(silence, now - last), now, text + part.decode("utf-8", "replace")
        if listens := _LISTENS.search(text):
            # Its further output is read and dropped, so that the terminal doesn't fill.
            threading.Thread(target=deque, args=(_output(ours), 0), daemon=True).start()
            return Server(process, listens[1], silence)
    code = process.wait()
    raise RuntimeError(f"no server came of {command}: exit code {code}\n{text[-2000:]}")


def _output(descriptor: int) -> Iterator[bytes]:
    # A pseudo-terminal that everything has closed fails to be read.
    with contextlib.suppress(OSError):
        while given := os.read(descriptor, 65536):
            yield given


def ask(url: str) -> str:
    """Return a first reply."""
    reply = httpx.post(f"{url}/v1/chat/completions", json=QUESTION, timeout=None)
    return str(reply.json()["choices"][0]["message"]["content"])


def open_console(url: str) -> int:
    """Read the console's page and the files that it names; return how many came."""
    page = httpx.get(f"{url}/console", follow_redirects=True)
    files = re.findall(r'(?:src|href)="([^":]+\.\w+)"', page.text)
    for file in files:
        httpx.get(page.url.join(file)).raise_for_status()
    return 1 + len(files)


def stories() -> str:
    """Return the tutorial's program."""
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (program,) = [each for each in programs if "def tell" in each]
    return program


def walk(folder: Path) -> dict[str, float]:
    """Walk the whole path, below an empty folder, and return the seconds of each part."""
    parts: dict[str, float] = {}
    clone, own = folder / "trioserve", folder / "python"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HF_HOME")}
    environment["PATH"] = f"{own / 'bin'}:{os.environ['PATH']}"
    environment |= {"XDG_CACHE_HOME": str(folder / "cache"), "PIP_NO_CACHE_DIR": "1"}

    def timed(what: str, act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        result = act(*arguments, **options)
        parts[what] = time.perf_counter() - begun
        print(f"{parts[what]:8.1f} s  {what}", file=sys.stderr, flush=True)
        return result

    run = partial(subprocess.run, check=True)
    run([sys.executable, "-m", "venv", str(own)])
    timed("clone the project", run, ["git", "clone", "--quiet", ROOT.as_uri(), str(clone)])
    install = "the README's command: install everything, start, listen"
    server = timed(install, started, INSTALL, clone, environment)
    parts[f"{install} (at most {server.silence:.0f} s without a sign)"] = parts.pop(install)
    timed("a first reply", ask, server.url)
    timed("the console's page and files", open_console, server.url)
    timed("Ctrl-C, until all has ended", server.stop)
    timed("the second start", started, AGAIN, clone, environment).stop()
    (clone / "stories.py").write_text(stories())
    program = [str(clone / ".nox" / "serve" / "bin" / "python"), "stories.py"]
    tutorial = "the tutorial's program: an engine of its own, three stories, the end"
    timed(tutorial, run, program, cwd=clone, env=environment, stdout=subprocess.DEVNULL)
    return parts


def table(parts: Mapping[str, float]) -> str:
    """Return what took how long, as Markdown."""
    lines = [[what, f"{seconds:.2f}"] for what, seconds in parts.items()]
    lines.append(["**all of it**", f"**{sum(parts.values()):.0f}**"])
    return markdown(["what", "seconds"], lines)


@script
def measure() -> str:
    """Walk, and return a table."""
    with tempfile.TemporaryDirectory(prefix="first-time-") as folder:
        return table(walk(Path(folder)))
