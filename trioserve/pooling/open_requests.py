"""The open pooling requests of a process, which can be aborted from outside."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import attrs
import trio

from trioserve.protocol.errors import RequestAborted, TrioserveError


@attrs.define(eq=False)
class _Open:
    id: str
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    error: TrioserveError | None = None

    def end(self, error: TrioserveError) -> bool:
        """End the request with ``error``; return False if it had been ended before."""
        if self.error is not None:
            return False
        self.error = error
        self.scope.cancel()
        return True


@attrs.define(eq=False)
class OpenRequests:
    """The requests with an open scope.

    Args:
        on_none: Called whenever the last request has ended.
    """

    on_none: Callable[[], None] = lambda: None
    _open: dict[_Open, None] = attrs.field(init=False, factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def opened(self, id: str) -> Iterator[None]:
        """Open a block that :meth:`abort` and :meth:`end_all` can end.

        Raises:
            TrioserveError: The error that the block was ended with.
        """
        request = _Open(id)
        self._open[request] = None
        try:
            with request.scope:
                yield
        finally:
            del self._open[request]
            if not self._open:
                self.on_none()
        if request.scope.cancelled_caught:
            assert request.error is not None
            raise request.error

    def end_all(self, error: TrioserveError) -> None:
        """End all requests with ``error``. Never blocks."""
        for request in list(self._open):
            request.end(error)

    def abort(self, id: str, *, prefix: bool) -> int:
        """Abort requests by name or prefix of it; return how many there were. Never blocks."""
        error = RequestAborted("the request was aborted")
        named = [
            request
            for request in self._open
            if (request.id.startswith(id) if prefix else request.id == id)
        ]
        return sum(request.end(error) for request in named)
