"""Sends every message back: ``python -m bench.micro.echo URL``. Ends with its standard input."""

from __future__ import annotations

import os
import sys
import threading

import pynng

from trioserve.protocol import wire


def _exit_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with pynng.Pair0(
        dial=sys.argv[1],
        block_on_dial=True,
        recv_max_size=wire.MAX_MESSAGE_BYTES,
        recv_buffer_size=wire.BUFFERED_MESSAGES,
        send_buffer_size=wire.BUFFERED_MESSAGES,
    ) as ours:
        ours.send(wire.encode(wire.Quit()))  # it is there
        while True:
            ours.send(ours.recv())


if __name__ == "__main__":
    main()
