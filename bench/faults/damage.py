"""A worker behind a link that damages a message: stands between the engine and a real worker.

``python -P -m bench.faults.damage --connect URL --kind KIND --direction DIRECTION --after N`` is to
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
"""What may become of a message, by name."""


def _flipped(data: bytes, numbers: random.Random) -> bytes:
    flipped = bytearray(data)
    for _ in range(3):
        flipped[numbers.randrange(len(data))] ^= 1 << numbers.randrange(8)
    return bytes(flipped)


def damaged(kind: str, data: bytes, numbers: random.Random) -> list[bytes]:
    """What arrives in place of ``data``."""
    return KINDS[kind](data, numbers)


class _Proxy:
    def __init__(self, given: argparse.Namespace, engine: pynng.Pair0, worker: pynng.Pair0) -> None:
        self._given = given
        self._ends = {"to engine": (worker, engine), "to worker": (engine, worker)}
        self._numbers = random.Random(given.seed)

    def pump(self, direction: str) -> None:
        """Pass messages on in one direction until a socket closes."""
        source, drain = self._ends[direction]
        harmful = direction == self._given.direction
        counted = wire.StepResult if direction == "to engine" else wire.Plan
        left = self._given.after
        with contextlib.suppress(pynng.Closed):
            while True:
                data = source.recv()
                parts = [data]
                if harmful and left > 0 and isinstance(wire.decode(data), counted):
                    left -= 1
                    if left == 0:
                        parts = damaged(self._given.kind, data, self._numbers)
                for part in parts:
                    drain.send(part)


def main() -> None:
    """Stand in between until one side is gone."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults.damage", description=__doc__)
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
        worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "gpu", "--connect", url], stdin=subprocess.PIPE
        )

        def follow_parent() -> None:
            while os.read(0, 4096):
                pass
            worker.kill()

        proxy = _Proxy(given, engine_side, worker_side)
        for run in (
            follow_parent,
            lambda: proxy.pump("to engine"),
            lambda: proxy.pump("to worker"),
        ):
            threading.Thread(target=run, daemon=True).start()
        code = worker.wait()
    sys.exit(code if code >= 0 else 128 - code)


def command(
    url: str, kind: str, direction: str, after: int, seed: int
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of such a worker, as ``worker_command`` gives them."""
    root = str(Path(__file__).absolute().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    words = {"connect": url, "kind": kind, "direction": direction, "after": after, "seed": seed}
    options = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    return [
        *(sys.executable, "-P", "-m", "bench.faults.damage"),
        *options,
    ], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


if __name__ == "__main__":
    main()
