"""The process that speaks with Ray: ``python -m trioserve.workers.ray.driver``.

Ray's calls block, and it takes signal handlers, threads and standard output of its process. So the
engine has one for it, with commands on standard input and events on standard output
(:mod:`trioserve.workers.ray.messages`). The process ends when its standard input does. Actors and
placement groups belong to its job, so Ray removes them then, and also when it is killed.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import queue
import signal
import sys
import threading
from typing import Any

import msgspec

from trioserve.workers.ray.messages import (
    RayCommand,
    RayConnected,
    RayEvent,
    RayFailed,
    to_line,
)
from trioserve.workers.ray.placement import ActorPlacement, Send, one_line

INTERVAL = 0.5
"""Seconds between two looks at actors and placement groups."""


def main() -> None:
    """Connect, and do what the engine says until its end of standard input closes."""
    events = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # Ray prints.
    commands: queue.SimpleQueue[RayCommand] = queue.SimpleQueue()

    def send(event: RayEvent) -> None:
        events.write(to_line(event))

    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    # The engine may be gone.
    with contextlib.suppress(BrokenPipeError):
        try:
            _serve(commands, send)
        except ImportError as error:
            send(RayFailed(reason=f"{error}: install trioserve[ray]"))
        except Exception as error:  # Ray has no base class for what its calls raise.
            send(RayFailed(reason=one_line(error)))


def _serve(commands: queue.SimpleQueue[RayCommand], send: Send) -> None:
    import ray as typed

    ray: Any = typed  # Parts of it have no types.
    try:
        ray.init(
            include_dashboard=False,
            configure_logging=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        # Ray tells nowhere else if it has joined a cluster or started one.
        is_local = ray._private.worker.global_worker.node.is_head()
        placement = ActorPlacement(ray, is_local, send)
        send(RayConnected(host="127.0.0.1" if is_local else ray.util.get_node_ip_address()))
        while True:
            with contextlib.suppress(queue.Empty):
                placement.take(commands.get(timeout=INTERVAL))
            placement.look()
    finally:
        ray.shutdown()


def _leave(*_: object) -> None:
    sys.exit(0)


def _read(commands: queue.SimpleQueue[RayCommand]) -> None:
    """Take the engine's commands. At their end, interrupt whatever call of Ray is under way."""
    decoder = msgspec.json.Decoder(RayCommand)
    for line in sys.stdin.buffer:
        commands.put(decoder.decode(line))
    _thread.interrupt_main(signal.SIGTERM)


if __name__ == "__main__":
    main()
