"""The ways from stage to stage, and from the last one back to rank 0, over sockets."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_SENT_FOR_A_PLAN = 2
"""Arrays that go from a stage to the next one for a plan: hidden states, and times."""
_SENT_BACK = 2
"""Arrays that may wait to be sent to rank 0; a slice of logits has 64 MiB."""


class StageLink:
    """The connections of a rank to the ranks of its number in the stages before and behind it.

    The stages are a ring: what the last one sends is received by the first one.

    Args:
        number: Number of the rank among all of the worker; those of a stage follow each other.
        size: Number of ranks of a stage.
        num_stages: Number of stages.
        sockets: Connections to the stage before and behind.
    """

    def __init__(
        self,
        number: int,
        size: int,
        num_stages: int,
        sockets: Sequence[socket.socket],
    ) -> None:
        self.num_stages = num_stages
        self.stage, self.rank = divmod(number, size)
        self.is_first, self.is_last = self.stage == 0, self.stage == num_stages - 1
        self.sockets = tuple(sockets)
        most = _SENT_BACK if self.is_last else _SENT_FOR_A_PLAN * (num_stages + 1)
        self._unsent: queue.Queue[bytes] = queue.Queue(most)
        self._sender: threading.Thread | None = None

    def send(self, numbers: npt.NDArray[Any]) -> None:
        """Send a copy of ``numbers`` to the stage behind, without waiting until it takes them."""
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_all, daemon=True)
            self._sender.start()
        self._unsent.put(numbers.tobytes())

    def receive(self, into: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return what the stage before has sent, in the memory of ``into``, which is contiguous.

        Raises:
            EOFError: It has ended.
        """
        return receive_into(self.sockets[0], into)

    def _send_all(self) -> None:
        # A process that has ended ends this one, too.
        with contextlib.suppress(OSError):
            while True:
                self.sockets[1].sendall(self._unsent.get())


def receive_into(connection: socket.socket, into: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what the other side has sent, in the memory of ``into``, which is contiguous.

    Raises:
        EOFError: It has ended.
    """
    rest = into.reshape(-1).view(np.uint8).data
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise EOFError("the other rank has ended")
        rest = rest[count:]
    return into
