"""A worker behind a link that damages a message: stands between the engine and a real worker.

``python -P -m tests.faults.damage --connect URL --kind KIND --direction DIRECTION --after N`` is to
the engine at ``URL`` what ``python -P -m gpu --connect URL`` is. It starts a worker of its own and
passes all messages on, but does harm to the N-th plan, or to the N-th result.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pynng

from trioserve.protocol import wire

DIRECTIONS = ("to engine", "to worker")
KINDS: dict[str, Callable[[bytes, random.Random], list[bytes]]] = {
    "truncated": lambda data, numbers: [data[: numbers.randrange(len(data))]],
    "wrong beginning": lambda data, numbers: [numbers.randbytes(4) + data[4:]],
    "trailing bytes": lambda data, numbers: [data + numbers.randbytes(16)],
    "noise": lambda data, numbers: [numbers.randbytes(len(data))],
    "empty": lambda data, numbers: [b""],
    "dropped": lambda data, numbers: [],
    "twice": lambda data, numbers: [data, data],
    "flipped bits": lambda data, numbers: [_flipped(data, numbers)],
}
"""The sorts of damage: what arrives in place of a message."""


def _flipped(data: bytes, numbers: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(3):
        flipped[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    return bytes(flipped)


def _pump(
    source: pynng.Pair0, drain: pynng.Pair0, counted: type, given: argparse.Namespace | None
) -> None:
    """Pass messages on until a socket closes, and harm one that is ``counted``, if ``given``."""
    left = given.after if given else 0
    with contextlib.suppress(pynng.Closed):
        while True:
            data = source.recv()
            parts = [data]
            if left and isinstance(wire.decode(data), counted):
                left -= 1
                if not left:
                    parts = KINDS[given.kind](data, random.Random(given.seed))
            for part in parts:
                drain.send(part)


def main() -> None:
    """Stand in between until one side is gone."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.damage", description=__doc__)
    parser.add_argument("--connect", required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--direction", choices=DIRECTIONS, required=True)
    parser.add_argument("--after", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    bounds = {"recv_max_size": wire.MAX_MESSAGE_BYTES, "recv_buffer_size": wire.BUFFERED_MESSAGES}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-proxy-"))
        url = f"ipc://{folder}/worker.sock"
        worker_side = stack.enter_context(pynng.Pair0(listen=url, **bounds))
        engine_side = stack.enter_context(pynng.Pair0(dial=given.connect, **bounds))
        command = [sys.executable, "-P", "-m", "gpu", "--connect", url]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE)

        def follow_parent() -> None:
            while os.read(0, 4096):
                pass
            worker.kill()

        harm = {
            direction: given if direction == given.direction else None for direction in DIRECTIONS
        }
        to_engine = partial(_pump, worker_side, engine_side, wire.StepResult, harm["to engine"])
        to_worker = partial(_pump, engine_side, worker_side, wire.Plan, harm["to worker"])
        for run in (follow_parent, to_engine, to_worker):
            threading.Thread(target=run, daemon=True).start()
        code = worker.wait()
    sys.exit(code if code >= 0 else 128 - code)


def command(url: str, **words: object) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of such a worker, as ``worker_command`` does."""
    root = str(Path(__file__).absolute().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    words = {"connect": url, **words}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    program = [sys.executable, "-P", "-m", "tests.faults.damage"]
    return [*program, *options], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    main()
