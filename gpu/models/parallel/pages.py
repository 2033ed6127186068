"""The pages of a model that several ranks have, as they leave it for files or other workers.

To all others a page is that of one process: layer by layer, and in each layer the heads of keys and
values one after the other. Each rank has its layers and heads of it. Rank 0 gathers the parts, and
hands them out, over connections that nothing else uses. A thread of each rank answers there, so
pages move beside the steps. They move once the rank has computed the steps that were sent before
the transfer began.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from gpu.executor import Content
from gpu.models.parallel.link import RankLink
from gpu.models.parallel.model_part import ModelPart
from gpu.models.parallel.stage_link import receive_into
from gpu.models.parallel.steps import BeginTransfer, encode_step

_REQUEST = struct.Struct("<qqQ")
"""Number of a page, of the transfers begun before, and of the bytes to write, or 0 to read it."""
_WRITTEN = b"w"


class PagedPart(Protocol):
    """The model of one rank, with its part of each page."""

    def read_page(self, number: int) -> Content:
        """See :meth:`gpu.cpu.model.CpuModel.read_page`."""
        ...

    def write_page(self, number: int, content: Content) -> None:
        """See :meth:`gpu.cpu.model.CpuModel.write_page`."""


class LeadingPages:
    """The pages of all ranks, as rank 0 reads and writes them.

    Args:
        link: The messages to the other ranks, and the connections for pages.
        parts: The parts of the model that the ranks have, in their order.
    """

    def __init__(self, link: RankLink, parts: Sequence[ModelPart]) -> None:
        whole = parts[0].whole
        self._link = link
        self._heads = whole.num_layers, whole.num_kv_heads
        self._places = [part.of_page() for part in parts]
        self._num_begun = 0
        self._moving = threading.Lock()
        """Held while the ranks read or write a page."""

    def begin(self) -> None:
        """Begin a transfer, in the thread of the steps.

        Its pages are read and written once all ranks have computed the steps before.
        """
        with self._link.in_step():
            self._link.send(encode_step(BeginTransfer()))
        self._num_begun += 1

    def read(self, number: int, model: PagedPart) -> Content:
        """Return the content of page ``number``, of which ``model`` has the part of rank 0."""
        own = model.read_page(number)
        layers, heads = self._places[0]
        num_heads = (layers.stop - layers.start) * (heads.stop - heads.start)
        content = np.empty((*self._heads, len(own) // num_heads), dtype=np.uint8)
        parts = [content[place] for place in self._places]
        parts[0][:] = own.reshape(parts[0].shape)
        with self._moving, self._link.in_step():
            for connection in self._link.pages:
                connection.sendall(_REQUEST.pack(number, self._num_begun, 0))
            for connection, part in zip(self._link.pages, parts[1:], strict=True):
                part[:] = receive_into(connection, np.empty(part.shape, dtype=np.uint8))
        return content.reshape(-1)

    def write(self, number: int, content: Content, model: PagedPart) -> None:
        """Write ``content`` to page ``number``; rank 0 has its part in ``model``.

        Raises:
            ValueError: A page has another size.
        """
        every = content.reshape(*self._heads, -1)
        own, *others = [np.ascontiguousarray(every[place]).reshape(-1) for place in self._places]
        model.write_page(number, own)
        with self._moving, self._link.in_step():
            for connection, part in zip(self._link.pages, others, strict=True):
                connection.sendall(_REQUEST.pack(number, self._num_begun, len(part)))
                connection.sendall(part.data)
            for connection in self._link.pages:
                receive_into(connection, np.empty(len(_WRITTEN), dtype=np.uint8))


class FollowingPages:
    """The pages of another rank, which it reads and writes as rank 0 says.

    ``model`` returns its model.
    """

    def __init__(self, link: RankLink, model: Callable[[], PagedPart]) -> None:
        self._link = link
        self._model = model
        self._num_begun = 0
        self._has_begun = threading.Condition()

    def begin(self) -> None:
        """Note that the steps before a transfer are computed."""
        with self._has_begun:
            self._num_begun += 1
            self._has_begun.notify()

    def start(self) -> None:
        """Start the thread that answers rank 0, until that ends; none if pages don't leave."""
        for connection in self._link.pages:
            threading.Thread(
                target=self._answer_all, args=(connection,), name="pages", daemon=True
            ).start()

    def _answer_all(self, connection: socket.socket) -> None:
        # Rank 0 has ended then, which ends this process.
        with self._link.in_step(), contextlib.suppress(EOFError, OSError):
            while True:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        request = receive_into(connection, np.empty(_REQUEST.size, dtype=np.uint8))
        number, num_begun, length = _REQUEST.unpack(request.data)
        content = receive_into(connection, np.empty(length, dtype=np.uint8))
        with self._has_begun:
            self._has_begun.wait_for(lambda: self._num_begun >= num_begun)
        if length:
            self._model().write_page(number, content)
            connection.sendall(_WRITTEN)
        else:
            connection.sendall(self._model().read_page(number).data)
